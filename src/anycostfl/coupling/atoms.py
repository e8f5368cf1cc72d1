"""Union-find over channel atoms: atoms of one class are channels that must move together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Atoms = NDArray[np.int64]
Label = Atoms | None
"""The atom of every index along one dimension; None where a dimension carries no channels."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a channel cannot move: the operation, the module that ran it, and what it did."""

    operation: str
    where: str
    why: str

    def __str__(self) -> str:
        place = f" in {self.where}" if self.where else ""
        return f"{self.operation}{place}: {self.why}"


class AtomClasses:
    """Classes of atoms, each with a signature of its uses and the reasons that pin it, if any.

    The signature is the sum of one random number per (operation, dimension) an atom passed
    through. Classes with equal signatures were treated alike by every operation, so they are
    candidates for exchange; `cat(relu(a), sigmoid(b))` keeps a and b apart.
    """

    def __init__(self) -> None:
        self.count = 0
        self._room: Atoms = np.empty(0, np.int64)  # the parents, and room for more
        self._signatures: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._pins: list[tuple[Atoms, Reason]] = []
        self._random = np.random.default_rng(0)

    def new(self, count: int) -> Atoms:
        """Create atoms, each in its own class."""
        fresh = np.arange(self.count, self.count + count)
        self.count += count
        if self.count > len(self._room):
            more = max(count, len(self._room))
            self._room = np.concatenate([self._room, np.empty(more, np.int64)])
            self._signatures = np.concatenate([self._signatures, np.zeros(more, np.uint64)])
        self._room[fresh] = fresh
        return fresh

    @property
    def _parent(self) -> Atoms:
        return self._room[: self.count]

    @property
    def _signature(self) -> NDArray[np.uint64]:
        return self._signatures[: self.count]

    def roots(self, atoms: Atoms) -> Atoms:
        """Return the representative of each atom's class: its smallest atom."""
        root = self._parent[atoms]
        while True:
            above = self._parent[root]
            if np.array_equal(above, root):
                return root
            root = above

    def join(self, first: Atoms, second: Atoms) -> None:
        """Merge the classes of first[i] and second[i], for every i."""
        while True:
            a, b = self.roots(first), self.roots(second)
            apart = a != b
            if not apart.any():
                return
            a, b = a[apart], b[apart]
            # Several pairs may share a root: keep the smallest target, merge the rest next time.
            np.minimum.at(self._parent, np.maximum(a, b), np.minimum(a, b))

    def unite(self, labels: Sequence[Label], reason: Reason) -> Label:
        """Join dimensions that an operation aligns index by index; if one is None, pin the rest."""
        present = [label for label in labels if label is not None]
        if len(present) < len(labels):
            for label in present:
                self.pin(label, reason)
            return None
        for other in present[1:]:
            if other is not present[0]:
                self.join(present[0], other)
        return present[0] if present else None

    def tie(self, label: Label, blocks: int) -> Label:
        """Join equal positions of all blocks; returns one block."""
        if label is None or blocks == 1:
            return label
        first, *others = np.split(label, blocks)
        for other in others:
            self.join(first, other)
        return first

    def glue(self, label: Label, blocks: int) -> Label:
        """Join the channels inside each block of neighbours; returns one atom per block."""
        if label is None or blocks == len(label):
            return label
        size = len(label) // blocks
        for offset in range(1, size):
            self.join(label[::size], label[offset::size])
        return label[::size]

    def alone(self) -> NDArray[np.bool_]:
        """The atoms that met no others and are not pinned."""
        members = np.bincount(self.roots(np.arange(self.count)), minlength=self.count)
        alone: NDArray[np.bool_] = members == 1
        for label, _ in self._pins:
            alone[label] = False
        return alone

    def pinned_atoms(self) -> NDArray[np.bool_]:
        """The atoms whose class is pinned."""
        roots = self.roots(np.arange(self.count))
        pinned = np.zeros(self.count, np.bool_)
        for label, _ in self._pins:
            pinned[roots[label]] = True
        found: NDArray[np.bool_] = pinned[roots]
        return found

    def alike(self, atoms: Atoms) -> bool:
        """Whether every operation treated these atoms the same."""
        return bool((self._signature[atoms] == self._signature[atoms[0]]).all())

    def pin(self, label: Label, reason: Reason) -> None:
        """Forbid these channels to move; the first reason is the one reported."""
        if label is not None:
            self._pins.append((label, reason))

    def touch(self, labels: Sequence[Label]) -> None:
        """Add to the signatures that one operation saw these dimensions."""
        for label in labels:
            mark = self._random.integers(2**63, dtype=np.uint64)  # drawn even for None: positions
            if label is not None:
                np.add.at(self._signature, label, mark)

    def pinned(self) -> dict[int, Reason]:
        """Return the root of every pinned class, with the first reason given."""
        found: dict[int, Reason] = {}
        for atoms, reason in self._pins:
            for root in np.unique(self.roots(atoms)):
                found.setdefault(int(root), reason)
        return found

    def signatures(self) -> NDArray[np.uint64]:
        """Return, at every root, the sum of its members' signatures."""
        total = np.zeros(len(self._parent), np.uint64)
        np.add.at(total, self.roots(np.arange(len(self._parent))), self._signature)
        return total
