"""The kernel codec's values in context: the same kernels and levels as "kernel" in fewer bytes.

The body of the frame "ACFK" is, if anything is kept: float32 u_min and u_max, varint L, for every
tensor in name order the varint length of its kernels (0: nothing of it is kept), then one range
code (`context`). For each tensor that has some: which kernels are kept, one row of flags per row of
the tensor, then the symbols of the kept kernels with their signs, one row per kernel. A kernel at
the end of a row may be shorter; zeros make it up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anycostfl.codec import kernels
from anycostfl.codec.arrays import Bools, Floats, Integers, Ints
from anycostfl.codec.context import Likelihoods, Source, Writer, likelihoods
from anycostfl.codec.frame import Bond, seal, unseal_exact
from anycostfl.codec.kernels import Kept, Packing, Part
from anycostfl.codec.varint import Reader, varint
from anycostfl.compiled import compiled
from anycostfl.errors import PayloadError

MAGIC = b"ACFK"


def pack(kept: Kept, parts: Sequence[Part], tie: Bond) -> bytes:
    """The payload."""
    head = bytearray(kernels.write_grid(kept.grid))
    flags, levels = likelihoods(), likelihoods()
    writer = Writer(kept.symbols.size // 4)
    signed = np.where(kept.negative, -1, 1).astype(np.int32) * kept.symbols.astype(np.int32)
    first, at = 0, 0
    for part in parts:
        own = kept.mask[first : first + part.kernels]
        first += part.kernels
        head += varint(part.block if own.any() else 0)
        if not own.any():
            continue
        length = kernels.spans_of(part).length[own]
        writer.integers(own.reshape(rows_of(part), -1).astype(np.int32), flags, signed=False)
        numbers = np.zeros((length.size, part.block), np.int32)
        at = _spread(signed, at, length, numbers)
        writer.integers(numbers, levels)
    return seal(MAGIC, bytes(head) + writer.finish(), tie)


def rows_of(part: Part) -> int:
    """How many rows a tensor has."""
    return part.size // part.width


@compiled
def _spread(signed: Integers, at: int, length: Ints, numbers: Integers) -> int:
    for k in range(length.size):
        for j in range(length[k]):
            numbers[k, j] = signed[at]
            at += 1
    return at


def unpack(payload: bytes, parts: Sequence[Part], tie: Bond) -> tuple[Floats, Bools]:
    """All elements, and which of them belong to kept kernels."""
    body = unseal_exact(payload, MAGIC, tie)
    size = sum(part.size for part in parts)
    flat, mask = np.zeros(size, np.float32), np.zeros(size, np.bool_)
    if not body:
        return flat, mask
    reader = Reader(body, "payload")
    grid = kernels.read_grid(reader)
    blocks = [reader.varint(0, part.width if part.size else 0) for part in parts]
    source, flags, levels = Source(reader.rest()), likelihoods(), likelihoods()
    for part, block in zip(parts, blocks, strict=True):
        if block:
            cut = Part(part.name, part.shape, part.offset, block)
            kept = _read_mask(source, cut, flags)
            numbers = source.integers(int(np.count_nonzero(kept)), block, levels)
            if not kernels.place(cut, kept, numbers, grid, (flat, mask)):
                raise PayloadError(f"{part.name}: a level beyond {grid.levels}, or beyond its row")
    source.finish()
    return flat, mask


def _read_mask(source: Source, part: Part, contexts: Likelihoods) -> Bools:
    rows = rows_of(part)
    flags = source.integers(rows, part.kernels // rows, contexts, signed=False)
    if flags.max() != 1:
        raise PayloadError(f"{part.name}: kept flags are 0 or 1, and one at least is 1")
    mask: Bools = flags.ravel() == 1
    return mask


PACKING = Packing(MAGIC, pack, unpack)
