"""From a configuration to a fleet that can train: data, split, initial model.

The simulator and the Flower adapter both start here, so a seeded experiment begins alike in both.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from anycostfl import data, models
from anycostfl.config import Config
from anycostfl.errors import ConfigError, TraceError
from anycostfl.shrink import ElasticModel
from anycostfl.state import tensors_of
from anycostfl.train import TrainOptions, bf16_pays
from anycostfl.types import Scale
from anycostfl.workers import DeviceSide, Shared

PARTITION = 201  # the purpose of the generator that splits the data


def settle(config: Config) -> Config:
    """Decide what is left to the machine, so that a saved configuration says it all."""
    given = config.training
    device, precision = given.device, given.precision
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            ["training.device: given cuda, which this machine lacks; allowed here cpu, auto"]
        )
    if precision == "auto":
        precision = "bf16" if device == "cpu" and bf16_pays() else "fp32"
    return replace(config, training=replace(given, device=device, precision=precision))


def load_data(config: Config) -> tuple[data.Dataset, data.Partition]:
    """The dataset, and the samples of every device."""
    dataset = data.load(config.data.name, config.data.path)
    return dataset, split(config, dataset)


def split(config: Config, dataset: data.Dataset) -> data.Partition:
    """The samples of every device."""
    random = np.random.default_rng([config.run.seed, PARTITION])
    labels, devices = dataset.train_labels.numpy(), config.fleet.devices
    if config.data.partition == "iid":
        return data.split_iid(labels, devices, random)
    return data.split_dirichlet(labels, devices, config.data.concentration, random)


def prepare(config: Config, scale: Scale | None = None, *, whole: bool = False) -> DeviceSide:
    """Load the data, split it over the fleet, initialise the global model.

    A real device is told the `scale` of the experiment's data; if it trains on all of its own, the
    `whole` is not split.
    """
    dataset = data.load(config.data.name, config.data.path, scale)
    parts = [np.arange(len(dataset.train_labels))] if whole else split(config, dataset)
    with torch.random.fork_rng():
        torch.manual_seed(config.run.seed)
        module = models.load(config.model.name).build()
    shared = Shared(
        model=config.model.name,
        widths=config.model.widths,
        method=config.run.method,
        options=train_options(settle(config)),
        weights={name: tensor.detach() for name, tensor in tensors_of(module).items()},
        train_images=dataset.train_images,
        train_labels=dataset.train_labels,
        test_images=dataset.test_images,
        test_labels=dataset.test_labels,
        samples=torch.from_numpy(np.concatenate(parts)),
        ends=torch.tensor([len(part) for part in parts]).cumsum(0),
        scale=Scale(dataset.mean, dataset.std),
    )
    try:
        side = DeviceSide(shared)
    except TraceError:
        _check_images(config, dataset)
        raise
    _check_classes(side, dataset)
    _check_workload(config, side)
    return side


def _check_images(config: Config, dataset: data.Dataset) -> None:
    """The model failed on images; perhaps it expects others."""
    images = tuple(dataset.train_images.shape[1:])
    expected = tuple(models.load(config.model.name).example(1).shape[1:])
    if images != expected:
        raise ConfigError(
            [f"data.name: {dataset.name} has images of {images}, but model {config.model.name} "
             f"takes {expected}; choose another model, or bring one that takes them "
             "(docs/extend.md)"]
        )  # fmt: skip


def _check_workload(config: Config, side: DeviceSide) -> None:
    """W of the images that the model expects is not W of images of another size."""
    spec, given = models.load(config.model.name), config.workload.flops_per_sample
    shape = side.shared.train_images.shape[1:]
    if shape == spec.example(1).shape[1:]:
        return
    expected = ElasticModel(spec.build(), spec.example(2)).training_flops
    measured = side.net.training_flops
    if given == expected != measured:
        raise ConfigError(
            [f"workload.flops_per_sample: given {given:.6g}, but with images of {tuple(shape)} "
             f"{config.model.name} takes {measured:.6g}; "
             f"--set workload.flops_per_sample={measured:.6g}"]
        )  # fmt: skip


def _check_classes(side: DeviceSide, dataset: data.Dataset) -> None:
    """Every label must be one of the model's outputs."""
    with torch.inference_mode():
        outputs = side.net.shrink(1.0).module.eval()(dataset.train_images[:2]).shape[-1]
    if dataset.classes > outputs:
        raise ConfigError(
            [f"data.name: {dataset.name} has labels up to {dataset.classes - 1}, but model "
             f"{side.shared.model} has {outputs} outputs; allowed labels 0 to {outputs - 1}"]
        )  # fmt: skip


def train_options(config: Config) -> TrainOptions:
    """How devices train, from a settled configuration."""
    given = config.training
    return TrainOptions(
        learning_rate=given.learning_rate,
        batch=given.batch,
        epochs=config.workload.epochs,
        momentum=given.momentum,
        weight_decay=given.weight_decay,
        clip_norm=given.clip_norm,
        bf16=given.precision == "bf16",
        channels_last=given.channels_last,
        winograd=given.winograd,
        device=given.device,
    )
