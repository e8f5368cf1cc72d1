"""From a configuration to a frozen `Experiment`: everything a round needs, resolved once.

Data belongs to its holder. The server holds a test set and a few batches to calibrate BatchNorm on,
or nothing, and then devices evaluate. Training samples belong to devices: to each its own over
Flower, to the simulated fleet all of them (`split`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from anycostfl import data, models
from anycostfl.config import Config, Data, fingerprint
from anycostfl.device import DeviceRuntime, Samples, Training, bf16_pays
from anycostfl.errors import ConfigError, TraceError
from anycostfl.methods import Method
from anycostfl.planning.strategy import Limits
from anycostfl.server.aggregate import ServerOptimizer
from anycostfl.server.downlink import Downlink, check_share, first_public
from anycostfl.shrink import ElasticModel, calibration_batches
from anycostfl.state import State, clone_state

PARTITION = 201  # the purpose of the generator that splits the data


@dataclass(frozen=True, slots=True, eq=False)
class Experiment:
    """One experiment on the server, resolved.

    `net` is traced once; its module is scratch space, the global weights are in `ServerState`.
    `test` and `calibration` are empty where the server has no data. `trained` and `blocks` are what
    every assignment needs of the model.
    """

    config: Config
    method: Method
    limits: Limits
    optimizer: ServerOptimizer
    net: ElasticModel
    runtime: DeviceRuntime
    fingerprint: str
    downlink: Downlink | None
    initial_weights: State
    scale: data.Scale | None
    test: Samples | None
    calibration: tuple[Tensor, ...]
    trained: tuple[str, ...]
    blocks: Mapping[str, int]

    def accuracy(self, weights: State) -> float | None:
        """Of a model on the server's test data; None without any."""
        if self.test is None:
            return None
        self.net.load(weights)
        return self.runtime.count_correct(self.test) / len(self.test[1])


def resolve(config: Config) -> Config:
    """Decide what is left to the machine, so that a saved configuration is complete."""
    return replace(config, training=resolve_training(config.training))


def resolve_training(given: Training) -> Training:
    """How this machine trains: on what, and with which precision."""
    device, precision = given.device, given.precision
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            ["training.device: given cuda, which this machine lacks; must be cpu or auto here"]
        )
    if precision == "auto":
        precision = "bf16" if device == "cpu" and bf16_pays() else "fp32"
    return replace(given, device=device, precision=precision)


def load_data(config: Config) -> data.Dataset:
    """The dataset of an experiment."""
    return data.load(config.data.name, config.data.path)


def split(given: Data, devices: int, seed: int, dataset: data.Dataset) -> data.Partition:
    """The samples of every device of a simulated fleet."""
    random, labels = np.random.default_rng([seed, PARTITION]), dataset.train_labels.numpy()
    if given.partition == "iid":
        return data.split_iid(labels, devices, random)
    return data.split_dirichlet(labels, devices, given.concentration, random)


def build_experiment(config: Config, dataset: data.Dataset | None = None) -> Experiment:
    """Initialise and trace the global model; the dataset, if given, is what the server may see."""
    method, digest = config.method_of(config.run.method), fingerprint(config)
    module = initial_module(config.model.name, config.run.seed)
    weights = clone_state(module)
    net = trace_model(config.model.name, config.model.widths, module, dataset)
    if dataset is not None:
        _check_workload(config, net, dataset)
    calibration: tuple[Tensor, ...] = ()
    if dataset is not None and _has_batch_norm(module):
        calibration = tuple(calibration_batches(dataset.train_images))
    downlink = None
    if share := config.compression.downlink:
        check_share(share, first_public(module))
        downlink = Downlink(net, share, digest)
    return Experiment(
        config=config,
        method=method,
        limits=config.limits_of(config.run.method),
        optimizer=replace(config.server_optimizer, momentum=method.momentum),
        net=net,
        runtime=DeviceRuntime(
            method, net, resolve_training(config.training), config.workload.epochs
        ),
        fingerprint=digest,
        downlink=downlink,
        initial_weights=weights,
        scale=data.Scale(dataset.mean, dataset.std) if dataset else None,
        test=(dataset.test_images, dataset.test_labels) if dataset else None,
        calibration=calibration,
        trained=tuple(name for name, p in module.named_parameters() if p.requires_grad),
        blocks=net.blocks(),
    )


def initial_module(model: str, seed: int) -> nn.Module:
    """The global model before the first round: the same for the same seed, on any machine."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return models.load(model).build()


def trace_model(
    model: str, widths: str, module: nn.Module, dataset: data.Dataset | None = None
) -> ElasticModel:
    """The model made elastic, checked against the data it will see."""
    if dataset is None:
        with torch.random.fork_rng():
            return ElasticModel(module, models.load(model).example(2), rule=widths)
    try:
        net = ElasticModel(module, dataset.train_images[:2], rule=widths)
    except TraceError:
        _check_images(model, dataset)
        raise
    _check_classes(model, net, dataset)
    return net


def _has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())


def _check_images(model: str, dataset: data.Dataset) -> None:
    """The model failed on images; perhaps it expects others."""
    images = tuple(dataset.train_images.shape[1:])
    expected = tuple(models.load(model).example(1).shape[1:])
    if images != expected:
        raise ConfigError(
            [f"data.name: {dataset.name} has images of {images}, but model {model} "
             f"takes {expected}; choose another model, or write one that takes them "
             "(docs/extend.md)"]
        )  # fmt: skip


def _check_workload(config: Config, net: ElasticModel, dataset: data.Dataset) -> None:
    """W of the images that the model expects is not W of images of another size."""
    spec, given = models.load(config.model.name), config.workload.flops_per_sample
    shape = dataset.train_images.shape[1:]
    if shape == spec.example(1).shape[1:]:
        return
    expected = ElasticModel(spec.build(), spec.example(2)).training_flops
    measured = net.training_flops
    if given == expected != measured:
        raise ConfigError(
            [f"workload.flops_per_sample: given {given:.6g}, but with images of {tuple(shape)} "
             f"{config.model.name} takes {measured:.6g}; "
             f"--set workload.flops_per_sample={measured:.6g}"]
        )  # fmt: skip


def _check_classes(model: str, net: ElasticModel, dataset: data.Dataset) -> None:
    """Every label must be one of the model's outputs."""
    with torch.inference_mode():
        outputs = net.shrink(1.0).module.eval()(dataset.train_images[:2]).shape[-1]
    if dataset.classes > outputs:
        raise ConfigError(
            [f"data.name: {dataset.name} has labels up to {dataset.classes - 1}, but model "
             f"{model} has {outputs} outputs; labels must be 0 to {outputs - 1}"]
        )  # fmt: skip
