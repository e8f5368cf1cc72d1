"""What a trace finds: groups of channels, what is pinned and why, sizes as functions of widths."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from anycostfl.coupling.atoms import Atoms, Reason

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
        """How many positions one channel owns."""
        return int(self.index.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One hidden width: channels that may be exchanged with each other and dropped from the end."""

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

    `groups` maps a group's name to how many positions each of its channels owns here, and to the
    group's full width.
    """

    size: int
    groups: Mapping[str, tuple[float, int]]

    def at(self, widths: Widths) -> float:
        """The size at these widths; a group that is not named keeps its full width."""
        owned = self.groups.items()
        return self.size - sum(k * (full - widths.get(name, full)) for name, (k, full) in owned)


@dataclass(frozen=True, slots=True)
class Cost:
    """A product's FLOPs per sample as a function of widths.

    `passes` is 1 for the forward pass plus 1 for each operand whose gradient training needs.
    """

    factor: float
    passes: int
    extents: tuple[Extent, ...]

    def at(self, widths: Widths) -> float:
        """Forward FLOPs."""
        return self.factor * math.prod(extent.at(widths) for extent in self.extents)


@dataclass(frozen=True, slots=True)
class Returned:
    """The shapes that one module call returns, as functions of widths."""

    module: str
    shapes: tuple[tuple[Extent, ...], ...]

    def at(self, widths: Widths) -> tuple[tuple[int, ...], ...]:
        """Those shapes at these widths."""
        return tuple(tuple(round(e.at(widths)) for e in shape) for shape in self.shapes)


@dataclass(frozen=True, slots=True, eq=False)
class Coupling:
    """Everything one trace found.

    `aliases` maps each tensor's name to the first name of the same tensor (tied weights);
    `returned` lists module calls in order; `watched` holds the intermediate tensors asked for;
    `unused` names the tensors that no operation touched, kept whole for want of knowledge, as are
    the channels that fit them.
    """

    groups: tuple[Group, ...]
    pins: tuple[Pin, ...]
    costs: tuple[Cost, ...]
    returned: tuple[Returned, ...]
    watched: Mapping[str, tuple[Extent, ...]]
    aliases: Mapping[str, str]
    unused: tuple[str, ...]

    def full(self) -> dict[str, int]:
        """The width of every group in the full model."""
        return {group.name: group.size for group in self.groups}

    def flops(self, widths: Widths, *, training: bool = True) -> float:
        """FLOPs per sample at these widths, two per multiply-add; training counts backward too."""
        return sum(cost.at(widths) * (cost.passes if training else 1) for cost in self.costs)

    def share(self, widths: Widths) -> float:
        """Training FLOPs as a share of the full model's; of its channels if it has no products."""
        full = self.full()
        if flops := self.flops(full):
            return self.flops(widths) / flops
        return sum(widths.values()) / sum(full.values()) if full else 1.0

    def freeze(self, names: Collection[str], reason: Reason) -> Coupling:
        """The same coupling with some groups pinned."""
        frozen = [group for group in self.groups if group.name in names]
        pins = [Pin(s.tensor, s.dim, s.index.size, reason) for g in frozen for s in g.slots]
        kept = tuple(group for group in self.groups if group.name not in names)
        return replace(self, groups=kept, pins=(*self.pins, *pins))
