"""An uncompressed update as a payload: 32 bits per element, guarded like a compressed one.

Bytes, little-endian: magic "ACFD", version (major, minor), total length u32, digest of the binding
(8), checksum of names and shapes u32, the float32 values of all tensors in the order of their
names, CRC-32 of everything before it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from anycostfl.codec.wire import bond
from anycostfl.errors import PayloadError, UpdateError
from anycostfl.types import Update

MAGIC = b"ACFD"
_HEADER = struct.Struct("<4sBBI8sI")
_CHECKSUM = struct.Struct("<I")


def pack_dense(update: Mapping[str, Tensor], *, binding: bytes = b"") -> bytes:
    """Every element as it is."""
    shapes = {name: tuple(tensor.shape) for name, tensor in update.items()}
    for name, tensor in update.items():
        if not torch.isfinite(tensor).all():
            raise UpdateError(f"{name} has an element that is not finite in float32")
    body = b"".join(
        update[name].detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4").tobytes()
        for name in sorted(update)
    )
    tie = bond(binding, shapes)
    length = _HEADER.size + len(body) + _CHECKSUM.size
    head = _HEADER.pack(MAGIC, 1, 0, length, tie.binding, tie.shapes)
    return head + body + _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(head)))


def unpack_dense(
    payload: bytes, like: Mapping[str, Sequence[int]], *, binding: bytes = b""
) -> Update:
    """The update of these shapes; its mask is true everywhere."""
    shapes = {name: tuple(shape) for name, shape in like.items()}
    expected = _HEADER.size + 4 * sum(map(prod, shapes.values())) + _CHECKSUM.size
    if len(payload) != expected:
        raise PayloadError(f"a dense payload of this plan has {expected} bytes, not {len(payload)}")
    magic, major, minor, length, digest, checksum = _HEADER.unpack_from(payload)
    tie = bond(binding, shapes)
    if (magic, major, minor, length) != (MAGIC, 1, 0, expected):
        raise PayloadError("not a dense payload of format 1.0")
    if (digest, checksum) != (tie.binding, tie.shapes):
        raise PayloadError("the payload is bound to another run, round, device or plan")
    if zlib.crc32(memoryview(payload)[:-4]) != _CHECKSUM.unpack_from(payload, expected - 4)[0]:
        raise PayloadError("the checksum does not match: the payload was damaged on its way")
    body = memoryview(payload)[_HEADER.size : -_CHECKSUM.size]
    flat = torch.from_numpy(np.frombuffer(body, "<f4").astype(np.float32))
    if not torch.isfinite(flat).all():
        raise PayloadError("a dense payload holds a value that is not finite")
    values, start = {}, 0
    for name in sorted(shapes):
        end = start + prod(shapes[name])
        values[name], start = flat[start:end].view(shapes[name]), end
    masks = {name: torch.ones(shape, dtype=torch.bool) for name, shape in shapes.items()}
    return Update({name: values[name] for name in shapes}, masks)
