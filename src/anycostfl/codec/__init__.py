"""Update codecs (Sec. III-C): an update becomes real bytes at any rate β, and comes back.

`compress` makes a payload of at most β·32·J bits, J being the number of elements; `decompress`
needs the payload and the shapes the server already knows. There are two codecs:

    kernel    the paper's: kernels of largest norm, stochastic levels, one frequency table
    lowrank   not the paper's: quantized factors of every matrix, context-coded

docs/wire-format.md describes the bytes, docs/decisions/0010 the deviations from the paper and 0011
the low-rank codec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch import Tensor

from anycostfl.codec import kernel, lowrank, sections
from anycostfl.codec.arrays import Bools, Floats
from anycostfl.codec.frame import byte_budget, payload_binding
from anycostfl.errors import PayloadError, UnknownNameError, UpdateError
from anycostfl.state import State, Update, with_full_mask

__all__ = [
    "CODECS",
    "Shapes",
    "Upload",
    "byte_budget",
    "check_codec",
    "compress",
    "decode",
    "decompress",
    "dense_update",
    "encode",
    "flatten",
]

Shapes = Mapping[str, Sequence[int]]

MAGICS = {sections.MAGIC: "kernel", lowrank.MAGIC: "lowrank"}
CODECS = tuple(MAGICS.values())


@dataclass(frozen=True, slots=True)
class Upload:
    """What a device must know to encode its update.

    The server issues it and decodes with it. `beta` is relative to 32 bits for each element of the
    update itself; `seed` is for everything the method draws; `binding` ties the payload to run,
    round, device and plan; `blocks` says how many consecutive inputs one channel owns; `codec` is
    for methods without a coding of their own.
    """

    beta: float
    seed: int
    binding: bytes
    blocks: Mapping[str, int] = field(default_factory=dict)
    codec: str = "kernel"


def encode(update: State, upload: Upload) -> bytes:
    """The payload of an update as the server issued it."""
    return compress(
        update,
        upload.beta,
        seed=upload.seed,
        codec=upload.codec,
        blocks=upload.blocks,
        binding=upload.binding,
    )


def decode(payload: bytes, shapes: Shapes, upload: Upload) -> Update:
    """The update and its mask in a payload that the server issued."""
    return decompress(payload, shapes, binding=upload.binding)


def compress(
    update: State,
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
        seed: Seed of the stochastic quantizer; the same seed gives the same bytes. Low rank is
            deterministic, but its bytes may depend on the number of torch threads.
        codec: One of `CODECS`.
        blocks: Number of consecutive inputs that one channel owns, for weights where it is known.
        binding: What the payload belongs to (run, round, device, plan); the decoder checks it.

    Raises:
        UpdateError: If a tensor is not floating point or has a non-finite element.
        BetaError: If `beta` is outside (0, 1] or too small for an empty payload.
    """
    if codec not in CODECS:
        raise UnknownNameError(f"no codec {codec!r}; there are {', '.join(CODECS)}")
    shapes = {name: tuple(tensor.shape) for name, tensor in update.items()}
    parts = sections.lay_out(shapes, blocks or {})
    bound = payload_binding(binding, shapes)
    flat = flatten(update)
    budget = byte_budget(beta, flat.size)
    if codec == "lowrank":
        tensors = [flat[p.offset : p.offset + p.size].reshape(p.shape) for p in parts]
        return lowrank.compress_lowrank(tensors, budget, bound)
    draft = kernel.Draft.of(flat, parts, seed, bound)
    return kernel.compress_kernel(draft, budget, kernel.first_guess(beta))


def decompress(
    payload: bytes, like: Mapping[str, Tensor | Sequence[int]], *, binding: bytes = b""
) -> Update:
    """Decode a payload for parameters shaped like `like` (tensors or shapes), as float32.

    Raises:
        PayloadError: If the payload is malformed, damaged, or not for these shapes and binding.
    """
    shapes = {n: tuple(x.shape if isinstance(x, Tensor) else x) for n, x in like.items()}
    payload, bound = bytes(payload), payload_binding(binding, shapes)
    if payload.startswith(lowrank.MAGIC):
        return dense_update(lowrank.decompress_lowrank(payload, shapes, bound), shapes)
    parts = sections.lay_out(shapes, {})
    flat, mask = kernel.decompress_kernel(payload, parts, bound)
    return Update(unflatten(flat, shapes), unflatten(mask, shapes))


def check_codec(payload: bytes, asked: str) -> None:
    """Reject a payload of another codec than asked for; methods check their own formats."""
    found = MAGICS.get(payload[:4], asked)
    if found != asked:
        raise PayloadError(f"the payload is {found}; {asked} was asked for")


def flatten(update: State) -> Floats:
    """All elements as one float32 vector, tensors sorted by name."""
    pieces = []
    for name in sorted(update):
        if not update[name].is_floating_point():
            raise UpdateError(f"{name} is {update[name].dtype}; it must be floating point")
        piece = update[name].detach().to("cpu", torch.float32).flatten().numpy()
        if not np.isfinite(piece).all():
            raise UpdateError(f"{name} has an element that is not finite in float32")
        pieces.append(piece)
    return np.concatenate(pieces) if pieces else np.empty(0, np.float32)


def unflatten(flat: Floats | Bools, shapes: Shapes) -> dict[str, Tensor]:
    """Split a vector into tensors of these shapes, in the order of `shapes`."""
    tensors, start = {}, 0
    for name in sorted(shapes):
        end = start + prod(shapes[name])
        tensors[name] = torch.from_numpy(flat[start:end]).view(tuple(shapes[name]))
        start = end
    return {name: tensors[name] for name in shapes}


def dense_update(flat: Floats, shapes: Shapes) -> Update:
    """A decoded update in which every element counts, zeros included."""
    if not np.isfinite(flat).all():
        raise PayloadError("the payload has a value that is not finite")
    return with_full_mask(Update(unflatten(flat, shapes), {}))
