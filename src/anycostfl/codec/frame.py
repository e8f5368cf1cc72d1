"""The envelope of every payload, the integers inside it, and how many bytes it may have.

Envelope, little-endian: magic (4), version major and minor, total length u32, digest of the binding
(8), checksum of names and shapes u32, the body, CRC-32 of everything before it. Integers in a body
are LEB128 varints; `Reader` never reads past the end of its bytes.

Every codec has one number that makes its payloads larger: kernels, levels, elements, or a finer
step. How sizes grow with it differs, so each codec proposes what to try next; the bracket, the
order of trials and when to stop are the same for all (`search`).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2s

from anycostfl.errors import BetaError, DamagedPayloadError, ForeignPayloadError, PayloadError

MAJOR, MINOR = 1, 0
MAX_LENGTH = 2**32 - 1
MAX_VARINT_BYTES = 9
_HEADER = struct.Struct("<4sBBI8sI")
_CHECKSUM = struct.Struct("<I")
OVERHEAD = _HEADER.size + _CHECKSUM.size
BODY = slice(_HEADER.size, -_CHECKSUM.size)  # where the body is in a payload


@dataclass(frozen=True, slots=True)
class PayloadBinding:
    """What a payload belongs to: digest of run, round, device and plan; checksum of the shapes."""

    digest: bytes
    shapes: int


def payload_binding(binding: bytes, shapes: Mapping[str, Sequence[int]]) -> PayloadBinding:
    """Digest what both sides know. It detects mix-ups; it does not authenticate."""
    text = "\n".join(f"{name}:{[int(n) for n in shapes[name]]}" for name in sorted(shapes))
    digest = blake2s(binding, digest_size=8, person=b"anycost1").digest()
    return PayloadBinding(digest, zlib.crc32(text.encode()))


def seal(magic: bytes, body: bytes, binding: PayloadBinding) -> bytes:
    """Wrap a body into a payload."""
    length = OVERHEAD + len(body)
    if length > MAX_LENGTH:
        raise PayloadError(f"the payload has {length} bytes; the format allows {MAX_LENGTH}")
    head = _HEADER.pack(magic, MAJOR, MINOR, length, binding.digest, binding.shapes)
    return b"".join((head, body, _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(head)))))


def unseal(payload: bytes, magic: bytes, binding: PayloadBinding) -> tuple[int, bytes]:
    """Return minor version and body of an intact payload that is bound to `binding`."""
    minor, found, body = open_any(payload, magic)
    if found.digest != binding.digest:
        raise ForeignPayloadError("the payload is bound to another run, round, device or plan")
    if found.shapes != binding.shapes:
        raise ForeignPayloadError("the payload was made for other parameter names or shapes")
    return minor, body


def open_any(payload: bytes, magic: bytes) -> tuple[int, PayloadBinding, bytes]:
    """Return minor version, binding and body of an intact payload, whatever it is bound to."""
    if len(payload) < OVERHEAD:
        raise PayloadError(f"the payload has {len(payload)} bytes; at least {OVERHEAD} are needed")
    found, major, minor, length, digest, shapes = _HEADER.unpack_from(payload)
    if found != magic:
        raise PayloadError(f"not a payload: it starts with {found!r}, expected {magic!r}")
    if major != MAJOR:
        raise PayloadError(f"the payload has format {major}.{minor}, expected {MAJOR}.x")
    if length != len(payload):
        raise DamagedPayloadError(f"the payload declares {length} bytes but has {len(payload)}")
    (checksum,) = _CHECKSUM.unpack_from(payload, length - _CHECKSUM.size)
    if zlib.crc32(memoryview(payload)[: -_CHECKSUM.size]) != checksum:
        raise DamagedPayloadError("checksum mismatch: the payload was damaged in transit")
    return minor, PayloadBinding(digest, shapes), payload[BODY]


def unseal_exact(payload: bytes, magic: bytes, binding: PayloadBinding) -> bytes:
    """Return the body of a format without sections, which has no forward compatibility."""
    minor, body = unseal(payload, magic, binding)
    if minor > MINOR:
        raise PayloadError(f"the payload has format {MAJOR}.{minor}, expected {MAJOR}.{MINOR}")
    return body


def varint(number: int) -> bytes:
    """Encode with seven bits per byte, lowest first; the high bit marks that more follow."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


class Reader:
    """Consume bytes from the front; anything missing or malformed is a `PayloadError`."""

    __slots__ = ("_at", "_data", "_what")

    def __init__(self, data: bytes, what: str) -> None:
        self._data = data
        self._what = what
        self._at = 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        end = self._at + count
        if end > len(self._data):
            left = len(self._data) - self._at
            raise PayloadError(
                f"{self._what} ends early: expected {count} bytes at offset {self._at}, got {left}"
            )
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def byte(self) -> int:
        """Return the next byte."""
        return self.take(1)[0]

    def varint(self, least: int, most: int) -> int:
        """Return the next integer, which must be in its shortest form and in [least, most]."""
        number = 0
        for place in range(MAX_VARINT_BYTES):
            byte = self.byte()
            number |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                if place and byte == 0:
                    raise PayloadError(f"{self._what}: an integer is not in its shortest form")
                break
        else:
            raise PayloadError(f"{self._what}: an integer has more than {MAX_VARINT_BYTES} bytes")
        if not least <= number <= most:
            raise PayloadError(f"{self._what}: {number} is outside {least} to {most}")
        return number

    def rest(self) -> bytes:
        """Return everything that is left."""
        return self.take(len(self._data) - self._at)

    @property
    def empty(self) -> bool:
        """Whether everything has been read."""
        return self._at == len(self._data)

    def finish(self) -> None:
        """Check that nothing is left."""
        if not self.empty:
            left = len(self._data) - self._at
            raise PayloadError(f"{self._what} has {left} unexpected bytes at its end")


# --- the fullest payload of a budget --------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class Goal:
    """At most `budget` bytes; stop at the share `filled` of them, or after `tries` payloads."""

    budget: int
    filled: float
    tries: int


@dataclass(frozen=True, slots=True)
class Trial:
    """The latest number tried, its payload's size, and the open bracket all trials leave."""

    attempt: int
    number: int
    size: int
    fits: int  # the largest number known to fit, or one below the range
    fails: int  # the smallest number known not to fit, or one above the range


@dataclass(frozen=True, slots=True)
class Candidate:
    """A payload within the budget, and the number it was made from."""

    number: int
    payload: bytes


def search(
    encode: Callable[[int], bytes],
    propose: Callable[[Trial], int | None],
    numbers: range,
    start: int,
    goal: Goal,
) -> Iterator[Candidate]:
    """Yield payloads that fit, each made from a larger number than the one before.

    A proposal outside the bracket is clamped into it; None ends the search.
    """
    fits, fails = numbers.start - 1, numbers.stop
    number: int | None = start
    for attempt in range(goal.tries if numbers else 0):
        if number is None:
            return
        number = min(max(number, fits + 1), fails - 1)
        payload = encode(number)
        size = len(payload)
        if size <= goal.budget:
            fits = number
            yield Candidate(number, payload)
        else:
            fails = number
        if fails - fits <= 1 or goal.filled * goal.budget <= size <= goal.budget:
            return
        number = propose(Trial(attempt, number, size, fits, fails))


def fullest(candidates: Iterable[Candidate]) -> bytes | None:
    """The longest payload, the earliest of equals; sizes need not grow steadily."""
    return max((candidate.payload for candidate in candidates), key=len, default=None)
