"""The envelope of every payload: magic, version, length, what binds it to its plan, a checksum.

Bytes, little-endian: magic (4), version major and minor, total length u32, digest of the binding
(8), checksum of names and shapes u32, the body, CRC-32 of everything before it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2s

from anycostfl.errors import DamagedPayloadError, ForeignPayloadError, PayloadError

MAJOR, MINOR = 1, 0
MAX_LENGTH = 2**32 - 1
_HEADER = struct.Struct("<4sBBI8sI")
_CHECKSUM = struct.Struct("<I")
OVERHEAD = _HEADER.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Bond:
    """What ties a payload to its plan: a digest of the binding, a checksum of names and shapes."""

    binding: bytes
    shapes: int


def bond(binding: bytes, shapes: Mapping[str, Sequence[int]]) -> Bond:
    """Digest what both sides know. It guards against mix-ups; it does not authenticate."""
    text = "\n".join(f"{name}:{[int(n) for n in shapes[name]]}" for name in sorted(shapes))
    digest = blake2s(binding, digest_size=8, person=b"anycost1").digest()
    return Bond(digest, zlib.crc32(text.encode()))


def seal(magic: bytes, body: bytes, tie: Bond) -> bytes:
    """The payload that carries a body."""
    length = OVERHEAD + len(body)
    if length > MAX_LENGTH:
        raise PayloadError(f"a payload of {length} bytes is beyond the format's 4 GiB")
    head = _HEADER.pack(magic, MAJOR, MINOR, length, tie.binding, tie.shapes)
    return b"".join((head, body, _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(head)))))


def unseal(payload: bytes, magic: bytes, tie: Bond) -> tuple[int, bytes]:
    """Minor version and body of a payload that is whole and bound to `tie`."""
    minor, found, body = open_any(payload, magic)
    if found.binding != tie.binding:
        raise ForeignPayloadError("the payload is bound to another run, round, device or plan")
    if found.shapes != tie.shapes:
        raise ForeignPayloadError("the payload was made for other parameter names or shapes")
    return minor, body


def unseal_exact(payload: bytes, magic: bytes, tie: Bond) -> bytes:
    """Body of a format that a later minor version may change in any way."""
    minor, body = unseal(payload, magic, tie)
    if minor > MINOR:
        raise PayloadError(f"payload of format {MAJOR}.{minor}; this program reads {MAJOR}.{MINOR}")
    return body


def open_any(payload: bytes, magic: bytes) -> tuple[int, Bond, bytes]:
    """Minor version, bond and body of a payload that is whole, whatever it is bound to."""
    if len(payload) < OVERHEAD:
        raise PayloadError(f"a payload has at least {OVERHEAD} bytes, this one {len(payload)}")
    begin, major, minor, length, binding, shapes = _HEADER.unpack_from(payload)
    if begin != magic:
        raise PayloadError(f"not a payload: it begins with {begin!r} instead of {magic!r}")
    if major != MAJOR:
        raise PayloadError(f"payload of format {major}.{minor}; this program reads {MAJOR}.x")
    if length != len(payload):
        raise DamagedPayloadError(f"the payload says {length} bytes and has {len(payload)}")
    (checksum,) = _CHECKSUM.unpack_from(payload, length - _CHECKSUM.size)
    if zlib.crc32(memoryview(payload)[: -_CHECKSUM.size]) != checksum:
        raise DamagedPayloadError("the checksum does not match: the payload was damaged on its way")
    return minor, Bond(binding, shapes), payload[_HEADER.size : -_CHECKSUM.size]
