"""All-in-one aggregation (Sec. III-D, eq. 5) with the optimal weights of Theorem 1.

    ũ[j] = Σ_i p_i m_i[j] u_i[j] / Σ_i p_i m_i[j],   0 where nobody sent element j
    w_{t+1} = w_t − ũ_t,   p_i ∝ 1 / (1 − α_i(2−α_i)√β_i)²

One pass over the contributions: memory does not grow with the cohort. A sub-model is a prefix of
every dimension after sorting, so its update is added through slices, without masks of global size.

`Rules` add what a server needs that takes updates from machines it does not own: sizes clipped to
their median, elements that too few sent left alone, trimmed means and medians of whoever sent them.

Deviations: Theorem 1's ratio is bounded away from zero, as p* is singular at α = β = 1; the weights
may also carry the device's sample count, which the paper leaves out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from anycostfl.checks import Count, FloatArray, Interval, OneOf, check_fields
from anycostfl.errors import ConfigError
from anycostfl.shrink.widths import WidthPlan, add
from anycostfl.theory import divergence_ratio
from anycostfl.types import Update

LEAST_RATIO = 1e-3  # no update counts as closer to the truth than 0.1 % of its norm


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """A decoded update in its sub-model's coordinates, the plan it belongs to, and its weight."""

    plan: WidthPlan
    update: Update
    weight: float


@dataclass(frozen=True, slots=True)
class Rules:
    """How updates are put together; the first two hold against single devices, the rest costs more.

    clip: no update counts as larger than this many times its round's median; 0 is off.
    least: an element that fewer devices sent stays as it is.
    combine: `mean` is the paper's; `trimmed` and `median` take no weights and hold all updates of a
        round in memory.
    trim: the share that `trimmed` leaves out at either end.
    """

    clip: Annotated[float, Interval(0.0)] = 5.0
    least: Count = 1
    combine: Annotated[str, OneOf(("mean", "trimmed", "median"))] = "mean"
    trim: Annotated[float, Interval(0.0, 0.5)] = 0.2

    def __post_init__(self) -> None:
        check_fields(self)


def aggregate(
    like: Mapping[str, Tensor], contributions: Iterable[Contribution], rules: Rules | None = None
) -> dict[str, Tensor]:
    """The next global state: element by element, what is agreed upon is taken off.

    Tensors that nobody sends (running statistics) stay as they are. Sums are kept in float64.
    """
    rules = rules or Rules()
    if rules.combine == "mean":
        steps = _weighted_means(like, contributions, rules.least)
    else:
        steps = _ranked_means(like, list(contributions), rules)
    return {
        name: (w.detach() - steps[name]).to(w.dtype) if name in steps else w.detach().clone()
        for name, w in like.items()
    }


def _weighted_means(
    like: Mapping[str, Tensor], contributions: Iterable[Contribution], least: int
) -> dict[str, Tensor]:
    """Eq. (agg) in one pass; counts are kept only where more than one device must agree."""
    sums: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for contribution in contributions:
        for name, values in contribution.update.values.items():
            if name not in sums:
                sums[name], weights[name], counts[name] = (
                    torch.zeros(like[name].shape, dtype=torch.float64) for _ in range(3)
                )
            region, mask = contribution.plan.index[name], contribution.update.masks[name]
            add(sums[name], region, values, contribution.weight)  # zero outside the mask
            add(weights[name], region, mask, contribution.weight)
            if least > 1:
                add(counts[name], region, mask, 1.0)
    steps = {n: total / torch.where(weights[n] > 0, weights[n], 1.0) for n, total in sums.items()}
    if least > 1:
        steps = {n: torch.where(counts[n] >= least, step, 0.0) for n, step in steps.items()}
    return steps


def _ranked_means(
    like: Mapping[str, Tensor], contributions: Sequence[Contribution], rules: Rules
) -> dict[str, Tensor]:
    """The mean of the middle ranks among whoever sent an element."""
    names = dict.fromkeys(n for c in contributions for n in c.update.values)
    steps = {}
    for name in names:
        shape = (len(contributions), *like[name].shape)
        values, sent = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape)
        for i, c in enumerate(contributions):
            if name in c.update.values:
                add(values[i], c.plan.index[name], c.update.values[name], 1.0)
                add(sent[i], c.plan.index[name], c.update.masks[name], 1.0)
        steps[name] = _middle(values, sent > 0, rules)
    return steps


def _middle(values: Tensor, sent: Tensor, rules: Rules) -> Tensor:
    count = sent.sum(0)
    out = (count - 1) // 2 if rules.combine == "median" else (rules.trim * count).floor().long()
    out = torch.minimum(out, (count - 1) // 2).clamp(min=0)
    ordered = torch.where(sent, values, torch.inf).sort(0).values
    rank = torch.arange(len(values)).view(-1, *[1] * (values.dim() - 1))
    inside = (rank >= out) & (rank < count - out)
    mean = torch.where(inside, ordered, 0.0).sum(0) / (count - 2 * out).clamp(min=1)
    return torch.where(count >= max(rules.least, 1), mean, 0.0)


def size_of(update: Update) -> float:
    """Root mean square over all elements of the sub-model, so that widths compare."""
    square = sum(float(v.double().square().sum()) for v in update.values.values())
    return math.sqrt(square / max(sum(v.numel() for v in update.values.values()), 1))


def clip_bound(sizes: Iterable[float], rules: Rules) -> float:
    """The size beyond which an update of this round is scaled down; infinite if it is off."""
    known = [size for size in sizes if size > 0]
    return rules.clip * statistics.median(known) if rules.clip and known else math.inf


def clipped(update: Update, bound: float) -> Update:
    """The update, scaled down if it is larger than the bound."""
    size = size_of(update)
    if size <= bound:
        return update
    return Update({n: v * (bound / size) for n, v in update.values.items()}, update.masks)


def optimal_weights(
    alpha: npt.ArrayLike, beta: npt.ArrayLike, *, samples: npt.ArrayLike | None = None
) -> FloatArray:
    """Weights that sum to one and minimise Lemma 2's bound; times |D_i| if samples are given."""
    ratio = np.atleast_1d(np.maximum(divergence_ratio(alpha, beta), LEAST_RATIO))
    weights: FloatArray = ratio**-2.0
    if samples is not None:
        allowed = Interval(0.0, open_low=True)
        if not np.all(allowed.contains(samples)):
            raise ConfigError([f"samples: given {samples}, allowed {allowed}"])
        weights = weights * np.asarray(samples, np.float64)
    shares: FloatArray = weights / weights.sum()
    return shares
