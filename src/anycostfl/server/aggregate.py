"""All-in-one aggregation (Sec. III-D, eq. 5) with the optimal weights of Theorem 1.

    ũ[j] = Σ_i p_i m_i[j] u_i[j] / Σ_i p_i m_i[j],   0 where nobody sent element j
    w_{t+1} = w_t − ũ_t,   p_i ∝ 1 / (1 − α_i(2−α_i)√β_i)²

No update counts as larger than a multiple of its round's median size (`robust.Robustness.clip`).

One pass over the contributions: memory does not grow with the cohort. A sub-model is a prefix of
every dimension after sorting, so its update is added through slices, without masks of global size.

Beyond the paper, the server has a step size η and momentum μ; only where somebody sent element j,

    v[j] ← μ v[j] + ũ[j],   w[j] ← w[j] − η v[j]
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from anycostfl.checks import FloatArray, Interval, OneOf, Positive, check_fields
from anycostfl.errors import ConfigError
from anycostfl.shrink.widths import WidthPlan, add
from anycostfl.state import State, Update

LEAST_KNOWN = 5  # sizes of earlier rounds, for their median to bound a round's
DRIFT = 2.0  # how far the median size of a round may be from that of earlier ones
LEAST_RATIO = 1e-3  # no update counts as closer to the truth than 0.1 % of its norm


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """A decoded update in its sub-model's coordinates, the plan it belongs to, and its weight."""

    plan: WidthPlan
    update: Update
    weight: float

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf:
            raise ConfigError([f"weight: given {self.weight}, must be finite and >= 0"])


@dataclass(frozen=True, slots=True)
class ServerOptimizer:
    """How the global model follows what the devices agree on.

    kind: plain steps, or those of FedAdam and FedYogi (`server.adaptive`).
    step: how far it goes, relative to the method's step.
    momentum: how much of the last step of an element goes into its next one.
    average: how much of the averaged model stays when a round's model is added to it; that model
        is evaluated and exported. 0 is off.

    Kind, momentum and average unset: as the method has them.
    """

    step: Positive = 1.0
    momentum: Annotated[float | None, Interval(0.0, 0.999)] = None
    kind: Annotated[str | None, OneOf(("sgd", "adam", "yogi"))] = None
    average: Annotated[float | None, Interval(0.0, 0.999)] = None

    def __post_init__(self) -> None:
        check_fields(self)


class Move(NamedTuple):
    """What devices agree on for a tensor, 0 where too few sent anything, and where they did."""

    step: Tensor
    sent: Tensor


def aggregate(like: State, contributions: Iterable[Contribution]) -> dict[str, Tensor]:
    """The next global state: the weighted mean of the updates, element by element.

    Tensors that nobody sends (running statistics) stay as they are. Sums are kept in float64.
    """
    return apply_moves(like, weighted_means(like, contributions), ServerOptimizer(), {})[0]


def weighted_means(
    like: State, contributions: Iterable[Contribution], least: int = 1
) -> dict[str, Move]:
    """Eq. 5 in one pass; an element that fewer than `least` devices sent does not move."""
    sums: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}  # only where more than one device must agree
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
        moves[name] = Move(torch.where(enough, step, 0.0), enough)
    return moves


def apply_moves(
    weights: State, moves: Mapping[str, Move], optimizer: ServerOptimizer, velocity: State
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The next global state and velocity; the velocity is empty before the first round.

    Without momentum it stays empty. It lives in global coordinates, so it moves with the channels.
    """
    if optimizer.momentum:
        velocity = velocity or {n: torch.zeros_like(w) for n, w in weights.items()}
        velocity = {n: _carry(v, moves.get(n), optimizer.momentum) for n, v in velocity.items()}
        moves = {n: m._replace(step=velocity[n].where(m.sent, 0.0)) for n, m in moves.items()}
    state = {
        name: (w.detach() - optimizer.step * moves[name].step).to(w.dtype)
        if name in moves
        else w.detach().clone()
        for name, w in weights.items()
    }
    return state, dict(velocity)


def averaged(average: State, weights: State, names: Iterable[str], decay: float) -> State:
    """The average of the models over rounds, A ← δA + (1 − δ)w; the first model is its start."""
    start = average or weights
    return {n: torch.lerp(weights[n].detach(), start[n], decay) for n in names}


def _carry(velocity: Tensor, move: Move | None, momentum: float) -> Tensor:
    """What nobody sent neither moves nor fades: nothing new is known about it."""
    if move is None:
        return velocity
    carried = momentum * velocity.double() + move.step
    return torch.where(move.sent, carried, velocity).to(velocity.dtype)


# --- clipping -------------------------------------------------------------------------------------


def size_of(update: Update) -> float:
    """Root mean square over all elements of the sub-model, so that widths compare."""
    square = sum(float(v.double().square().sum()) for v in update.values.values())
    return math.sqrt(square / max(sum(v.numel() for v in update.values.values()), 1))


def clip_bound(sizes: Iterable[float], clip: float, earlier: Sequence[float] = ()) -> float:
    """The size beyond which an update of this round is scaled down; infinite if clip is 0.

    Of two middle sizes the smaller: half of the devices may inflate their updates and gain nothing.
    Sizes of earlier rounds bound the median both ways: a device that is alone in its round cannot
    set the bound, and a tiny update cannot have an honest one scaled down to nothing.
    """
    known = [size for size in sizes if size > 0]
    if not clip or not known:
        return math.inf
    middle = statistics.median_low(known)
    if len(earlier) >= LEAST_KNOWN:
        usual = statistics.median_low(earlier)
        middle = min(max(middle, usual / DRIFT), usual * DRIFT)
    return clip * middle


def clipped(update: Update, bound: float) -> Update:
    """The update, scaled down if it is larger than the bound."""
    size = size_of(update)
    if size <= bound:
        return update
    return Update({n: v * (bound / size) for n, v in update.values.items()}, update.masks)


# --- weights --------------------------------------------------------------------------------------


def divergence_ratio(alpha: npt.ArrayLike, beta: npt.ArrayLike) -> FloatArray:
    """Lemma 1's bound on ‖u − ũ‖ / ‖u‖: 1 − α(2−α)√β."""
    a, b = np.asarray(alpha, np.float64), np.asarray(beta, np.float64)
    problems = [
        f"{name}: given {value}, must be in [0, 1]"
        for name, value in (("alpha", a), ("beta", b))
        if not np.all((value >= 0) & (value <= 1))
    ]
    if problems:
        raise ConfigError(problems)
    ratio: FloatArray = 1.0 - a * (2.0 - a) * np.sqrt(b)
    return ratio


def optimal_weights(
    alpha: npt.ArrayLike, beta: npt.ArrayLike, samples: npt.ArrayLike | None = None
) -> FloatArray:
    """Theorem 1: weights that sum to one and minimise Lemma 2's bound; times |D_i| if given.

    Deviations: the ratio is bounded away from zero, as p* is singular at α = β = 1; the sample
    counts, which the paper leaves out.
    """
    ratio = np.atleast_1d(np.maximum(divergence_ratio(alpha, beta), LEAST_RATIO))
    weights: FloatArray = ratio**-2.0
    if samples is not None:
        counts = np.asarray(samples, np.float64)
        if not np.all((counts > 0) & np.isfinite(counts)):
            raise ConfigError([f"samples: given {samples}, must be finite and > 0"])
        weights = weights * counts
    shares: FloatArray = weights / weights.sum()
    return shares


def capped(weights: FloatArray, most: float) -> FloatArray:
    """Weights of which none exceeds that many times their median; they still sum to one.

    The median, as a mean moves with the largest. 0 is off.
    """
    if not most or not len(weights):
        return weights
    bounded = np.minimum(weights, most * float(np.median(weights)))
    shares: FloatArray = bounded / bounded.sum() if bounded.sum() > 0 else weights
    return shares
