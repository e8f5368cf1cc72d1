"""The paper's codec: kept kernels as masks, levels under one table for all, and signs.

What is kept of an update (`kernels`, `refine`) becomes the sections of a frame "ACFU"
(`sections`), each through its own entropy code (`entropy`), and comes back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anycostfl.codec import entropy, kernels, sections
from anycostfl.codec.arrays import Bools, Floats
from anycostfl.codec.frame import Bond
from anycostfl.codec.kernels import Kept, Packing, Part
from anycostfl.codec.sections import Body, TensorSection
from anycostfl.errors import PayloadError


def pack(kept: Kept, parts: Sequence[Part], tie: Bond) -> bytes:
    """The payload."""
    tokens, spare = entropy.tokenize(kept.symbols)
    counts = np.bincount(tokens, minlength=entropy.token_count(kept.grid.symbols))
    precision, freq = entropy.best_table(counts)
    body = Body(
        tensors=_tensors(kept.mask, parts),
        grid=kept.grid,
        table=entropy.encode_table(precision, freq),
        levels=entropy.encode_levels(tokens, precision, freq),
        spare=spare,
        signs=entropy.encode_signs(kept.symbols, kept.negative),
    )
    return sections.write(body, tie)


def _tensors(mask: Bools, parts: Sequence[Part]) -> tuple[TensorSection, ...]:
    tensors, first = [], 0
    for index, part in enumerate(parts):
        own = mask[first : first + part.kernels]
        first += part.kernels
        if own.any():
            count = int(np.count_nonzero(own))
            tensors.append(TensorSection(index, part.block, count, entropy.encode_mask(own)))
    return tuple(tensors)


def unpack(payload: bytes, parts: Sequence[Part], tie: Bond) -> tuple[Floats, Bools]:
    """All elements, and which of them belong to kept kernels."""
    body = sections.read(payload, tie, len(parts))
    mask = np.zeros(sum(part.size for part in parts), np.bool_)
    if body is None:
        return np.zeros(mask.size, np.float32), mask
    for section in body.tensors:
        _cover(section, parts[section.index], mask)
    grid = body.grid
    precision, freq = entropy.decode_table(body.table, entropy.token_count(grid.symbols))
    symbols = entropy.detokenize(
        entropy.decode_levels(body.levels, precision, freq, int(np.count_nonzero(mask))),
        body.spare,
        grid.symbols,
    )
    signs = entropy.decode_signs(body.signs, symbols)
    return kernels.dequantize(symbols, signs, grid, mask), mask


def _cover(section: TensorSection, part: Part, mask: Bools) -> None:
    """Set what a section keeps in the mask of all elements; nothing else grows with the claim."""
    if section.block > part.width or not part.size:
        raise PayloadError(f"{part.name}: kernels of {section.block} in rows of {part.width}")
    part = Part(part.name, part.shape, part.offset, section.block)
    if section.kept > part.kernels:
        raise PayloadError(f"{part.name}: {section.kept} of {part.kernels} kernels kept")
    kernels.cover(part, entropy.decode_mask(section.mask, part.kernels, section.kept), mask)


PACKING = Packing(sections.MAGIC, pack, unpack)
