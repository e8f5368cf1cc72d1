"""The body of a frame "ACFU" as sections: what each of its bytes means (docs/wire-format.md).

The tuple {u_min, u_max, L, m, 𝓛} of Sec. III-C.2 as bytes. Lengths are explicit, so that a reader
can skip optional sections of a later minor version; everything is little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

from anycostfl.codec.frame import MAJOR, MINOR, Bond, open_any, seal, unseal
from anycostfl.codec.kernels import Grid, read_grid, write_grid
from anycostfl.codec.varint import Reader, varint
from anycostfl.errors import PayloadError

MAGIC = b"ACFU"
MOST_OTHERS = 64  # sections that are no tensors, those of later minor versions included
CRITICAL = 0x80  # a reader that does not know such a section must refuse the payload


class Section(IntEnum):
    """Sections of version 1, in the order in which they appear."""

    TENSOR = 0x81
    RANGE = 0x82
    TABLE = 0x83
    LEVELS = 0x84
    SPARE = 0x85
    SIGNS = 0x86


_KNOWN = frozenset(int(section) for section in Section)
_ORDERS = (
    [Section.RANGE, Section.TABLE, Section.LEVELS, Section.SIGNS],
    [Section.RANGE, Section.TABLE, Section.LEVELS, Section.SPARE, Section.SIGNS],
)
_KINDS_OF_BYTES: dict[int, str] = {
    Section.TENSOR: "mask",
    Section.TABLE: "table",
    Section.LEVELS: "levels",
    Section.SPARE: "levels",
    Section.SIGNS: "signs",
}


@dataclass(frozen=True, slots=True)
class TensorSection:
    """One tensor of which something is kept: its place in name order, kernel length, mask."""

    index: int
    block: int
    kept: int
    mask: bytes


@dataclass(frozen=True, slots=True)
class Body:
    """Everything a payload says if something is kept."""

    tensors: tuple[TensorSection, ...]
    grid: Grid
    table: bytes
    levels: bytes
    spare: bytes
    signs: bytes


def write(body: Body, tie: Bond) -> bytes:
    """Write the payload."""
    return seal(MAGIC, b"".join(_section(kind, data) for kind, data in _sections(body)), tie)


def _section(kind: int, data: bytes) -> bytes:
    return bytes([kind]) + varint(len(data)) + data


def _sections(body: Body) -> list[tuple[Section, bytes]]:
    tensors = [
        (Section.TENSOR, varint(t.index) + varint(t.block) + varint(t.kept) + t.mask)
        for t in body.tensors
    ]
    spare = [(Section.SPARE, body.spare)] if body.spare else []
    return [
        *tensors,
        (Section.RANGE, write_grid(body.grid)),
        (Section.TABLE, body.table),
        (Section.LEVELS, body.levels),
        *spare,
        (Section.SIGNS, body.signs),
    ]


def read(payload: bytes, tie: Bond, tensors: int) -> Body | None:
    """Read a payload bound to `tie` for a plan of so many tensors; None if nothing is kept."""
    minor, data = unseal(payload, MAGIC, tie)
    known = _known(_walk(data, tensors + MOST_OTHERS), minor)
    if not known:
        return None
    kinds = [kind for kind, _ in known]
    count = kinds.count(Section.TENSOR)
    if count < 1 or kinds[count:] not in _ORDERS:
        raise PayloadError("sections are missing, repeated or out of order")
    parsed = tuple(_tensor(data, tensors) for _, data in known[:count])
    if any(a.index >= b.index for a, b in pairwise(parsed)):
        raise PayloadError("tensor sections are repeated or out of order")
    rest = dict(known[count:])
    return Body(
        parsed,
        _grid(rest[Section.RANGE]),
        rest[Section.TABLE],
        rest[Section.LEVELS],
        rest.get(Section.SPARE, b""),
        rest[Section.SIGNS],
    )


def _walk(body: bytes, most: int) -> list[tuple[int, bytes]]:
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


def _tensor(data: bytes, tensors: int) -> TensorSection:
    reader = Reader(data, "tensor section")
    index = reader.varint(0, tensors - 1)
    block, kept = reader.varint(1, 2**62), reader.varint(1, 2**62)
    return TensorSection(index, block, kept, reader.rest())


def _grid(data: bytes) -> Grid:
    reader = Reader(data, "range section")
    grid = read_grid(reader)
    reader.finish()
    return grid


def bytes_by_section(payload: bytes) -> dict[str, int]:
    """Where the bytes of a well-formed payload went: mask, levels, signs, table and the rest."""
    _, _, body = open_any(payload, MAGIC)
    spent = dict.fromkeys(("mask", "levels", "signs", "table"), 0)
    for kind, data in _walk(body, len(body)):
        if kind in _KINDS_OF_BYTES:
            spent[_KINDS_OF_BYTES[kind]] += len(data)
    return spent | {"header": len(payload) - sum(spent.values())}
