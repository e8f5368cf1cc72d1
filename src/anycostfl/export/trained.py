"""The trained model of a run, and sub-models of it that are ready for inference (Sec. V)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn

from anycostfl import methods, models, tasks
from anycostfl.config import Config, parse_config
from anycostfl.data.files import DataMissingError
from anycostfl.data.prepare import PreparedModule, prepare_dataset
from anycostfl.data.samples import Dataset, Samples, Tree
from anycostfl.device import measure
from anycostfl.errors import AlphaError
from anycostfl.experiment import elastic
from anycostfl.files import StorageError
from anycostfl.metrics import score
from anycostfl.records.round import Records
from anycostfl.records.run import read_run
from anycostfl.shrink import ElasticModel, SubModel, calibration_batches, recalibrate
from anycostfl.state import State
from anycostfl.tasks import Task


@dataclass(frozen=True, slots=True, eq=False)
class TrainedModel:
    """The model of a run after `rounds` rounds, with channels in the order in which they are cut.

    `order` says whether they were sorted; `remarks` are about damage in the run directory.
    `example` makes random prepared inputs of a batch size. `raw` reads the dataset when needed, as
    it is before preparation, and `data` after it.
    """

    config: Config
    rounds: int
    net: ElasticModel
    order: str
    remarks: tuple[str, ...]
    task: Task
    example: Callable[[int], Tree]
    raw: Callable[[], Dataset]
    data: Callable[[], Dataset]


def open_trained(folder: Path) -> TrainedModel:
    """The newest intact checkpoint of a run directory, important channels first."""
    saved = read_run(folder)
    if saved.checkpoint is None:
        why = "".join(f"; {remark}" for remark in saved.remarks)
        raise StorageError(
            f"{folder} has no checkpoint to export{why}; continue training with: "
            f"anycostfl run --resume {folder}"
        )
    config = parse_config(saved.config, str(folder))
    spec = models.load(config.model.name)
    net = elastic(spec.build(), spec.example(2), inference_rule(config))
    point = saved.checkpoint
    model = {**point["model"], **point["average"]}
    order = load_sorted(net, model, config, saved.records)
    task = tasks.load(config.data.name)
    raw = cache(partial(task.dataset, config.data.path))
    return TrainedModel(
        config=config,
        rounds=saved.checkpoint.rounds,
        net=net,
        order=order,
        remarks=saved.remarks,
        task=task,
        example=spec.example,
        raw=raw,
        data=cache(lambda: prepare_dataset(task.preparation, raw())),
    )


def inference_rule(config: Config) -> str:
    """The width rule of exported models: `fast` is for training, inference works at any width."""
    return "even" if config.model.widths == "fast" else config.model.widths


def load_sorted(net: ElasticModel, weights: State, config: Config, records: Records) -> str:
    """Load trained weights, important channels first where that is right; says which it was."""
    net.load(weights)
    # Not where sub-models were trained as prefixes of the channels in their fixed order (HeteroFL).
    shrunk = any(0 < d.alpha < 1 for record in records for d in record.devices)
    method = methods.load(config.run.method)
    sort = method.sorts_channels or method.rolls_channels or not shrunk
    if sort:
        net.sort_channels()
    return "importance" if sort else "as trained"


def cut(trained: TrainedModel, alpha: float) -> SubModel:
    """A sub-model ready for inference, with BatchNorm statistics measured at its own width."""
    least = least_alpha(trained.net)
    if 0 < alpha < least:
        raise AlphaError(
            f"{trained.config.model.name} cannot be as narrow as alpha = {alpha:g}; "
            f"must be at least {least:.4g}"
        )
    sub = trained.net.shrink(alpha)
    recalibrate(sub.module, calibration_inputs(trained))
    sub.module.eval()
    return sub


def least_alpha(net: ElasticModel) -> float:
    """The FLOPs ratio of the narrowest sub-model."""
    return net.plan(1e-12).flops_ratio if net.tied_widths else 1.0


def calibration_inputs(trained: TrainedModel) -> Iterator[Tree]:
    """Batches of training samples; the dataset is read when the first one is requested."""
    yield from calibration_batches(trained.data().train.inputs)


def metadata_of(trained: TrainedModel, sub: SubModel | None = None) -> dict[str, Any]:
    """The metadata of a file, with what inputs were prepared by."""
    config = trained.config
    metadata: dict[str, Any] = {
        "model": config.model.name,
        "widths": trained.net.rule,
        "order": trained.order,
        "rounds": trained.rounds,
        "method": config.run.method,
        "data": Path(config.data.name).name,
    }
    if sub is not None:
        metadata |= {"alpha": sub.plan.alpha, "flops_ratio": sub.plan.flops_ratio}
    with suppress(DataMissingError):
        metadata |= {name: values.tolist() for name, values in trained.data().fitted.items()}
    return metadata


def metric_of(
    trained: TrainedModel, module: nn.Module, samples: Samples | None = None
) -> float | None:
    """The metric of a module on the test samples of the run, prepared ones unless given."""
    training = replace(trained.config.training, device="cpu")
    first = trained.task.metrics[:1]
    tested = replace(trained.data().test if samples is None else samples, owners=None)
    sums = measure(module, tested, first, training)
    found = score(first, [sums] if sums else [])
    return found.value if found else None


@dataclass(frozen=True, slots=True, eq=False)
class Deployed:
    """What a file computes: a module, and inputs of a batch size as the file takes them.

    `is_raw` says whether the module prepares its inputs itself; `test` are test samples for it.
    """

    module: nn.Module
    inputs: Callable[[int], Tree]
    is_raw: bool
    test: Callable[[], Samples]


def deploy(trained: TrainedModel, sub: SubModel, *, prepare: bool = True) -> Deployed:
    """A sub-model with the preparation of its inputs inside, if the task has one."""
    how = trained.task.preparation
    if how is None or not prepare:
        return Deployed(sub.module, trained.example, how is None, lambda: trained.data().test)
    try:
        raw, data = trained.raw(), trained.data()
    except DataMissingError as error:
        why = "the data says how raw input is prepared; --no-preparation exports without that"
        raise DataMissingError(f"{error} ({why})") from error

    def inputs(batch: int) -> Tree:
        return raw.test.take(slice(0, batch)).inputs

    def test() -> Samples:  # a preparation may change targets as well
        return Samples(raw.test.inputs, data.test.targets)

    module = PreparedModule(sub.module, how, data.fitted).eval()
    return Deployed(module, inputs, True, test)
