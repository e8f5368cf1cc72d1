"""The bitstream of the kernel codec, frame "ACFU" (docs/wire-format.md).

The tuple {u_min, u_max, L, m, 𝓛} of Sec. III-C.2 as sections: one mask per tensor of which
something is kept, the range of the levels, their frequency table, the levels, the signs. Section
lengths are explicit, so that a reader can skip optional sections of a later minor version.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import isfinite, prod

import numpy as np

from anycostfl.codec import entropy
from anycostfl.codec.arrays import Bools, Bytes, Symbols
from anycostfl.codec.frame import BODY, MAJOR, MINOR, PayloadBinding, Reader, seal, unseal, varint
from anycostfl.compiled import compiled
from anycostfl.errors import PayloadError, UpdateError

MAGIC = b"ACFU"
DEFAULT_BLOCK = 32
MAX_LEVELS = 2**24 - 2  # finer than a float32 can resolve
MAX_OTHER_SECTIONS = 64  # besides tensors, including those of later minor versions
CRITICAL = 0x80  # a reader must reject a payload with such a section if it does not know it
_RANGE = struct.Struct("<ff")


class Section(IntEnum):
    """Sections of version 1, in the order in which they appear."""

    TENSOR = 0x81
    RANGE = 0x82
    TABLE = 0x83
    LEVELS = 0x84
    SPARE = 0x85
    SIGNS = 0x86


_KNOWN = frozenset(int(section) for section in Section)
_AFTER_TENSORS = [Section.RANGE, Section.TABLE, Section.LEVELS, Section.SIGNS]
_WITH_SPARE = [Section.RANGE, Section.TABLE, Section.LEVELS, Section.SPARE, Section.SIGNS]
_LABELS: dict[int, str] = {
    Section.TENSOR: "mask",
    Section.TABLE: "table",
    Section.LEVELS: "levels",
    Section.SPARE: "levels",
    Section.SIGNS: "signs",
}


@dataclass(frozen=True, slots=True)
class Part:
    """Where one tensor lies in the flat update, and the length of its kernels."""

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
        """Number of elements in a row, which is everything one output channel owns."""
        return row_width(self.shape)

    @property
    def kernels(self) -> int:
        """Number of kernels; the last of a row may be shorter than `block`."""
        return self.size // self.width * -(-self.width // self.block) if self.size else 0


def row_width(shape: Sequence[int]) -> int:
    """Elements per row: a matrix or convolution has one row per output, a vector is one row."""
    return prod(shape[1:]) if len(shape) > 1 else prod(shape)


def default_block(shape: Sequence[int]) -> int:
    """Kernel length unless the caller knows better: k×k for convolutions, else blocks of 32."""
    spatial = prod(shape[2:])
    block = spatial if spatial > 1 else DEFAULT_BLOCK
    return max(1, min(block, row_width(shape)))


def lay_out(shapes: Mapping[str, Sequence[int]], blocks: Mapping[str, int]) -> list[Part]:
    """Place the tensors one after the other, sorted by name."""
    parts, offset = [], 0
    for name in sorted(shapes):
        shape = tuple(int(n) for n in shapes[name])
        width, block = row_width(shape), blocks.get(name, default_block(shape))
        if not 1 <= block <= max(1, width):
            raise UpdateError(f"{name}: kernel length is {block}; it must be in [1, {width}]")
        parts.append(Part(name, shape, offset, block))
        offset += parts[-1].size
    return parts


@dataclass(frozen=True, slots=True)
class Grid:
    """The quantization points {Q_l}: u_min, u_max and L, as transmitted."""

    u_min: float
    u_max: float
    levels: int

    @property
    def symbols(self) -> int:
        """Number of points, including 0."""
        return self.levels + (1 if self.u_min == 0 else 2)

    @property
    def step(self) -> float:
        """Distance between two points."""
        return (self.u_max - self.u_min) / self.levels

    @property
    def bounds(self) -> tuple[float, float, float]:
        """What compiled loops need."""
        return self.u_min, self.u_max, self.step


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """The elements of the kept kernels: points, and a sign bit for each non-zero one."""

    grid: Grid
    symbols: Symbols
    signs: Bytes  # packed, first bit lowest, 1 for negative


@dataclass(frozen=True, slots=True)
class Body:
    """The contents of all sections; `tensors` has one for each tensor with kept kernels."""

    tensors: tuple[bytes, ...]
    grid: Grid
    table: bytes
    levels: bytes
    spare: bytes
    signs: bytes


def pack(
    mask: Bools, quantized: Quantized, parts: Sequence[Part], binding: PayloadBinding
) -> bytes:
    """Entropy-code the mask over all kernels and the elements of the kept ones."""
    tokens, spare = entropy.tokenize(quantized.symbols)
    counts = np.bincount(tokens, minlength=entropy.token_count(quantized.grid.symbols))
    precision, freq = entropy.best_table(counts)
    body = Body(
        tensors=tuple(_masks(mask, parts)),
        grid=quantized.grid,
        table=entropy.encode_table(precision, freq),
        levels=entropy.encode_levels(tokens, precision, freq),
        spare=spare,
        signs=quantized.signs.tobytes(),
    )
    return write(body, binding)


def _masks(mask: Bools, parts: Sequence[Part]) -> Iterator[bytes]:
    first = 0
    for index, part in enumerate(parts):
        own = mask[first : first + part.kernels]
        first += part.kernels
        if own.any():
            head = varint(index) + varint(part.block) + varint(int(np.count_nonzero(own)))
            yield head + entropy.encode_mask(own)


def unpack(
    payload: bytes, parts: Sequence[Part], binding: PayloadBinding
) -> tuple[Bools, Quantized] | None:
    """Decode the mask over all elements and the kept ones; None if nothing is kept."""
    body = read(payload, binding, len(parts))
    if body is None:
        return None
    mask, points = _read_masks(body.tensors, parts), body.grid.symbols
    precision, freq = entropy.decode_table(body.table, entropy.token_count(points))
    tokens = entropy.decode_levels(body.levels, precision, freq, int(np.count_nonzero(mask)))
    symbols = entropy.detokenize(tokens, body.spare, points)
    return mask, Quantized(body.grid, symbols, _read_signs(body.signs, symbols))


def write(body: Body, binding: PayloadBinding) -> bytes:
    """Write all sections."""
    grid = body.grid
    sections = [
        *((Section.TENSOR, tensor) for tensor in body.tensors),
        (Section.RANGE, _RANGE.pack(grid.u_min, grid.u_max) + varint(grid.levels)),
        (Section.TABLE, body.table),
        (Section.LEVELS, body.levels),
        *([(Section.SPARE, body.spare)] if body.spare else []),
        (Section.SIGNS, body.signs),
    ]
    data = (bytes([kind]) + varint(len(data)) + data for kind, data in sections)
    return seal(MAGIC, b"".join(data), binding)


def read(payload: bytes, binding: PayloadBinding, tensors: int) -> Body | None:
    """Read a payload for a plan of `tensors` tensors; None if nothing is kept."""
    minor, data = unseal(payload, MAGIC, binding)
    known = _known(split(data, tensors + MAX_OTHER_SECTIONS), minor)
    if not known:
        return None
    kinds = [kind for kind, _ in known]
    count = kinds.count(Section.TENSOR)
    if count < 1 or kinds[count:] not in (_AFTER_TENSORS, _WITH_SPARE):
        raise PayloadError("sections are missing, repeated or out of order")
    rest = dict(known[count:])
    return Body(
        tensors=tuple(data for _, data in known[:count]),
        grid=_read_grid(rest[Section.RANGE]),
        table=rest[Section.TABLE],
        levels=rest[Section.LEVELS],
        spare=rest.get(Section.SPARE, b""),
        signs=rest[Section.SIGNS],
    )


def split(body: bytes, most: int) -> list[tuple[int, bytes]]:
    """Split a body into its sections, at most `most`."""
    reader = Reader(body, "payload")
    sections: list[tuple[int, bytes]] = []
    while not reader.empty:
        if len(sections) == most:
            raise PayloadError(f"the payload has more than {most} sections")
        kind = reader.byte()
        sections.append((kind, reader.take(reader.varint(0, len(body)))))
    return sections


def _known(sections: Sequence[tuple[int, bytes]], minor: int) -> list[tuple[Section, bytes]]:
    known = []
    for kind, data in sections:
        if kind in _KNOWN:
            known.append((Section(kind), data))
        elif kind & CRITICAL or minor <= MINOR:
            raise PayloadError(f"unknown section {kind:#04x} in format {MAJOR}.{minor}")
    return known


def _read_masks(sections: Sequence[bytes], parts: Sequence[Part]) -> Bools:
    """The mask over all elements; every claim is checked before anything is allocated for it."""
    mask, last = np.zeros(sum(part.size for part in parts), np.bool_), -1
    for section in sections:
        reader = Reader(section, "tensor section")
        index = reader.varint(0, len(parts) - 1)
        block = reader.varint(1, 2**62)
        kept = reader.varint(1, 2**62)
        if index <= last:
            raise PayloadError("tensor sections are repeated or out of order")
        last, part = index, replace(parts[index], block=block)
        if block > part.width or not part.size:
            raise PayloadError(f"{part.name}: kernels of {block} in rows of {part.width}")
        if kept > part.kernels:
            raise PayloadError(f"{part.name}: {kept} of {part.kernels} kernels kept")
        kernels = entropy.decode_mask(reader.rest(), part.kernels, kept)
        _cover(kernels, part.width, block, mask[part.offset : part.offset + part.size])
    return mask


@compiled
def _cover(kept: Bools, width: int, block: int, mask: Bools) -> None:
    kernel = 0
    for row in range(0, mask.size, width):
        for column in range(0, width, block):
            if kept[kernel]:
                mask[row + column : row + min(column + block, width)] = True
            kernel += 1


def _read_grid(data: bytes) -> Grid:
    reader = Reader(data, "range section")
    u_min, u_max = _RANGE.unpack(reader.take(_RANGE.size))
    levels = reader.varint(1, MAX_LEVELS)
    if not (isfinite(u_min) and isfinite(u_max) and 0 <= u_min <= u_max and u_max > 0):
        raise PayloadError(f"range [{u_min}, {u_max}] is not finite, ordered and positive")
    reader.finish()
    return Grid(abs(u_min), u_max, levels)


def _read_signs(data: bytes, symbols: Symbols) -> Bytes:
    count = int(np.count_nonzero(symbols))
    if len(data) != -(-count // 8):
        raise PayloadError(f"{count} signs take {-(-count // 8)} bytes, not {len(data)}")
    if count % 8 and data[-1] >> (count % 8):
        raise PayloadError("the signs are not padded with zeros")
    return np.frombuffer(data, np.uint8)


def bytes_by_section(payload: bytes) -> dict[str, int]:
    """Bytes of a well-formed payload by purpose: mask, levels, signs, table and the rest."""
    spent = dict.fromkeys(("mask", "levels", "signs", "table"), 0)
    for kind, data in split(payload[BODY], len(payload)):
        if kind in _LABELS:
            spent[_LABELS[kind]] += len(data)
    return spent | {"header": len(payload) - sum(spent.values())}
