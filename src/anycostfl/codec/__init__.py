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

from collections.abc import Mapping, Sequence

from torch import Tensor

from anycostfl.codec import kernel, kernelplus, lowrank
from anycostfl.codec.fit import shipped_fit
from anycostfl.codec.flat import all_of, flatten, unflatten
from anycostfl.codec.frame import OVERHEAD, bond
from anycostfl.codec.kernels import lay_out
from anycostfl.codec.refine import Draft, fill
from anycostfl.errors import BetaError, PayloadError, UnknownNameError
from anycostfl.state import Update

__all__ = ["CODECS", "byte_budget", "check_codec", "compress", "decompress"]

PACKINGS = {"kernel": kernel.PACKING, "kernel+": kernelplus.PACKING}
CODECS = (*PACKINGS, "lowrank")
MAGICS = {packing.magic: name for name, packing in PACKINGS.items()} | {lowrank.MAGIC: "lowrank"}


def compress(
    update: Mapping[str, Tensor],
    beta: float,
    *,
    seed: int,
    codec: str = "kernel",
    blocks: Mapping[str, int] | None = None,
    binding: bytes = b"",
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

    Raises:
        UpdateError: If a tensor is not floating point or has an element that is not finite.
        BetaError: If `beta` is outside (0, 1] or buys less than an empty payload.
    """
    if codec not in CODECS:
        raise UnknownNameError(f"no codec {codec!r}; there are {', '.join(CODECS)}")
    shapes = {name: tuple(tensor.shape) for name, tensor in update.items()}
    parts, tie = lay_out(shapes, blocks or {}), bond(binding, shapes)
    flat = flatten(update)
    budget = byte_budget(beta, flat.size)
    if codec == "lowrank":
        tensors = [flat[p.offset : p.offset + p.size].reshape(p.shape) for p in parts]
        return lowrank.compress_lowrank(tensors, budget, tie)
    draft = Draft.of(flat, parts, seed, tie, packing=PACKINGS[codec])
    return fill(draft, budget, shipped_fit().predict(beta))


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
    packing = kernelplus.PACKING if payload.startswith(kernelplus.MAGIC) else kernel.PACKING
    flat, mask = packing.unpack(payload, lay_out(shapes, {}), tie)
    return Update(unflatten(flat, shapes), unflatten(mask, shapes))


def check_codec(payload: bytes, asked: str) -> None:
    """Refuse a payload of another codec than was asked for; methods know their own formats."""
    came = MAGICS.get(payload[:4], asked)
    if came != asked:
        raise PayloadError(f"the payload is {came}; {asked} was asked for")


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
