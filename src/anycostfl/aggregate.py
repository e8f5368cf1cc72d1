"""All-in-one aggregation (Sec. III-D, eq. 5) with the optimal weights of Theorem 1.

    ũ[j] = Σ_i p_i m_i[j] u_i[j] / Σ_i p_i m_i[j],   0 where nobody sent element j
    w_{t+1} = w_t − ũ_t,   p_i ∝ 1 / (1 − α_i(2−α_i)√β_i)²

One pass over the contributions: memory does not grow with the cohort. A sub-model is a prefix of
every dimension after sorting, so its update is added through slices, without masks of global size.

`Rules` add what a server needs that takes updates from machines it does not own: sizes clipped to
their median, updates that point away from the others left out, elements that too few sent left
alone, trimmed means and medians of whoever sent them.
A step size η and momentum μ are the server's, too; only where somebody sent element j,

    v[j] ← μ v[j] + ũ[j],   w[j] ← w[j] − η v[j]

Deviations: Theorem 1's ratio is bounded away from zero, as p* is singular at α = β = 1; the weights
may also carry the device's sample count, which the paper leaves out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from anycostfl.checks import Count, FloatArray, Interval, OneOf, Positive, check_fields
from anycostfl.errors import ConfigError
from anycostfl.shrink.widths import WidthPlan, add, take
from anycostfl.state import Update
from anycostfl.theory import divergence_ratio

LEAST_RATIO = 1e-3  # no update counts as closer to the truth than 0.1 % of its norm


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """A decoded update in its sub-model's coordinates, the plan it belongs to, and its weight."""

    plan: WidthPlan
    update: Update
    weight: float

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf:
            raise ConfigError([f"weight: given {self.weight}, allowed a finite number >= 0"])


@dataclass(frozen=True, slots=True)
class Rules:
    """How updates are put together; the first two hold against single devices, the rest costs more.

    clip: no update counts as larger than this many times its round's median; 0 is off.
    agree: a device whose updates so far pointed where the others did less than this share of what
        the median update does is left out; 0 is off.
    least: an element that fewer devices sent stays as it is.
    combine: `mean` is the paper's; `trimmed` and `median` take no weights and hold all updates of a
        round in memory.
    trim: the share that `trimmed` leaves out at either end.
    step: how far the global model follows what the devices agree on.
    momentum: how much of the last step of an element goes into its next one; unset, as the method
        does.
    """

    clip: Annotated[float, Interval(0.0)] = 5.0
    agree: Annotated[float, Interval(0.0, 1.0)] = 0.0
    least: Count = 1
    combine: Annotated[str, OneOf(("mean", "trimmed", "median"))] = "mean"
    trim: Annotated[float, Interval(0.0, 0.5)] = 0.2
    step: Positive = 1.0
    momentum: Annotated[float | None, Interval(0.0, 0.999)] = None

    def __post_init__(self) -> None:
        check_fields(self)


OPEN = Rules(clip=0.0)
"""The paper's rules: whatever arrives is believed."""
DEFENCE = Rules(clip=2.0, agree=0.2)
"""For fleets in which some devices lie (docs/security.md)."""


def aggregate(
    like: Mapping[str, Tensor], contributions: Iterable[Contribution], rules: Rules | None = None
) -> dict[str, Tensor]:
    """The next global state without momentum: what is agreed upon is taken off, element by element.

    Tensors that nobody sends (running statistics) stay as they are. Sums are kept in float64.
    Of the rules, `clip` and `agree` look at whole rounds and are the server's to apply before.
    """
    return advance(like, contributions, replace(rules or Rules(), momentum=0.0), {})[0]


def advance(
    like: Mapping[str, Tensor],
    contributions: Iterable[Contribution],
    rules: Rules,
    velocity: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The next global state and velocity; the velocity is empty before the first round.

    Without momentum it stays empty. It lives in global coordinates, so it moves with the channels.
    """
    if rules.combine == "mean":
        moves = _weighted_means(like, contributions, rules.least)
    else:
        moves = _ranked_means(like, list(contributions), rules)
    if rules.momentum:
        velocity = velocity or {n: torch.zeros_like(w) for n, w in like.items()}
        velocity = {n: _carry(v, moves.get(n), rules.momentum) for n, v in velocity.items()}
        moves = {n: m._replace(step=velocity[n].where(m.sent, 0.0)) for n, m in moves.items()}
    state = {
        name: (w.detach() - rules.step * moves[name].step).to(w.dtype)
        if name in moves
        else w.detach().clone()
        for name, w in like.items()
    }
    return state, dict(velocity)


class _Move(NamedTuple):
    """What devices agree on for a tensor, 0 where too few sent anything, and where they did."""

    step: Tensor
    sent: Tensor


def _carry(velocity: Tensor, move: _Move | None, momentum: float) -> Tensor:
    """What nobody sent neither moves nor fades: there is nothing new to know about it."""
    if move is None:
        return velocity
    carried = momentum * velocity.double() + move.step
    return torch.where(move.sent, carried, velocity).to(velocity.dtype)


def _weighted_means(
    like: Mapping[str, Tensor], contributions: Iterable[Contribution], least: int
) -> dict[str, _Move]:
    """Eq. 5 in one pass; counts are kept only where more than one device must agree."""
    sums: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for contribution in contributions:
        for name, values in contribution.update.values.items():
            if name not in sums:
                sums[name] = torch.zeros(like[name].shape, dtype=torch.float64)
                weights[name] = torch.zeros_like(sums[name])
                if least > 1:
                    counts[name] = torch.zeros_like(sums[name])
            region, mask = contribution.plan.index[name], contribution.update.masks[name]
            add(sums[name], region, values, contribution.weight)  # zero outside the mask
            add(weights[name], region, mask, contribution.weight)
            if least > 1:
                add(counts[name], region, mask, 1.0)
    moves = {}
    for name, total in sums.items():
        step = total / torch.where(weights[name] > 0, weights[name], 1.0)
        enough = counts[name] >= least if least > 1 else weights[name] > 0
        moves[name] = _Move(torch.where(enough, step, 0.0), enough)
    return moves


def _ranked_means(
    like: Mapping[str, Tensor], contributions: Sequence[Contribution], rules: Rules
) -> dict[str, _Move]:
    """The mean of the middle ranks among whoever sent an element."""
    names = dict.fromkeys(n for c in contributions for n in c.update.values)
    moves = {}
    for name in names:
        shape = (len(contributions), *like[name].shape)
        values, sent = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape)
        for i, c in enumerate(contributions):
            if name in c.update.values:
                add(values[i], c.plan.index[name], c.update.values[name], 1.0)
                add(sent[i], c.plan.index[name], c.update.masks[name], 1.0)
        moves[name] = _middle(values, sent > 0, rules)
    return moves


def _middle(values: Tensor, sent: Tensor, rules: Rules) -> _Move:
    count = sent.sum(0)
    trim = 0.5 if rules.combine == "median" else rules.trim
    out = torch.minimum((trim * count).long(), (count - 1) // 2)  # at least one is left
    ordered = torch.where(sent, values, torch.inf).sort(0).values
    rank = torch.arange(len(values)).view(-1, *[1] * (values.dim() - 1))
    inside = (rank >= out) & (rank < count - out)
    mean = torch.where(inside, ordered, 0.0).sum(0) / (count - 2 * out)
    enough = count >= rules.least
    return _Move(torch.where(enough, mean, 0.0), enough)


def size_of(update: Update) -> float:
    """Root mean square over all elements of the sub-model, so that widths compare."""
    square = sum(float(v.double().square().sum()) for v in update.values.values())
    return math.sqrt(square / max(sum(v.numel() for v in update.values.values()), 1))


def clip_bound(sizes: Iterable[float], rules: Rules) -> float:
    """The size beyond which an update of this round is scaled down; infinite if it is off.

    Of two middle ones the smaller: half of the devices may inflate their updates and gain nothing.
    """
    known = [size for size in sizes if size > 0]
    return rules.clip * statistics.median_low(known) if rules.clip and known else math.inf


def clipped(update: Update, bound: float) -> Update:
    """The update, scaled down if it is larger than the bound."""
    size = size_of(update)
    if size <= bound:
        return update
    return Update({n: v * (bound / size) for n, v in update.values.items()}, update.masks)


def agreements(
    like: Mapping[str, Tensor], contributions: Callable[[], Iterable[Contribution]]
) -> list[float]:
    """The cosine of each update with the sum of all others, over the elements it sent."""
    total = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in like.items()}
    for c in contributions():
        for name, values in c.update.values.items():
            add(total[name], c.plan.index[name], values, c.weight)
    found = []
    for c in contributions():
        product = own = others = 0.0
        for name, values in c.update.values.items():
            rest = take(total[name], c.plan.index[name]) - c.weight * values.double()
            rest = rest * c.update.masks[name]
            product += float((rest * values).sum())
            own += float(values.double().square().sum())
            others += float(rest.square().sum())
        found.append(product / math.sqrt(own * others) if own and others else 0.0)
    return found


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
