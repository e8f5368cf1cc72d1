"""Width plans (Sec. III-B.2): how wide each group of a sub-model is, and which indices that keeps.

`sqrt` is the paper's rule: every hidden width times √α, at least one channel. `fast` walks down a
chain of hardware-friendly widths and stops where the FLOPs are at most α of the full model's, so
that time falls with α. `even` is the same without the half steps that keep the chain fine: coarser,
but no width is slower than a wider one. All are monotone in α: a narrower sub-model is contained in
a wider one.

Deviation: first and last layers scale with √α only, so the FLOPs of `sqrt` are not exactly α.
`WidthPlan.flops_ratio` gives the exact value. A model without a matrix product (matrix
factorisation) has no FLOPs to count; its ratio is the share of channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anycostfl.coupling.result import Coupling, Widths
from anycostfl.errors import AlphaError, NotShrinkableError

Region = tuple[slice | Tensor, ...]
"""The indices of a global tensor that a sub-model holds, per dimension; a slice for a prefix."""

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class TiedWidths:
    """Groups whose widths are tied: at position p of `steps`, each keeps the fraction p / steps.

    Most hold a single group. Groups that a model relates by its own arithmetic (a transformer's
    width = heads · head size) are tied, so that the relation holds in every sub-model.
    """

    sizes: tuple[tuple[str, int], ...]
    least: int = 1  # the narrowest position at which the model runs

    @property
    def steps(self) -> int:
        """The number of positions."""
        return math.gcd(*(size for _, size in self.sizes))

    def widths(self, position: int) -> dict[str, int]:
        """The width of each group at a position."""
        return {name: size // self.steps * position for name, size in self.sizes}


Ties = tuple[TiedWidths, ...]


@dataclass(frozen=True, slots=True, eq=False)
class WidthPlan:
    """What a sub-model of factor α keeps of every tensor."""

    alpha: float
    widths: Widths
    index: Mapping[str, Region]
    shapes: Mapping[str, tuple[int, ...]]
    flops_ratio: float


# --- rules ------------------------------------------------------------------------------------


Link = tuple[float | None, Widths]
"""The width of every group, and the ratio of FLOPs where it is known already."""


def sqrt_widths(ties: Ties, alpha: float) -> Link:
    """The paper's rule: each width times √α, rounded down, at least one."""
    scale = math.sqrt(alpha)
    widths: dict[str, int] = {}
    for tied in ties:
        widths |= tied.widths(max(tied.least, math.floor(scale * tied.steps + 1e-9)))
    return None, widths


def chain_widths(chain: Sequence[tuple[float, Widths]], alpha: float) -> Link:
    """The widest link of a chain whose training FLOPs are at most α of the full model's."""
    return next((link for link in chain if link[0] <= alpha * (1 + 1e-9)), chain[-1])


WidthRule = Callable[[Coupling, Ties], Callable[[float], Link]]

RULES: dict[str, WidthRule] = {
    "sqrt": lambda _coupling, ties: partial(sqrt_widths, ties),
    "fast": lambda coupling, ties: partial(chain_widths, width_chain(coupling, ties, halving=True)),
    "even": lambda coupling, ties: partial(
        chain_widths, width_chain(coupling, ties, halving=False)
    ),
}
"""By name: what a model's widths are, as a function of α."""

FRIENDLY = ((128, 16), (32, 8), (16, 4), (8, 2), (0, 1))
"""(from this many channels, widths in multiples of): sizes that suit vector units and caches.

Wide layers move in steps of a cache line, narrow ones in half steps: dropping 16 of 64 channels at
once would leave gaps in the chain.
"""


def width_chain(coupling: Coupling, ties: Ties, *, halving: bool) -> list[tuple[float, Widths]]:
    """Walk from full width downwards, one tie and one friendly step at a time.

    Each step narrows the tie that is relatively widest after it, so that all shrink in proportion;
    among equals, the one that saves the fewest FLOPs. With halving, a step that would save more
    than a tenth is halved, friendly or not.
    """
    position = {tied: tied.steps for tied in ties}

    def link(at: Mapping[TiedWidths, int]) -> tuple[float, Widths]:
        widths = {n: w for tied, p in at.items() for n, w in tied.widths(p).items()}
        return coupling.share(widths), widths

    chain = [link(position)]
    rows = {g.name: next(s.owned for s in g.slots if s.produces) for g in coupling.groups}
    while True:
        options = []
        for order, tied in enumerate(ties):
            lower = _next_position(tied, position[tied], rows[tied.sizes[0][0]])
            if lower >= tied.least:
                ratio, _ = link({**position, tied: lower})
                options.append((-lower / tied.steps, -ratio, order, lower))
        if not options:
            return chain
        _, saved, order, lower = min(options)
        if halving and -saved < 0.9 * chain[-1][0]:
            lower = (position[ties[order]] + lower) // 2
        position[ties[order]] = lower
        chain.append(link(position))


def _next_position(tied: TiedWidths, position: int, rows_per_channel: int) -> int:
    """The next friendly position below, or 0 at the end; rows are those of the first group."""
    rows = tied.sizes[0][1] // tied.steps * rows_per_channel  # per position
    multiple = next(m for least, m in FRIENDLY if rows * tied.steps >= least)
    lower = position - 1
    while lower > 0 and (rows * lower) % multiple:
        lower -= 1
    return lower or position // 2  # below the smallest multiple: halve down to one


# --- plans ------------------------------------------------------------------------------------

MOST_PLANS = 512
"""Plans a model remembers; one of ResNet-18 takes about 30 kB."""


class WidthPlanner:
    """Plans the sub-models of one model.

    A plan depends on α only through its widths, so plans are cached by width.
    """

    def __init__(self, coupling: Coupling, ties: Ties, shapes: Shapes, rule: str) -> None:
        self._coupling = coupling
        self._ties = ties
        self._shapes = shapes
        self._rule = rule
        self._full = coupling.full()
        self._plans: dict[tuple[tuple[str, int], ...], WidthPlan] = {}

    @cached_property
    def _widths(self) -> Callable[[float], Link]:
        """Resolved on first use: a chain takes a while on a large model."""
        return RULES[self._rule](self._coupling, self._ties)

    def plan(self, alpha: float) -> WidthPlan:
        """Plan the sub-model of factor α."""
        if not 0 < alpha <= 1:  # also false for NaN
            raise AlphaError(f"alpha must be above 0 and at most 1, not {alpha}")
        if alpha < 1 and not self._ties:
            reasons = "; ".join(sorted({str(pin.reason) for pin in self._coupling.pins}))
            raise NotShrinkableError(
                "this model has no channel that can be dropped, so only alpha = 1 is possible. "
                f"Pinned: {reasons or 'it has no weights'}"
            )
        ratio, widths = (1.0, self._full) if alpha == 1 else self._widths(alpha)
        key = tuple(widths.items())
        if key not in self._plans:
            if len(self._plans) == MOST_PLANS:
                del self._plans[next(iter(self._plans))]  # the oldest
            index = regions(self._coupling, widths, self._shapes)
            shapes = {name: tuple(map(_length, region)) for name, region in index.items()}
            ratio = self._coupling.share(widths) if ratio is None else ratio
            self._plans[key] = WidthPlan(alpha, widths, index, shapes, ratio)
        return replace(self._plans[key], alpha=alpha)


def regions(coupling: Coupling, widths: Widths, shapes: Shapes) -> dict[str, Region]:
    """The indices that every tensor keeps at these widths, given the full shapes."""
    kept: dict[tuple[str, int], NDArray[np.bool_]] = {}
    own_shapes = {coupling.aliases[name]: shape for name, shape in shapes.items()}
    for group in coupling.groups:
        for slot in group.slots:
            if slot.tensor in own_shapes:
                every = np.ones(own_shapes[slot.tensor][slot.dim], np.bool_)
                keeps = kept.setdefault((slot.tensor, slot.dim), every)
                keeps[slot.index[widths[group.name] :]] = False
    return {
        name: tuple(
            _span(kept.get((coupling.aliases[name], dim)), size) for dim, size in enumerate(shape)
        )
        for name, shape in shapes.items()
    }


def _span(kept: NDArray[np.bool_] | None, size: int) -> slice | Tensor:
    """A slice if the kept positions are a prefix, otherwise their indices."""
    if kept is None:
        return slice(0, size)
    count = int(kept.sum())
    return slice(0, count) if kept[:count].all() else torch.from_numpy(np.flatnonzero(kept))


def _length(span: slice | Tensor) -> int:
    length: int = span.stop if isinstance(span, slice) else len(span)
    return length


def take(tensor: Tensor, region: Region) -> Tensor:
    """The part of a tensor inside a region: a view if the region consists of slices."""
    for dim, span in enumerate(region):
        if isinstance(span, slice):
            tensor = tensor.narrow(dim, 0, span.stop)
        else:
            tensor = tensor.index_select(dim, span.to(tensor.device))
    return tensor


def relative(inner: Region, outer: Region) -> Region:
    """Where the indices of one region are among those of another that holds them all."""
    return tuple(_positions(one, all_) for one, all_ in zip(inner, outer, strict=True))


def _positions(inner: slice | Tensor, outer: slice | Tensor) -> slice | Tensor:
    if isinstance(outer, slice):
        return inner  # a prefix: everything is where it was
    wanted = torch.arange(inner.stop) if isinstance(inner, slice) else inner
    found = torch.searchsorted(outer, wanted)
    if not torch.equal(outer[found.clamp(max=len(outer) - 1)], wanted):
        raise NotShrinkableError("the narrower sub-model is no part of the wider one")
    return found


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
    """The region as an index: slices, or indices that broadcast to a grid."""
    if all(isinstance(span, slice) for span in region):
        return region
    rank = len(region)
    spans = [torch.arange(s.stop) if isinstance(s, slice) else s for s in region]
    return tuple(
        span.view([-1 if d == dim else 1 for d in range(rank)]) for dim, span in enumerate(spans)
    )
