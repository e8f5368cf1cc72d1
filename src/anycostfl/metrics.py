"""How good outputs are: sums over samples that add up over chunks and devices, then one number.

    accuracy     share of correct predictions
    perplexity   exp of the mean negative log-likelihood of a token
    mae, rmse    mean absolute error, root of the mean squared error
    iou          intersection over union of predicted and true classes, mean over classes

Classes are dimension 1 of the outputs, as torch's own losses have them, or the last one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from anycostfl.checks import FINITE
from anycostfl.errors import TaskError, UnknownNameError

Loss = Callable[[Any, Any], Tensor]
"""Outputs and targets of a batch → a scalar with a gradient."""


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """How a metric is shown: its name, its unit, what a value is multiplied by; which is better."""

    name: str = "accuracy"
    unit: str = "%"
    factor: Annotated[float, FINITE] = 100.0
    higher_is_better: bool = True

    def show(self, value: float | None) -> str:
        """A value with its unit, such as `83.65 %`."""
        if value is None or not math.isfinite(value):
            return "–"
        return f"{self.figure(value)} {self.unit}".rstrip()

    def figure(self, value: float | None) -> str:
        """A value without its unit."""
        if value is None or not math.isfinite(value):
            return "–"
        figure = self.factor * value
        return f"{figure:.2f}" if self.unit == "%" else f"{figure:.4g}"

    @property
    def title(self) -> str:
        """The label of an axis."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    @property
    def bound(self) -> str:
        """What stands before a best value of a run that went no further."""
        return "≥ " if self.higher_is_better else "≤ "

    def reaches(self, value: float | None, target: float) -> bool:
        """Whether a value is at least as good as the target."""
        if value is None or not math.isfinite(value):
            return False
        return value >= target if self.higher_is_better else value <= target

    def best(self, values: list[float]) -> float | None:
        """The best of some values."""
        return (max if self.higher_is_better else min)(values, default=None)


@dataclass(frozen=True, slots=True)
class Metric:
    """One measure of a model.

    rows: outputs and targets of a batch → sums of every sample, of shape (sample, k).
    value: the sums over all samples, of shape (k,) → one number.
    bounds: between which values are possible, where a device says its own.
    """

    info: MetricInfo
    rows: Callable[[Any, Any], Tensor]
    value: Callable[[Tensor], float]
    bounds: tuple[float, float] = (-math.inf, math.inf)

    @property
    def name(self) -> str:
        """What tables and journals call it."""
        return self.info.name

    def is_possible(self, sums: Tensor) -> bool:
        """Whether these could be sums of some samples: their value is a number within bounds."""
        try:
            value = self.value(sums)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            return False  # not as many as this metric has, or of no samples
        low, high = self.bounds
        return math.isfinite(value) and low <= value <= high

    @classmethod
    def mean(
        cls,
        name: str,
        of_batch: Callable[[Any, Any], Any],
        *,
        higher_is_better: bool,
        unit: str = "",
    ) -> Metric:
        """The mean over samples of a function that returns a number for each, or for a batch."""
        rows = partial(_rows_of_batch, name, of_batch)
        return cls(MetricInfo(name, unit, 1.0, higher_is_better), rows, ratio)


def _rows_of_batch(
    name: str, of_batch: Callable[[Any, Any], Any], outputs: Any, targets: Any
) -> Tensor:
    """The number of each sample, or that of the batch as if every sample had it."""
    given, count = of_batch(outputs, targets), len(_first(targets))
    try:
        values = torch.as_tensor(given, dtype=torch.float64).detach().cpu()
        values = values.expand(count) if values.numel() == 1 else values.reshape(count)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TaskError(
            f"metric {name}: the function returned {given!r:.80}, must be one number for each "
            f"sample, or one for a batch"
        ) from error
    return torch.stack([values, torch.ones_like(values)], dim=1)


@dataclass(frozen=True, slots=True)
class Score:
    """The value of a task's first metric, and other values by their names."""

    value: float
    others: Mapping[str, float] = field(default_factory=dict)


def score(
    metrics: Sequence[Metric],
    chunks: Sequence[Sequence[Tensor]],
    known: Tensor | None = None,
    *,
    worst: bool = False,
) -> Score | None:
    """What sums of shape (owner, k) come to; nothing without samples.

    `known` are the owners of training samples: where test samples belong to some of them and to
    others, the first metric is told for both. `worst` also tells that of the worst tenth of owners.
    """
    if not chunks:
        return None
    sums = [torch.stack(list(parts)).sum(0) for parts in zip(*chunks, strict=True)]
    values = {m.name: m.value(total.sum(0)) for m, total in zip(metrics, sums, strict=True)}
    first, *_ = metrics
    value = values.pop(first.name)
    if known is not None:
        is_known = torch.zeros(len(sums[0]), dtype=torch.bool)
        is_known[known] = True
        tested = sums[0].any(1)
        halves = {"known": tested & is_known, "new": tested & ~is_known}
        if all(half.any() for half in halves.values()):
            values |= {
                f"{first.name}, {kind} owners": first.value(sums[0][half].sum(0))
                for kind, half in halves.items()
            }
    if worst and sums[0].any(1).sum() > 1:
        values[f"{first.name}, worst tenth"] = _worst_tenth(first, sums[0])
    return Score(value, values)


def _worst_tenth(metric: Metric, sums: Tensor) -> float:
    """The mean over the tenth of the owners where a metric is worst; at least one."""
    better = 1 if metric.info.higher_is_better else -1
    each = sorted((metric.value(row) for row in sums[sums.any(1)]), key=lambda v: better * v)
    return statistics.fmean(each[: max(1, len(each) // 10)])


def find_metric(given: Metric | str) -> Metric:
    """A metric by its name, or as it is."""
    if isinstance(given, Metric):
        return given
    if not isinstance(given, str):
        raise TaskError(
            f"metric: given {given!r:.80}, must be a Metric or one of {', '.join(METRICS)}; "
            "Metric.mean(name, function, higher_is_better=…) makes one of a function"
        )
    if given not in METRICS:
        raise UnknownNameError(f"no metric {given!r}; there are {', '.join(METRICS)}")
    return METRICS[given]


def ratio(sums: Tensor) -> float:
    """The first sum over the second."""
    return float(sums[0] / sums[1])


def main_output(outputs: Any) -> Tensor:
    """The tensor to measure: `logits` of a dict that has them, or else the first one."""
    if isinstance(outputs, Mapping) and isinstance(outputs.get("logits"), Tensor):
        found: Tensor = outputs["logits"]
        return found
    return _first(outputs)


def _first(tree: Any) -> Tensor:
    found = next((leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)), None)
    if found is None:
        raise TaskError(f"the model returned {type(tree).__name__}, must be or hold a tensor")
    return found


def _classes_first(outputs: Any, targets: Tensor) -> Tensor:
    """The outputs with classes as dimension 1."""
    scores = main_output(outputs)
    if scores.shape[:1] + scores.shape[2:] == targets.shape:
        return scores
    if scores.dim() > 2 and scores.shape[:-1] == targets.shape:
        return scores.movedim(-1, 1)
    raise TaskError(
        f"the model returned {tuple(scores.shape)} for targets {tuple(targets.shape)}; must be "
        "one score for each class, (sample, class, …), and one class for each target"
    )


def _like_targets(outputs: Any, targets: Tensor) -> Tensor:
    """Numbers beside their targets; a dimension of one more or less does not matter."""
    numbers = main_output(outputs)
    if numbers.numel() != targets.numel():
        raise TaskError(
            f"the model returned {tuple(numbers.shape)} for targets {tuple(targets.shape)}; must "
            "be one number for each target"
        )
    return numbers.reshape(targets.shape)


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """The loss of predicting classes."""
    return F.cross_entropy(_classes_first(outputs, targets), targets)


def squared_error(outputs: Any, targets: Tensor) -> Tensor:
    """The loss of predicting numbers."""
    return F.mse_loss(_like_targets(outputs, targets), targets)


def _sums(values: Tensor) -> Tensor:
    """Sum and count of the values of every sample."""
    flat = values.double().reshape(len(values), -1)
    return torch.stack([flat.sum(1), torch.full_like(flat[:, 0], flat.shape[1])], dim=1)


def _correct(outputs: Any, targets: Tensor) -> Tensor:
    """Where predictions are correct; a single score per target is a yes above 0."""
    scores = main_output(outputs)
    if scores.numel() == targets.numel():
        return (scores.reshape(targets.shape) > 0) == (targets > 0)
    return _classes_first(outputs, targets).argmax(1) == targets


def _overlaps(outputs: Any, targets: Tensor) -> Tensor:
    """Intersections, then unions, of every class."""
    scores = _classes_first(outputs, targets)
    count = scores.shape[1]
    predicted = F.one_hot(scores.argmax(1), count).flatten(1, -2).bool()
    true = F.one_hot(targets, count).flatten(1, -2).bool()
    return torch.cat([(predicted & true).sum(1), (predicted | true).sum(1)], dim=1).double()


def _mean_overlap(sums: Tensor) -> float:
    """Over the classes that occur."""
    shared, either = sums.chunk(2)
    return float((shared[either > 0] / either[either > 0]).mean())


def _rows_of_accuracy(outputs: Any, targets: Tensor) -> Tensor:
    return _sums(_correct(outputs, targets))


def _rows_of_perplexity(outputs: Any, targets: Tensor) -> Tensor:
    scores = _classes_first(outputs, targets).float()
    return _sums(F.cross_entropy(scores, targets, reduction="none"))


def _rows_of_mae(outputs: Any, targets: Tensor) -> Tensor:
    return _sums((_like_targets(outputs, targets) - targets).abs())


def _rows_of_rmse(outputs: Any, targets: Tensor) -> Tensor:
    return _sums((_like_targets(outputs, targets) - targets).square())


def _perplexity(sums: Tensor) -> float:
    return math.exp(min(ratio(sums), 700.0))


def _root(sums: Tensor) -> float:
    return math.sqrt(ratio(sums))


SHARE, AT_LEAST_ZERO = (0.0, 1.0), (0.0, math.inf)

ACCURACY = Metric(MetricInfo(), _rows_of_accuracy, ratio, SHARE)
PERPLEXITY = Metric(
    MetricInfo("perplexity", "", 1.0, higher_is_better=False),
    _rows_of_perplexity,
    _perplexity,
    AT_LEAST_ZERO,
)
MAE = Metric(MetricInfo("mae", "", 1.0, higher_is_better=False), _rows_of_mae, ratio, AT_LEAST_ZERO)
RMSE = Metric(
    MetricInfo("rmse", "", 1.0, higher_is_better=False), _rows_of_rmse, _root, AT_LEAST_ZERO
)
IOU = Metric(MetricInfo("iou"), _overlaps, _mean_overlap, SHARE)

METRICS = {metric.name: metric for metric in (ACCURACY, PERPLEXITY, MAE, RMSE, IOU)}
"""The metrics that go by name."""
