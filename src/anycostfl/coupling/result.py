"""The result of a trace: groups of channels, pins with reasons, sizes as functions of widths."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from anycostfl.coupling.atoms import Atoms, Reason
from anycostfl.coupling.sizes import Place

Widths = Mapping[str, int]
"""The width of every group, by its name."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One dimension of one tensor that a group runs along.

    `index[c]` lists, in order, the positions that channel c owns there: (channels, positions).
    """

    tensor: str
    dim: int
    index: Atoms
    produces: bool

    @property
    def owned(self) -> int:
        """The number of positions that one channel owns."""
        return int(self.index.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One hidden width: channels that can be exchanged and dropped from the end."""

    name: str
    size: int
    slots: tuple[Slot, ...]
    roots: Atoms


@dataclass(frozen=True, slots=True)
class Pin:
    """A dimension of a tensor, or part of it, that cannot shrink."""

    tensor: str
    dim: int
    positions: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of a dimension as a function of widths.

    `groups` maps a group's name to (positions that one channel owns here, full width).
    """

    size: int
    groups: Mapping[str, tuple[float, int]]

    def at(self, widths: Widths) -> float:
        """The size at these widths; a group that is not listed has its full width."""
        owned = self.groups.items()
        return self.size - sum(k * (full - widths.get(name, full)) for name, (k, full) in owned)


@dataclass(frozen=True, slots=True)
class Cost:
    """A product's forward FLOPs per sample as a function of widths; `passes` as in `Product`."""

    factor: float
    passes: int
    extents: tuple[Extent, ...]

    def at(self, widths: Widths) -> float:
        """The forward FLOPs at these widths."""
        return self.factor * math.prod(extent.at(widths) for extent in self.extents)


@dataclass(frozen=True, slots=True)
class Returned:
    """The shapes that one module call returns, as functions of widths."""

    module: str
    shapes: tuple[tuple[Extent, ...], ...]

    def at(self, widths: Widths) -> tuple[tuple[int, ...], ...]:
        """The shapes at these widths."""
        return tuple(tuple(round(e.at(widths)) for e in shape) for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class Site:
    """A call in the model's code that takes sizes: each size, and what it counts.

    A size that several parts share (`chunk`) counts a tuple of extents, one for each part.
    """

    module: str
    place: Place
    visit: int
    sizes: tuple[Any, ...]
    counted: tuple[Extent | tuple[Extent, ...] | None, ...]

    def at(self, widths: Widths) -> dict[int, tuple[int, int | list[int]]]:
        """By position: the size in the full model, and the one at these widths if it differs."""
        found: dict[int, tuple[int, int | list[int]]] = {}
        for position, (size, counted) in enumerate(zip(self.sizes, self.counted, strict=True)):
            if isinstance(counted, tuple):
                found[position] = size, [round(extent.at(widths)) for extent in counted]
            elif counted is not None and abs(size) == counted.size:
                fitting = round(counted.at(widths))
                if fitting != abs(size):
                    found[position] = size, fitting if size > 0 else -fitting
        return found


@dataclass(frozen=True, eq=False)
class Coupling:
    """Everything one trace found.

    `aliases` maps each tensor's name to the first name of the same tensor (tied weights);
    `returned` lists module calls in order; `sites` the calls that take sizes of channels;
    `unused` names the tensors that no operation touched: they are kept whole, and so are the
    channels whose number matches theirs.
    """

    groups: tuple[Group, ...]
    pins: tuple[Pin, ...]
    costs: tuple[Cost, ...]
    returned: tuple[Returned, ...]
    sites: tuple[Site, ...]
    aliases: Mapping[str, str]
    unused: tuple[str, ...]

    def full(self) -> dict[str, int]:
        """The width of every group in the full model."""
        return {group.name: group.size for group in self.groups}

    def flops(self, widths: Widths, *, training: bool = True) -> float:
        """FLOPs per sample at these widths, two per multiply-add; training includes backward."""
        return sum(cost.at(widths) * (cost.passes if training else 1) for cost in self.costs)

    @cached_property
    def full_flops(self) -> float:
        """Training FLOPs per sample of the full model."""
        return self.flops(self.full())

    def share(self, widths: Widths) -> float:
        """Training FLOPs relative to the full model; without any products, channels."""
        if self.full_flops:
            return self.flops(widths) / self.full_flops
        full = self.full()
        return sum(widths.values()) / sum(full.values()) if full else 1.0

    def coverage(self) -> float:
        """The share of training FLOPs in products of which some dimension shrinks."""
        free = {group.name for group in self.groups}
        shrinking = (
            cost.at({}) * cost.passes
            for cost in self.costs
            if any(name in free for extent in cost.extents for name in extent.groups)
        )
        return sum(shrinking) / self.full_flops if self.full_flops else 0.0

    def freeze(self, names: Collection[str], reason: Reason) -> Coupling:
        """Return the same coupling with some groups pinned."""
        frozen = [group for group in self.groups if group.name in names]
        pins = [Pin(s.tensor, s.dim, s.index.size, reason) for g in frozen for s in g.slots]
        kept = tuple(group for group in self.groups if group.name not in names)
        return replace(self, groups=kept, pins=(*self.pins, *pins))
