"""From a configuration to a frozen `Experiment`: everything a round needs, resolved once.

Data belongs to its holder. The server holds a test set and a few batches to calibrate BatchNorm on,
or nothing, and then devices evaluate. Training samples belong to devices: to each its own over
Flower, to the simulated fleet all of them (`split`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from anycostfl import models, tasks
from anycostfl.config import Config, fingerprint
from anycostfl.data.prepare import prepare_dataset
from anycostfl.data.samples import Dataset, Samples, Tree, call, describe
from anycostfl.data.split import Partition, split_samples
from anycostfl.device import DeviceRuntime, Training, bf16_pays
from anycostfl.errors import ConfigError, TaskError, TraceError
from anycostfl.methods import Method
from anycostfl.metrics import Metric, Score, main_output, score
from anycostfl.planning.strategy import Limits
from anycostfl.server.aggregate import ServerOptimizer
from anycostfl.server.downlink import Downlink, check_share, first_public
from anycostfl.shrink import ElasticModel, calibration_batches
from anycostfl.state import State, clone_state
from anycostfl.tasks import Task

IGNORED = -100  # the target that torch's cross-entropy leaves out
PARTITION = 201  # the purpose of the generator that splits the data


@dataclass(frozen=True, slots=True, eq=False)
class Experiment:
    """One experiment on the server, resolved.

    `net` is traced once; its module is scratch space, the global weights are in `ServerState`.
    `fitted` is what samples are prepared by. `test` and `calibration` are empty where the server
    has no data. `trained` and `blocks` are what every assignment needs of the model.
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
    fitted: State
    test: Samples | None
    calibration: tuple[Tree, ...]
    trained: tuple[str, ...]
    blocks: Mapping[str, int]

    def evaluate(self, weights: State) -> Score | None:
        """How good a model is on the server's test samples; None without any."""
        if self.test is None:
            return None
        self.net.load(weights)
        chunks = self.runtime.measure(self.net.shrink(1.0).module, self.test)
        return score(self.task.metrics, list(chunks))

    @property
    def task(self) -> Task:
        """What is learnt."""
        return self.runtime.task

    def with_training(self, **changes: Any) -> Experiment:
        """The same experiment with other fields of `Training`."""
        config = replace(self.config, training=replace(self.config.training, **changes))
        training = replace(self.runtime.training, **changes)  # as this machine trains
        digest = fingerprint(config)
        return replace(
            self,
            config=config,
            runtime=replace(self.runtime, training=training),
            fingerprint=digest,
            downlink=self.downlink and replace(self.downlink, fingerprint=digest),
        )


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


def load_data(config: Config) -> Dataset:
    """The dataset of an experiment, prepared."""
    task, path = tasks.load(config.data.name), config.data.path
    return prepared(task, path, validation=config.data.validation)


def prepared(task: Task, path: str = "", *, validation: bool = False) -> Dataset:
    """The dataset of a task as models take it; with a part of its training samples to test on."""
    dataset = task.dataset(path)
    if validation:
        dataset = tasks.hold_out_tenth(dataset)
    return prepare_dataset(task.preparation, dataset)


def split(config: Config, samples: Samples) -> Partition:
    """The training samples of every device of a simulated fleet."""
    random = splitting_generator(config.run.seed)
    return split_samples(config.data, samples, config.fleet.devices, random)


def splitting_generator(seed: int) -> np.random.Generator:
    """What a split is drawn from: the same on the server and on devices."""
    return np.random.default_rng([seed, PARTITION])


def build_experiment(
    config: Config,
    dataset: Dataset | None = None,
    *,
    task: Task | None = None,
    net: ElasticModel | None = None,
) -> Experiment:
    """Trace the initial model; the dataset, if given, is what the server may see, prepared.

    Task and model are those that the configuration names, unless they are given.
    """
    method, digest = config.method_of(config.run.method), fingerprint(config)
    task = task or tasks.load(config.data.name)
    if net is None:
        name, widths = config.model.name, config.model.widths
        module = initial_module(name, config.run.seed)
        net = trace_model(name, widths, module, dataset.train if dataset else None)
    module, weights = net.module, clone_state(net.module)
    training = resolve_training(config.training)
    runtime = DeviceRuntime(task, method, net, training, config.workload.epochs)
    calibration: tuple[Tree, ...] = ()
    if dataset is not None:
        check_fit(task, net, dataset.train)
        _check_workload(config, net, dataset.train)
        if _has_batch_norm(module):
            calibration = tuple(calibration_batches(dataset.train.inputs))
    downlink = None
    if share := config.compression.downlink:
        check_share(share, first_public(module))
        downlink = Downlink(net, share, digest)
    return Experiment(
        config=config,
        method=method,
        limits=config.limits_of(config.run.method),
        optimizer=replace(
            config.server_optimizer,
            step=config.server_optimizer.step * method.step,
            momentum=method.momentum,
            kind=method.server,
            average=method.average,
        ),
        net=net,
        runtime=runtime,
        fingerprint=digest,
        downlink=downlink,
        initial_weights=weights,
        fitted=dataset.fitted if dataset else {},
        test=dataset.test if dataset else None,
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
    name: str, widths: str, module: nn.Module, samples: Samples | None = None
) -> ElasticModel:
    """The model made elastic, on samples that it will see, or on random ones of its own."""
    if samples is None:
        with torch.random.fork_rng():
            return elastic(module, models.load(name).example(2), widths)
    example = samples.take(slice(0, 2)).inputs
    try:
        return elastic(module, example, widths)
    except TraceError as error:
        raise _unfit(name, example) or error from error


def elastic(module: nn.Module, example: Tree, widths: str) -> ElasticModel:
    """The model traced on an example, whose parts are passed as the module takes them."""
    if isinstance(example, Tensor):
        return ElasticModel(module, example, rule=widths)
    if isinstance(example, Mapping):
        return ElasticModel(module, rule=widths, **example)
    return ElasticModel(module, *example, rule=widths)


def _unfit(name: str, example: Tree) -> ConfigError | None:
    """What to say if the model fails because it takes other samples than the task has."""
    if name not in models.names() or describe(taken := models.load(name).example(2)) == describe(
        example
    ):
        return None
    return ConfigError(
        [f"data: given samples of {describe(example)}, but model {name} takes {describe(taken)}; "
         "choose another model, or write one that takes them (docs/tutorials/own-data.md)"]
    )  # fmt: skip


def _has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())


def _check_workload(config: Config, net: ElasticModel, samples: Samples) -> None:
    """W of the samples that the model expects is not W of samples of another size."""
    given, name = config.workload.flops_per_sample, config.model.name
    if name not in models.names():
        return
    spec, example = models.load(name), samples.take(slice(0, 2)).inputs
    if describe(example) == describe(spec.example(2)):
        return
    expected = elastic(spec.build(), spec.example(2), "sqrt").training_flops
    measured = net.training_flops
    if given == expected != measured:
        raise ConfigError(
            [f"workload.flops_per_sample: given {given:.6g}, but with samples of "
             f"{describe(example)} {name} takes {measured:.6g}; "
             f"--set workload.flops_per_sample={measured:.6g}"]
        )  # fmt: skip


# --- does everything fit together? ----------------------------------------------------------------


def check_fit(task: Task, net: ElasticModel, samples: Samples) -> None:
    """Try model, loss and metrics on two samples, so that what does not fit is said at once."""
    few, module = samples.take(slice(0, 2)), net.shrink(1.0).module.eval()
    outputs = call(module, few.inputs)
    _check_classes(main_output(outputs), samples.targets)
    given = f"outputs {describe(outputs)} and targets {describe(few.targets)}"
    try:
        loss = task.loss(outputs, few.targets)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"the loss fails on {given}: {error}") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise TaskError(f"the loss returned {what} on {given}; must be one number, such as a mean")
    if not loss.requires_grad:
        raise TaskError(
            "the loss has no gradient: it must be computed from the outputs by operations of "
            "torch, without .detach(), .item(), argmax or numpy"
        )
    if not math.isfinite(loss.item()):
        raise TaskError(f"the loss of the untrained model is {loss.item()} on two samples")
    for metric in task.metrics:
        _check_metric(metric, outputs, few.targets, given)


def _check_metric(metric: Metric, outputs: Tree, targets: Tree, given: str) -> None:
    try:
        with torch.no_grad():
            rows = metric.rows(outputs, targets)
            if rows.dim() != 2 or len(rows) != len(tree_leaves(targets)[0]):
                shape = tuple(rows.shape)
                raise TaskError(
                    f"metric {metric.name}: its rows have shape {shape}, must be (sample, sums)"
                )
            value = float(metric.value(rows.double().sum(0)))
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"metric {metric.name} fails on {given}: {error}") from error
    if math.isnan(value):
        raise TaskError(f"metric {metric.name}: returned no number on {given}")


def _check_classes(scores: Tensor, targets: Tree) -> None:
    """Classes, where targets are, must be outputs of the model."""
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return
    if scores.dim() != targets.dim() + 1:
        return  # no scores of classes
    first = scores.shape[:1] + scores.shape[2:] == scores.shape[:1] + targets.shape[1:]
    classes = scores.shape[1 if first else -1]
    bad = ((targets >= classes) | (targets < 0)) & (targets != IGNORED)
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise ConfigError(
            [f"targets: sample {at[0]} is of class {int(targets[at])}, but the model has {classes} "
             f"outputs; must be 0 to {classes - 1}"]
        )  # fmt: skip
