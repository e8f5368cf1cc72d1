"""Elements chosen one by one as a payload: where they are, and a small integer for each.

For methods that pick elements instead of kernels. The body of the frame "ACFS" is, if anything is
kept: varint number of kept elements, the method's float32 scalars, then length and bytes of the
mask (Golomb or bitmap, as in the kernel codec), of the table, of the levels and of the spare bits
(the same integer rANS). Signed integers travel as 0, −1, 1, −2, 2 … → 0, 1, 2, 3, 4 …
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
from anycostfl.codec.frame import Bond, seal, unseal_exact
from anycostfl.codec.varint import Reader, varint
from anycostfl.compiled import compiled
from anycostfl.errors import PayloadError

MAGIC = b"ACFS"
MAX_SYMBOLS = 2**24
NEARLY = 0.995  # a payload this full is full
TRIES = 24
LARGEST = np.finfo(np.float32).max  # an element rounded up beyond float32 is this


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """Which elements of a flat update are kept, the method's scalars, integers for the kept ones.

    An integer stands for one element, or for a group of them where a method codes them together.
    """

    kept: Bools
    scalars: tuple[float, ...]
    integers: Ints | Integers

    @classmethod
    def nothing(cls, elements: int, scalars: int = 1) -> Self:
        """An update of which nothing is kept."""
        return cls(np.zeros(elements, np.bool_), (0.0,) * scalars, np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Layout:
    """What a decoder knows beforehand: elements in all, scalars, and the size of a group."""

    elements: int
    scalars: int
    group: int = 1

    def integers(self, kept: int) -> int:
        """How many integers so many kept elements have."""
        return -(-kept // self.group)


def pack_sparse(sparse: Sparse, tie: Bond) -> bytes:
    """The payload; nothing kept makes the empty one."""
    kept = int(np.count_nonzero(sparse.kept))
    if not kept:
        return seal(MAGIC, b"", tie)
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
    return seal(MAGIC, head + table + b"".join(varint(len(p)) + p for p in pieces), tie)


def unpack_sparse(payload: bytes, tie: Bond, layout: Layout) -> Sparse:
    """What was packed; anything malformed, unbound or not finite is a PayloadError."""
    body = unseal_exact(bytes(payload), MAGIC, tie)
    if not body:
        return Sparse.nothing(layout.elements, layout.scalars)
    reader = Reader(body, "payload")
    kept = reader.varint(1, layout.elements)
    scalars = struct.unpack(f"<{layout.scalars}f", reader.take(4 * layout.scalars))
    if not np.isfinite(scalars).all():
        raise PayloadError(f"the payload's scalars {scalars} are not finite")
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
    """Signed to unsigned, small to small."""
    return np.where(integers < 0, -2 * integers - 1, 2 * integers).astype(np.uint32)


def unzigzag(symbols: Symbols) -> Integers:
    """Back again, in the same place."""
    _unzigzag(symbols)
    return symbols.view(np.int32)


@compiled
def _unzigzag(symbols: Symbols) -> None:
    for i in range(symbols.size):
        half = symbols[i] >> np.uint32(1)
        symbols[i] = ~half if symbols[i] & np.uint32(1) else half


def spread(sparse: Sparse, unit: float) -> Floats:
    """Every kept element is its integer times the unit, the others are 0."""
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
    """Elements ranked by magnitude, finely enough to keep about any number of the largest.

    Ranks are the leading bits of a float32, 1/1024 of the magnitude apart: counting them takes one
    pass, where a sort would take many.
    """

    def __init__(self, flat: Floats) -> None:
        self._rank = np.abs(flat).view(np.uint32) >> np.uint32(13)
        counts = np.bincount(self._rank, minlength=1)
        counts[0] = 0  # zeros are never kept
        self._at_least = np.cumsum(counts[::-1])[::-1]

    @property
    def most(self) -> int:
        """How many can be kept at most."""
        return int(self._at_least[0])

    def largest(self, count: int) -> Bools:
        """All elements of the highest ranks, as many as `count` allows.

        Where the top rank alone has more (ties), the first of it.
        """
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
    """The fullest payload within the budget; `encode` makes larger ones of larger numbers.

    Sizes grow about like a power of the number, so the search follows that power through the last
    two tries. Where that leads nowhere new, it halves the interval, or goes on by one if no number
    was too large yet.
    """
    best, low, high = encode(0), 0, most + 1
    guess, power = min(most, max(1, int(start))), 1.0
    before: tuple[int, int] | None = None
    for _ in range(TRIES):
        if not low < guess < high:
            break
        payload = encode(guess)
        size = len(payload)
        if size <= budget:
            best, low = max(best, payload, key=len), guess
            if size >= NEARLY * budget:
                break
        else:
            high = guess
        if before is not None and before[1] != size:
            slope = log(size / before[1]) / log(guess / before[0])
            power = min(max(slope, 0.25), 4.0)
        before = guess, size
        aim = int(guess * (0.998 * budget / size) ** (1 / power))
        if not low < aim < high:
            aim = (low + high) // 2 if high <= most else min(max(aim, low + 1), most)
        guess = aim
    return best


def draw(values: Floats | Doubles, chance: Floats) -> Ints:
    """Round each value up or down by chance, uniform in [0, 1): its expectation is itself."""
    below = np.floor(values)
    return below.astype(np.int64) + (chance < values - below)


def chances(seed: int, count: int) -> Floats:
    """Uniform numbers in [0, 1) to draw with."""
    return np.random.default_rng(seed).random(count, np.float32)
