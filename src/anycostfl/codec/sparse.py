"""A payload of individually chosen elements: their positions, and a small integer for each.

For methods that pick elements instead of kernels. The body of the frame "ACFS" is, if anything is
kept: varint number of kept elements, the method's float32 scalars, varint number of tokens, then
length and bytes of mask, table, levels and spare bits, each coded as in the kernel codec. Signed
integers are sent as 0, −1, 1, −2, 2 … → 0, 1, 2, 3, 4 …
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Self

import numpy as np

from anycostfl.codec import entropy
from anycostfl.codec.arrays import Bools, Doubles, Floats, Integers, Ints, Symbols
from anycostfl.codec.frame import (
    Goal,
    PayloadBinding,
    Reader,
    Trial,
    fullest,
    seal,
    search,
    unseal_exact,
    varint,
)
from anycostfl.compiled import compiled
from anycostfl.errors import PayloadError

MAGIC = b"ACFS"
MAX_SYMBOLS = 2**24
FILLED, TRIES = 0.995, 24
LARGEST = np.finfo(np.float32).max  # values rounded up beyond float32 are clamped to it


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """Kept elements of a flat update, the method's scalars, and an integer per kept group."""

    kept: Bools
    scalars: tuple[float, ...]
    integers: Ints | Integers

    @classmethod
    def nothing(cls, elements: int, scalars: int = 1) -> Self:
        """An update with no kept elements."""
        return cls(np.zeros(elements, np.bool_), (0.0,) * scalars, np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Layout:
    """What a decoder knows in advance: elements, scalars, and elements coded as one integer."""

    elements: int
    scalars: int
    group: int = 1

    def integers(self, kept: int) -> int:
        """Number of integers for `kept` elements."""
        return -(-kept // self.group)


def pack_sparse(sparse: Sparse, binding: PayloadBinding) -> bytes:
    """Encode; if nothing is kept, the body is empty."""
    kept = int(np.count_nonzero(sparse.kept))
    if not kept:
        return seal(MAGIC, b"", binding)
    tokens, spare = entropy.tokenize(zigzag(sparse.integers))
    precision, freq = entropy.best_table(np.bincount(tokens))
    pieces = (
        entropy.encode_mask(sparse.kept),
        entropy.encode_table(precision, freq),
        entropy.encode_levels(tokens, precision, freq),
        spare,
    )
    head = varint(kept) + struct.pack(f"<{len(sparse.scalars)}f", *sparse.scalars)
    table = varint(freq.size)
    return seal(MAGIC, head + table + b"".join(varint(len(p)) + p for p in pieces), binding)


def unpack_sparse(payload: bytes, binding: PayloadBinding, layout: Layout) -> Sparse:
    """Decode; anything malformed, foreign or not finite is a PayloadError."""
    body = unseal_exact(bytes(payload), MAGIC, binding)
    if not body:
        return Sparse.nothing(layout.elements, layout.scalars)
    reader = Reader(body, "payload")
    kept = reader.varint(1, layout.elements)
    scalars = struct.unpack(f"<{layout.scalars}f", reader.take(4 * layout.scalars))
    if not np.isfinite(scalars).all():
        raise PayloadError(f"scalars {scalars} are not finite")
    tokens = reader.varint(1, entropy.token_count(MAX_SYMBOLS))
    mask, table, levels, spare = (reader.take(reader.varint(0, len(body))) for _ in range(4))
    reader.finish()
    where = entropy.decode_mask(mask, layout.elements, kept)
    precision, freq = entropy.decode_table(table, tokens)
    symbols = entropy.detokenize(
        entropy.decode_levels(levels, precision, freq, layout.integers(kept)), spare, MAX_SYMBOLS
    )
    return Sparse(where, scalars, unzigzag(symbols))


def zigzag(integers: Ints | Integers) -> Symbols:
    """Signed to unsigned; small magnitudes stay small."""
    return np.where(integers < 0, -2 * integers - 1, 2 * integers).astype(np.uint32)


def unzigzag(symbols: Symbols) -> Integers:
    """Invert `zigzag`, in place."""
    _unzigzag(symbols)
    return symbols.view(np.int32)


@compiled
def _unzigzag(symbols: Symbols) -> None:
    for i in range(symbols.size):
        half = symbols[i] >> np.uint32(1)
        symbols[i] = ~half if symbols[i] & np.uint32(1) else half


def spread(sparse: Sparse, unit: float) -> Floats:
    """Kept elements are their integer times `unit`, the others are 0."""
    flat = np.zeros(sparse.kept.size, np.float32)
    integers = sparse.integers.astype(np.int32, copy=False)
    _spread(sparse.kept, integers, np.float32(unit), flat)
    return flat


@compiled
def _spread(kept: Bools, integers: Integers, unit: np.float32, flat: Floats) -> None:
    at = 0
    for i in range(kept.size):
        if kept[i]:
            flat[i] = min(max(np.float32(integers[at]) * unit, -LARGEST), LARGEST)
            at += 1


class Ranked:
    """Elements ranked by magnitude, so that about any number of the largest can be kept.

    Ranks are the leading bits of a float32, 1/1024 of the magnitude apart: counting them takes one
    pass, much less than a sort.
    """

    def __init__(self, flat: Floats) -> None:
        self._rank = np.abs(flat).view(np.uint32) >> np.uint32(13)
        counts = np.bincount(self._rank, minlength=1)
        counts[0] = 0  # zeros are never kept
        self._at_least = np.cumsum(counts[::-1])[::-1]

    @property
    def most(self) -> int:
        """Number of non-zero elements."""
        return int(self._at_least[0])

    def largest(self, count: int) -> Bools:
        """All elements of the highest ranks, at most `count`; of a larger top rank, the first."""
        if not count or not self.most:
            return np.zeros(self._rank.size, np.bool_)
        enough = np.flatnonzero(self._at_least <= count)
        occurring = int(self._rank.max())
        least = min(int(enough[0]) if enough.size else occurring, occurring)
        chosen: Bools = self._rank >= max(least, 1)
        if not enough.size or enough[0] > occurring:
            chosen[np.flatnonzero(chosen)[count:]] = False
        return chosen


def fill(budget: int, start: float, most: int, encode: Callable[[int], bytes]) -> bytes:
    """The fullest payload within the budget; `encode` makes larger ones from larger numbers."""
    first = min(most, max(1, int(start)))
    goal = Goal(budget, FILLED, TRIES)
    found = search(encode, _PowerLaw(budget, most), range(1, most + 1), first, goal)
    return fullest(found) or encode(0)


class _PowerLaw:
    """Propose numbers as if sizes were a power of the number, fitted to the last two trials."""

    def __init__(self, budget: int, most: int) -> None:
        self.budget = budget
        self.most = most
        self.power = 1.0
        self.before: Trial | None = None

    def __call__(self, trial: Trial) -> int:
        """The number whose payload should just fit, or one that narrows the bracket."""
        before, self.before = self.before, trial
        if before is not None and before.size != trial.size:
            slope = log(trial.size / before.size) / log(trial.number / before.number)
            self.power = min(max(slope, 0.25), 4.0)
        aim = int(trial.number * (0.998 * self.budget / trial.size) ** (1 / self.power))
        if trial.fits < aim < trial.fails:
            return aim
        if trial.fails <= self.most:
            return (trial.fits + trial.fails) // 2
        return min(max(aim, trial.fits + 1), self.most)


def draw(values: Floats | Doubles, chance: Floats) -> Ints:
    """Round up or down at random without bias; `chance` is uniform in [0, 1)."""
    below = np.floor(values)
    return below.astype(np.int64) + (chance < values - below)


def chances(seed: int, count: int) -> Floats:
    """Uniform random numbers in [0, 1)."""
    return np.random.default_rng(seed).random(count, np.float32)
