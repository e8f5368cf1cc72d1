"""Width plans (Sec. III-B.2): how wide each group of a sub-model is, and which indices that keeps.

`sqrt` is the paper's rule: every hidden width times √α, at least one channel. `fast` walks down a
chain of widths that the hardware likes and stops where the FLOPs are α of the full model's, so that
time falls with α. `even` is the same without the half steps that keep the chain fine: coarser, but
no width is slower than a wider one. All are monotone in α: a narrower sub-model is contained in a
wider one.

Deviation: first and last layers scale with √α only, so the FLOPs of `sqrt` are not exactly α.
`WidthPlan.flops_ratio` says what they are. A model without a matrix product (matrix factorisation)
has no FLOPs to count; its ratio is the share of channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anycostfl.coupling import Coupling, Widths
from anycostfl.errors import AlphaError, NotShrinkableError

Region = tuple[slice | Tensor, ...]
"""Which indices of a global tensor a sub-model holds, per dimension; slices wherever a prefix."""


@dataclass(frozen=True, slots=True)
class Dial:
    """Groups that turn together: at position p of `steps`, each keeps the share p / steps.

    Most dials hold one group. Groups whose sizes a model relates by arithmetic of its own (a
    transformer's width = heads · head size) share one, so that the relation survives every cut.
    """

    sizes: tuple[tuple[str, int], ...]
    least: int = 1  # the narrowest position at which the model works

    @property
    def steps(self) -> int:
        """How many positions the dial has."""
        return math.gcd(*(size for _, size in self.sizes))

    def widths(self, position: int) -> dict[str, int]:
        """The width of each group at a position."""
        return {name: size // self.steps * position for name, size in self.sizes}


@dataclass(frozen=True, slots=True, eq=False)
class WidthPlan:
    """What a sub-model of factor α keeps of every tensor."""

    alpha: float
    widths: Widths
    index: Mapping[str, Region]
    shapes: Mapping[str, tuple[int, ...]]
    flops_ratio: float


def check_alpha(alpha: float) -> float:
    """The factor itself if it lies in (0, 1]; otherwise an error that says so."""
    if not 0 < alpha <= 1:  # also false for NaN
        raise AlphaError(f"alpha must be above 0 and at most 1, not {alpha}")
    return float(alpha)


# --- rules ------------------------------------------------------------------------------------

WidthRule = Callable[[Coupling, tuple[Dial, ...], float], dict[str, int]]


def sqrt_rule(_coupling: Coupling, dials: tuple[Dial, ...], alpha: float) -> dict[str, int]:
    """The paper's rule: each width times √α, rounded down, at least one."""
    scale = math.sqrt(alpha)
    widths: dict[str, int] = {}
    for dial in dials:
        widths |= dial.widths(max(dial.least, math.floor(scale * dial.steps + 1e-9)))
    return widths


def fast_rule(coupling: Coupling, dials: tuple[Dial, ...], alpha: float) -> dict[str, int]:
    """The widest link of the chain whose training FLOPs are at most α of the full model's."""
    return _widest(_chain(coupling, dials, halving=True), alpha)


def even_rule(coupling: Coupling, dials: tuple[Dial, ...], alpha: float) -> dict[str, int]:
    """The same on the chain of whole steps."""
    return _widest(_chain(coupling, dials, halving=False), alpha)


def _widest(chain: tuple[Link, ...], alpha: float) -> dict[str, int]:
    for ratio, widths in chain:
        if ratio <= alpha * (1 + 1e-9):
            return dict(widths)
    return dict(chain[-1][1])


RULES: dict[str, WidthRule] = {"sqrt": sqrt_rule, "fast": fast_rule, "even": even_rule}

FRIENDLY = ((128, 16), (32, 8), (16, 4), (8, 2), (0, 1))
"""(from this many channels, widths in multiples of): what vector units and caches like.

Wide layers move in steps of a cache line; narrow ones in half steps, for 16 of 64 channels at once
would leave gaps in the chain.
"""


Link = tuple[float, tuple[tuple[str, int], ...]]
"""One stop on the way from wide to narrow: the ratio of FLOPs, and every group's width."""


@lru_cache(maxsize=64)
def _chain(coupling: Coupling, dials: tuple[Dial, ...], *, halving: bool) -> tuple[Link, ...]:
    """From full width downwards, one dial and one friendly step at a time.

    Each step narrows the dial that is relatively widest after it, so that all shrink in
    proportion; among equals the one that saves the fewest FLOPs. With halving, a step that would
    save more than a tenth is halved, friendly or not.
    """
    position = {dial: dial.steps for dial in dials}
    channels = _channels(coupling)

    def link(at: Mapping[Dial, int]) -> Link:
        widths = {n: w for dial, p in at.items() for n, w in dial.widths(p).items()}
        return coupling.share(widths), tuple(widths.items())

    chain = [link(position)]
    while True:
        options = []
        for order, dial in enumerate(dials):
            lower = _next_position(dial, position[dial], channels)
            if lower >= dial.least:
                ratio, _ = link({**position, dial: lower})
                options.append((-lower / dial.steps, -ratio, order, lower))
        if not options:
            return tuple(chain)
        _, saved, order, lower = min(options)
        if halving and -saved < 0.9 * chain[-1][0]:
            lower = (position[dials[order]] + lower) // 2
        position[dials[order]] = lower
        chain.append(link(position))


def _channels(coupling: Coupling) -> dict[str, int]:
    """How many rows of its first producing weight one channel of each group stands for."""
    return {g.name: next(s.owned for s in g.slots if s.produces) for g in coupling.groups}


def _next_position(dial: Dial, position: int, channels: Mapping[str, int]) -> int:
    """The next friendly position below, or 0 at the end of the dial."""
    name, size = dial.sizes[0]
    rows = size // dial.steps * channels[name]  # rows per position
    total = rows * dial.steps
    multiple = next(m for least, m in FRIENDLY if total >= least)
    lower = position - 1
    while lower > 0 and (rows * lower) % multiple:
        lower -= 1
    return lower or position // 2  # below the smallest multiple: halve down to one


# --- plans ------------------------------------------------------------------------------------


def make_plan(
    coupling: Coupling,
    dials: tuple[Dial, ...],
    state: Mapping[str, Tensor],
    alpha: float,
    rule: WidthRule,
) -> WidthPlan:
    """Plan the sub-model of factor α of a model whose tensors are given by name."""
    if check_alpha(alpha) < 1 and not dials:
        raise NotShrinkableError(_why_not(coupling))
    widths = coupling.full() if alpha == 1 else rule(coupling, dials, alpha)
    index = regions(coupling, widths, state)
    return WidthPlan(
        alpha=alpha,
        widths=widths,
        index=index,
        shapes={name: tuple(take(state[name], index[name]).shape) for name in state},
        flops_ratio=coupling.share(widths),
    )


def _why_not(coupling: Coupling) -> str:
    reasons = "; ".join(sorted({str(pin.reason) for pin in coupling.pins}))
    return (
        "this model has no channel that can be dropped, so only alpha = 1 is possible. "
        f"Pinned: {reasons or 'it has no weights'}"
    )


def regions(coupling: Coupling, widths: Widths, state: Mapping[str, Tensor]) -> dict[str, Region]:
    """Which indices every tensor keeps at these widths."""
    kept: dict[tuple[str, int], NDArray[np.bool_]] = {}
    shapes = {coupling.aliases[name]: tensor.shape for name, tensor in state.items()}
    for group in coupling.groups:
        for slot in group.slots:
            if slot.tensor in shapes:
                every = np.ones(shapes[slot.tensor][slot.dim], np.bool_)
                keeps = kept.setdefault((slot.tensor, slot.dim), every)
                keeps[slot.index[widths[group.name] :]] = False
    return {
        name: tuple(
            _span(kept.get((coupling.aliases[name], dim)), size)
            for dim, size in enumerate(tensor.shape)
        )
        for name, tensor in state.items()
    }


def _span(kept: NDArray[np.bool_] | None, size: int) -> slice | Tensor:
    """A slice if the kept positions come first, otherwise their indices."""
    if kept is None:
        return slice(0, size)
    count = int(kept.sum())
    return slice(0, count) if kept[:count].all() else torch.from_numpy(np.flatnonzero(kept))


def take(tensor: Tensor, region: Region) -> Tensor:
    """The part of a tensor inside a region: a view if the region is made of slices."""
    for dim, span in enumerate(region):
        if isinstance(span, slice):
            tensor = tensor.narrow(dim, 0, span.stop)
        else:
            tensor = tensor.index_select(dim, span.to(tensor.device))
    return tensor


def put(target: Tensor, region: Region, values: Tensor) -> None:
    """Write values into the region of a target, in place."""
    target[_mesh(region)] = values


def add(target: Tensor, region: Region, values: Tensor, factor: float) -> None:
    """Add values times a factor to the region of a target, in place."""
    if all(isinstance(span, slice) for span in region):
        take(target, region).add_(values, alpha=factor)
    else:
        target.index_put_(_mesh(region), values.to(target) * factor, accumulate=True)  # type: ignore[arg-type]


def _mesh(region: Region) -> Region:
    """The region as something to index with: slices, or indices that broadcast to a grid."""
    if all(isinstance(span, slice) for span in region):
        return region
    rank = len(region)
    spans = [torch.arange(s.stop) if isinstance(s, slice) else s for s in region]
    return tuple(
        span.view([-1 if d == dim else 1 for d in range(rank)]) for dim, span in enumerate(spans)
    )
