"""Kernel-wise sparsification and probabilistic quantization (Sec. III-C, eqs. 2 to 4).

Sparsification keeps the kernels of largest L2 norm: û[k] = u[k] if ‖u[k]‖₂ ≥ Π, else 0.
Quantization maps |u| onto the points Q_l = u_min + l (u_max − u_min) / L and draws the upper
neighbour with probability (|u| − Q_l) / (Q_{l+1} − Q_l), so that E[ũ] = û.

Deviations (docs/decisions/0010): l runs from 0 to L, so that every |u| has an interval; where
min |u| lies below one step, Q_0 is 0 instead of u_min, and points that are 0 need no sign; kernels
that are exactly zero are never kept, they say nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2s
from math import isfinite, prod

import numpy as np

from anycostfl.codec.arrays import Bools, Bytes, Doubles, Floats, Integers, Ints, Symbols, Whole
from anycostfl.codec.frame import Bond
from anycostfl.codec.varint import Reader, varint
from anycostfl.compiled import compiled
from anycostfl.errors import PayloadError, UpdateError

DEFAULT_BLOCK = 32
MAX_LEVELS = 2**24 - 2  # finer than a float32 can tell apart
_RANGE = struct.Struct("<ff")


@dataclass(frozen=True, slots=True)
class Part:
    """Where one tensor lies in the flat update, and how it is cut into kernels."""

    name: str
    shape: tuple[int, ...]
    offset: int
    block: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def width(self) -> int:
        """Elements of one row, that is of everything one output channel owns."""
        return row_width(self.shape)

    @property
    def kernels(self) -> int:
        """Number of kernels; the last of a row may be shorter than `block`."""
        return self.size // self.width * -(-self.width // self.block) if self.size else 0


@dataclass(frozen=True, slots=True)
class Spans:
    """Kernels as spans of the flat update: (start, length) of each."""

    start: Ints
    length: Ints

    def take(self, chosen: Ints) -> Spans:
        """Only the chosen kernels, in the order given."""
        return Spans(self.start[chosen], self.length[chosen])


@dataclass(frozen=True, slots=True)
class Norms:
    """Per kernel: squared L2 norm, largest magnitude, least non-zero magnitude."""

    energy: Doubles
    largest: Floats
    least: Floats


@dataclass(frozen=True, slots=True)
class Grid:
    """The quantization points {Q_l}: u_min, u_max and L, as they travel."""

    u_min: float
    u_max: float
    levels: int

    @property
    def symbols(self) -> int:
        """Number of points, 0 among them."""
        return self.levels + (1 if self.u_min == 0 else 2)

    @property
    def step(self) -> float:
        """Distance between two points."""
        return (self.u_max - self.u_min) / self.levels


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Which kernels of all tensors are kept, and what their elements are, one after the other."""

    mask: Bools
    grid: Grid
    symbols: Symbols
    negative: Bytes


@dataclass(frozen=True, slots=True)
class Packing:
    """How kept kernels become a payload, and how all elements and their mask come back."""

    magic: bytes
    pack: Callable[[Kept, Sequence[Part], Bond], bytes]
    unpack: Callable[[bytes, Sequence[Part], Bond], tuple[Floats, Bools]]


def write_grid(grid: Grid) -> bytes:
    """float32 u_min and u_max, varint L."""
    return _RANGE.pack(grid.u_min, grid.u_max) + varint(grid.levels)


def read_grid(reader: Reader) -> Grid:
    """What was written, if it makes sense."""
    u_min, u_max = _RANGE.unpack(reader.take(_RANGE.size))
    levels = reader.varint(1, MAX_LEVELS)
    if not (isfinite(u_min) and isfinite(u_max) and 0 <= u_min <= u_max and u_max > 0):
        raise PayloadError(f"range [{u_min}, {u_max}] is not finite, ordered and positive")
    return Grid(abs(u_min), u_max, levels)


def row_width(shape: Sequence[int]) -> int:
    """Elements of one row: a matrix or convolution has one row per output, a vector is one row."""
    return prod(shape[1:]) if len(shape) > 1 else prod(shape)


def default_block(shape: Sequence[int]) -> int:
    """Kernel length where nothing is known: k×k for convolutions, else blocks of 32."""
    spatial = prod(shape[2:])
    block = spatial if spatial > 1 else DEFAULT_BLOCK
    return max(1, min(block, row_width(shape)))


def lay_out(shapes: Mapping[str, Sequence[int]], blocks: Mapping[str, int]) -> list[Part]:
    """Place the tensors one after the other, in the order of their names."""
    parts, offset = [], 0
    for name in sorted(shapes):
        shape = tuple(int(n) for n in shapes[name])
        block = blocks.get(name, default_block(shape))
        if not 1 <= block <= max(1, row_width(shape)):
            raise UpdateError(
                f"{name}: a kernel of {block} inputs does not fit its rows of {row_width(shape)}"
            )
        parts.append(Part(name, shape, offset, block))
        offset += parts[-1].size
    return parts


def spans_of(part: Part) -> Spans:
    """Cut one tensor into kernels: every row into runs of `block`."""
    if not part.size:
        return Spans(np.zeros(0, np.int64), np.zeros(0, np.int64))
    column = np.arange(0, part.width, part.block)
    row = np.arange(part.offset, part.offset + part.size, part.width)
    length = np.minimum(part.block, part.width - column)
    return Spans((row[:, None] + column).ravel(), np.tile(length, row.size))


def join(spans: Sequence[Spans]) -> Spans:
    """The kernels of several tensors, one after the other."""
    none = [np.zeros(0, np.int64)]
    return Spans(
        np.concatenate([s.start for s in spans] or none),
        np.concatenate([s.length for s in spans] or none),
    )


def measure(flat: Floats, spans: Spans) -> Norms:
    """Norm and magnitudes of every kernel."""
    return Norms(*_measure(flat, spans.start, spans.length))


@compiled
def _measure(flat: Floats, start: Ints, length: Ints) -> tuple[Doubles, Floats, Floats]:
    energy = np.zeros(start.size, np.float64)
    largest = np.zeros(start.size, np.float32)
    least = np.full(start.size, np.inf, np.float32)
    for k in range(start.size):
        total, high, low = 0.0, np.float32(0), np.float32(np.inf)
        for j in range(start[k], start[k] + length[k]):
            magnitude = abs(flat[j])
            total += np.float64(magnitude) * np.float64(magnitude)
            high = max(high, magnitude)
            if magnitude > 0:
                low = min(low, magnitude)
        energy[k], largest[k], least[k] = total, high, low
    return energy, largest, least


def rank(norms: Norms) -> Ints:
    """Non-zero kernels, largest norm first; ties in layout order."""
    norm = np.minimum(np.sqrt(norms.energy), np.finfo(np.float32).max).astype(np.float32)
    # Non-negative floats sort like their bits; with the index below them every key is unique, so
    # that any sorting algorithm gives the same order.
    key = (np.uint64(0xFFFFFFFF) - norm.view(np.uint32)) << np.uint64(32)
    order = np.sort(key | np.arange(norm.size, dtype=np.uint64)) & np.uint64(0xFFFFFFFF)
    return order[: np.count_nonzero(norm)].astype(np.int64)


def kept_for(sparsity: float, kernels: int) -> int:
    """How many of `kernels` stay at sparsity ρ: K − ⌈ρK⌉, at least one (eq. 2)."""
    return max(1, kernels - int(np.ceil(sparsity * kernels)))


def grid_for(norms: Norms, kept: Ints, levels: int) -> Grid:
    """The points between least and largest kept magnitude; from 0 if that is less than a step."""
    u_max, u_min = float(norms.largest[kept].max()), float(norms.least[kept].min())
    return Grid(0.0 if u_min < u_max / levels else u_min, u_max, levels)


def quantize(flat: Floats, spans: Spans, grid: Grid, seed: int) -> tuple[Symbols, Bytes]:
    """Draw a symbol for every element of the kernels, and whether it is negative.

    The draw depends on the seed and on the element's place in the update, on nothing else.
    """
    symbols = np.empty(int(spans.length.sum()), np.uint32)
    negative = np.empty(symbols.size, np.uint8)
    _quantize(
        flat, spans.start, spans.length, (grid.u_min, grid.u_max, grid.step), grid.symbols - 1,
        _key(seed), symbols, negative,
    )  # fmt: skip
    return symbols, negative


def _key(seed: int) -> np.uint64:
    # Hashed, so that neighbouring seeds share nothing.
    digest = blake2s(str(int(seed)).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


@compiled
def _uniform(key: np.uint64, index: int) -> float:
    # Counter-based: SplitMix64's mixing of key and index; its top 53 bits as a double in [0, 1).
    z = key + (np.uint64(index) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(np.int64(z >> np.uint64(11))) * (1.0 / 9007199254740992.0)


@compiled
def point(symbol: Whole, u_min: float, u_max: float, step: float) -> np.float32:
    """The magnitude of a symbol."""
    # One multiplication and one addition in float64, each exactly rounded: the same on every CPU.
    if u_min > 0:
        if symbol == 0:
            return np.float32(0)
        symbol -= 1
    return np.float32(min(symbol * step + u_min, u_max))


@compiled
def _quantize(  # noqa: PLR0917 - a compiled loop takes arrays, not objects
    flat: Floats,
    start: Ints,
    length: Ints,
    bounds: tuple[float, float, float],
    last: int,
    key: np.uint64,
    symbols: Symbols,
    negative: Bytes,
) -> None:
    u_min, u_max, step = bounds
    first, scale = (1 if u_min > 0 else 0), (1.0 / step if step > 0 else 0.0)
    at = 0
    for k in range(start.size):
        for j in range(start[k], start[k] + length[k]):
            magnitude = abs(flat[j])
            negative[at] = flat[j] < 0
            symbol: Whole = 0
            if magnitude > 0:
                symbol = min(last, first + int((magnitude - u_min) * scale))
                below = point(symbol, u_min, u_max, step)
                # Points are rounded to float32: the arithmetic guess may be one too high.
                if below > magnitude:
                    symbol -= 1
                    below = point(symbol, u_min, u_max, step)
                if below < magnitude and symbol < last:
                    above = np.float64(point(symbol + 1, u_min, u_max, step))
                    symbol += _uniform(key, j) * (above - below) < np.float64(magnitude) - below
            symbols[at] = symbol
            at += 1


def dequantize(symbols: Symbols, signs: Bytes, grid: Grid, mask: Bools) -> Floats:
    """Put ±Q where the mask is set, 0 elsewhere; `signs` has a bit per non-zero symbol."""
    flat = np.zeros(mask.size, np.float32)
    _dequantize(symbols, signs, (grid.u_min, grid.u_max, grid.step), mask, flat)
    return flat


@compiled
def _dequantize(
    symbols: Symbols,
    signs: Bytes,
    bounds: tuple[float, float, float],
    mask: Bools,
    flat: Floats,
) -> None:
    u_min, u_max, step = bounds
    at, bit = 0, 0
    for j in range(mask.size):
        if not mask[j]:
            continue
        symbol = np.int64(symbols[at])
        at += 1
        if symbol > 0:
            size = point(symbol, u_min, u_max, step)
            flat[j] = -size if (signs[bit >> 3] >> (bit & 7)) & 1 else size
            bit += 1


def place(
    part: Part,
    kept: Bools,
    numbers: Integers,
    grid: Grid,
    onto: tuple[Floats, Bools],
) -> bool:
    """Put the kept kernels' signed symbols, one row each, onto values and mask of the whole update.

    False if one is beyond the grid, or not 0 beyond the end of a row.
    """
    values, mask = onto
    here = slice(part.offset, part.offset + part.size)
    bounds, cut = (grid.u_min, grid.u_max, grid.step), (part.width, part.block)
    return _place(kept, cut, numbers, bounds, grid.symbols, values[here], mask[here])


# Next to `point`: the machine code on disk is renewed when its own file changes, not another one.
@compiled
def _place(  # noqa: PLR0917 - a compiled loop takes arrays, not objects
    kept: Bools,
    cut: tuple[int, int],
    numbers: Integers,
    bounds: tuple[float, float, float],
    symbols: int,
    values: Floats,
    mask: Bools,
) -> bool:
    width, block = cut
    u_min, u_max, step = bounds
    kernel, at = 0, 0
    for row in range(0, values.size, width):
        for column in range(0, width, block):
            for j in range(block if kept[kernel] else 0):
                number, inside = np.int64(numbers[at, j]), column + j < width
                if abs(number) >= symbols or (number != 0 and not inside):
                    return False
                if inside:
                    size = point(abs(number), u_min, u_max, step)
                    values[row + column + j] = -size if number < 0 else size
                    mask[row + column + j] = True
            at += kept[kernel]
            kernel += 1
    return True


def cover(part: Part, kept: Bools, mask: Bools) -> None:
    """Set the elements of the kept kernels in a mask of the whole update."""
    _cover(kept, part.offset, part.width, part.block, mask[: part.offset + part.size])


@compiled
def _cover(kept: Bools, offset: int, width: int, block: int, mask: Bools) -> None:
    kernel = 0
    for row in range(offset, mask.size, width):
        for column in range(0, width, block):
            if kept[kernel]:
                mask[row + column : row + min(column + block, width)] = True
            kernel += 1
