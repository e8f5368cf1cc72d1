"""Update codecs (Sec. III-C): an update becomes real bytes at any rate β, and comes back.

`compress` makes a payload of at most β·32·J bits, J being the number of elements; `decompress`
needs the payload and the shapes the server already knows. Three codecs share that promise:

    kernel    the paper's: kernels of largest norm, drawn levels, one table for all
    kernel+   the same kernels and levels, coded in context
    lowrank   not the paper's: quantized factors of every matrix, coded in context

docs/wire-format.md describes the bytes, docs/decisions/0010 the deviations from the paper and 0011
the low-rank codec.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from anycostfl.codec import entropy, kernelplus, kernels, lowrank, wire
from anycostfl.codec.fit import Fit, shipped_fit
from anycostfl.codec.flat import all_of
from anycostfl.codec.frame import OVERHEAD, Bond, bond
from anycostfl.codec.refine import Draft, fill
from anycostfl.errors import BetaError, PayloadError, UnknownName, UpdateError
from anycostfl.types import Update

__all__ = ["CODECS", "byte_budget", "check_codec", "compress", "decompress"]

CODECS = ("kernel", "kernel+", "lowrank")
MAGICS = {wire.MAGIC: "kernel", kernelplus.MAGIC: "kernel+", lowrank.MAGIC: "lowrank"}


def compress(
    update: Mapping[str, Tensor],
    beta: float,
    *,
    seed: int,
    codec: str = "kernel",
    blocks: Mapping[str, int] | None = None,
    binding: bytes = b"",
    fit: Fit | None = None,
) -> bytes:
    """Encode an update into at most `beta`·32 bits per element.

    Args:
        update: Floating-point tensors by parameter name.
        beta: Payload bits over 32 bits per element, in (0, 1].
        seed: Chooses the quantizer's draws; the same seed gives the same bytes. Low rank draws
            nothing; its bytes may depend on how many threads torch computes with.
        codec: One of `CODECS`.
        blocks: How many consecutive inputs one channel owns, per weight where it is known.
        binding: What the payload belongs to (run, round, device, plan); the decoder checks it.
        fit: First guess of (ρ, L) for a β; a shipped one if not given.

    Raises:
        UpdateError: If a tensor is not floating point or has an element that is not finite.
        BetaError: If `beta` is outside (0, 1] or buys less than an empty payload.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in update.items()}
    parts = kernels.lay_out(shapes, blocks or {})
    flat = kernels.flatten(update, parts)
    budget = byte_budget(beta, flat.size)
    if codec not in CODECS:
        raise UnknownName(f"no codec {codec!r}; there are {', '.join(CODECS)}")
    if not np.isfinite(flat).all():
        raise UpdateError(
            f"{_not_finite(flat, parts)} has an element that is not finite in float32"
        )
    if codec == "lowrank":
        tensors = [flat[p.offset : p.offset + p.size].reshape(p.shape) for p in parts]
        return lowrank.compress_lowrank(tensors, budget, bond(binding, shapes))
    draft = Draft.of(flat, parts, seed, bond(binding, shapes))
    draft = replace(draft, in_context=codec == "kernel+")
    return fill(draft, budget, (fit or shipped_fit()).predict(beta))


def decompress(
    payload: bytes, like: Mapping[str, Tensor | Sequence[int]], *, binding: bytes = b""
) -> Update:
    """Decode a payload for parameters shaped like `like` (tensors or shapes), as float32.

    Raises:
        PayloadError: If the payload is malformed, damaged, or not for these shapes and binding.
    """
    shapes = {n: tuple(x.shape if isinstance(x, Tensor) else x) for n, x in like.items()}
    payload, tie = bytes(payload), bond(binding, shapes)
    if payload.startswith(lowrank.MAGIC):
        return all_of(lowrank.decompress_lowrank(payload, shapes, tie), shapes)
    parts = kernels.lay_out(shapes, {})
    if payload.startswith(kernelplus.MAGIC):
        return _shape(*kernelplus.unpack(payload, parts, tie), parts, shapes)
    return _decompress_kernels(payload, parts, shapes, tie)


def check_codec(payload: bytes, asked: str) -> None:
    """Refuse a payload of another codec than was asked for; methods know their own formats."""
    came = MAGICS.get(payload[:4], asked)
    if came != asked:
        raise PayloadError(f"the payload is {came}; {asked} was asked for")


def _decompress_kernels(
    payload: bytes, parts: Sequence[kernels.Part], shapes: Mapping[str, Sequence[int]], tie: Bond
) -> Update:
    size = sum(part.size for part in parts)
    frame = wire.unpack(payload, tie, len(parts))
    if frame is None:
        return _shape(np.zeros(size, np.float32), np.zeros(size, np.bool_), parts, shapes)
    mask = np.zeros(size, np.bool_)
    for section in frame.tensors:
        _cover(section, parts, mask)
    grid = frame.grid
    precision, freq = entropy.decode_table(frame.table, entropy.token_count(grid.symbols))
    symbols = entropy.detokenize(
        entropy.decode_levels(frame.levels, precision, freq, int(np.count_nonzero(mask))),
        frame.spare,
        grid.symbols,
    )
    signs = entropy.decode_signs(frame.signs, symbols)
    return _shape(kernels.dequantize(symbols, signs, grid, mask), mask, parts, shapes)


def byte_budget(beta: float, elements: int) -> int:
    """Whole bytes that β·32 bits per element buy."""
    if not 0 < beta <= 1:
        raise BetaError(f"beta is {beta}; it must be in (0, 1]")
    budget = int(beta * 4 * elements)
    if budget < OVERHEAD:
        raise BetaError(
            f"beta {beta:g} buys {budget} bytes for {elements} elements; even an empty payload "
            f"takes {OVERHEAD}"
        )
    return budget


def _cover(section: wire.TensorSection, parts: Sequence[kernels.Part], mask: entropy.Bools) -> None:
    """Set what a section keeps in the mask of all elements; nothing else grows with the claim."""
    part = parts[section.index]
    if section.block > part.width or not part.size:
        raise PayloadError(f"{part.name}: kernels of {section.block} in rows of {part.width}")
    part = kernels.Part(part.name, part.shape, part.offset, section.block)
    if section.kept > part.kernels:
        raise PayloadError(f"{part.name}: {section.kept} of {part.kernels} kernels kept")
    kernels.cover(part, entropy.decode_mask(section.mask, part.kernels, section.kept), mask)


def _shape(
    flat: kernels.Floats,
    mask: entropy.Bools,
    parts: Sequence[kernels.Part],
    names: Iterable[str],
) -> Update:
    values, masks = {}, {}
    for part in parts:
        here = slice(part.offset, part.offset + part.size)
        values[part.name] = torch.from_numpy(flat[here]).reshape(part.shape)
        masks[part.name] = torch.from_numpy(mask[here]).reshape(part.shape)
    return Update({n: values[n] for n in names}, {n: masks[n] for n in names})


def _not_finite(flat: kernels.Floats, parts: Sequence[kernels.Part]) -> str:
    return next(
        part.name
        for part in parts
        if not np.isfinite(flat[part.offset : part.offset + part.size]).all()
    )
