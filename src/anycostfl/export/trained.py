"""The trained model of a run, and sub-models of it that are ready for inference (Sec. V)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from anycostfl import data, methods, models
from anycostfl.config import Config, parse_config
from anycostfl.device import count_correct
from anycostfl.errors import AlphaError
from anycostfl.files import StorageError
from anycostfl.records.run import read_run
from anycostfl.shrink import ElasticModel, SubModel, calibration_batches, recalibrate


@dataclass(frozen=True, slots=True, eq=False)
class TrainedModel:
    """The model of a run after `rounds` rounds, with channels in the order in which they are cut.

    `order` says whether they were sorted; `remarks` are about damage in the run directory.
    """

    config: Config
    rounds: int
    net: ElasticModel
    order: str
    remarks: tuple[str, ...]

    def example(self, batch: int) -> Tensor:
        """A random input of this batch size."""
        return models.load(self.config.model.name).example(batch)


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
    # `fast` rounds widths for training speed; inference works at any width.
    rule = "even" if config.model.widths == "fast" else config.model.widths
    net = ElasticModel(spec.build(), spec.example(2), rule=rule)
    net.load(saved.checkpoint["model"])
    # Not where sub-models were trained as prefixes of the channels in their fixed order (HeteroFL).
    shrunk = any(0 < d.alpha < 1 for record in saved.records for d in record.devices)
    sort = methods.load(config.run.method).sorts_channels or not shrunk
    if sort:
        net.sort_channels()
    order = "importance" if sort else "as trained"
    return TrainedModel(config, saved.checkpoint.rounds, net, order, saved.remarks)


def cut(trained: TrainedModel, alpha: float) -> SubModel:
    """A sub-model ready for inference, with BatchNorm statistics measured at its own width."""
    least = least_alpha(trained.net)
    if 0 < alpha < least:
        raise AlphaError(
            f"{trained.config.model.name} cannot be as narrow as alpha = {alpha:g}; "
            f"must be at least {least:.4g}"
        )
    sub = trained.net.shrink(alpha)
    recalibrate(sub.module, calibration_images(trained.config))
    sub.module.eval()
    return sub


def least_alpha(net: ElasticModel) -> float:
    """The FLOPs ratio of the narrowest sub-model."""
    return net.plan(1e-12).flops_ratio if net.tied_widths else 1.0


def calibration_images(config: Config) -> Iterator[Tensor]:
    """Batches of training images; the dataset is read when the first one is requested."""
    yield from calibration_batches(_dataset(config).train_images)


_load_data = lru_cache(maxsize=1)(data.load)


def _dataset(config: Config) -> data.Dataset:
    return _load_data(config.data.name, config.data.path)


def metadata_of(trained: TrainedModel, sub: SubModel | None = None) -> dict[str, Any]:
    """The metadata of a file; `mean` and `std` are those by which inputs were normalised."""
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
    with suppress(data.DataMissingError):
        dataset = _dataset(config)
        metadata |= {"mean": dataset.mean, "std": dataset.std}
    return metadata


def accuracy_of(trained: TrainedModel, sub: SubModel) -> float:
    """Accuracy of a sub-model on the test images of the run."""
    dataset, training = _dataset(trained.config), replace(trained.config.training, device="cpu")
    test = dataset.test_images, dataset.test_labels
    return count_correct(sub.module, test, training) / len(dataset.test_labels)
