"""Hostile payloads: a small plan, valid payloads for it, ways to corrupt them, what must hold then.

A checksum stops nearly every blind mutation early, so half of the mutations are sealed again:
length and checksum are made to match, and the damage reaches the code behind them.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from anycostfl.codec import compress, decompress, lowrank, sections
from anycostfl.codec.frame import BODY, varint
from anycostfl.codec.sections import Section
from anycostfl.errors import PayloadError

PLAN: dict[str, tuple[int, ...]] = {
    "conv.weight": (4, 2, 3, 3),
    "fc.weight": (6, 20),
    "fc.bias": (6,),
    "norm.weight": (40,),
    "scale": (),
    "nothing": (0, 3),
}
BINDING = b"run 1, round 2, device 3"
HEADER, TAIL = 22, 4
ACCEPTED = "accepted"
Mutation = Callable[[bytes, random.Random], bytes]


def valid_payloads(codec: str = "kernel") -> list[bytes]:
    """Payloads of every kind the encoder can produce for the plan."""
    draw = torch.Generator().manual_seed(0)
    normal = {n: torch.randn(s, generator=draw) for n, s in PLAN.items()}
    kinds: list[dict[str, Tensor]] = [
        normal,
        {n: torch.full_like(x, 0.5) for n, x in normal.items()},  # one distinct value: u_min > 0
        {n: x.sign() * (1 + x.abs()) * 1e-3 for n, x in normal.items()},  # a gap around zero
        {n: x.pow(7) for n, x in normal.items()},  # heavy tails: spare bits
        {n: torch.zeros_like(x) for n, x in normal.items()},
        {n: _smooth(x) for n, x in normal.items()},  # low rank
    ]
    blocks = {"fc.weight": 5}
    return [
        compress(update, beta, seed=seed, codec=codec, blocks=blocks, binding=BINDING)
        for seed, update in enumerate(kinds)
        for beta in (0.1, 0.15, 0.25, 0.4, 1.0)
    ]


def _smooth(values: Tensor) -> Tensor:
    if values.dim() < 2 or not values.numel():
        return values
    matrix = values.flatten(1)
    return (matrix[:, :1] * matrix[:1]).reshape(values.shape)


def seal(payload: bytes) -> bytes:
    """Make length and checksum match, so that the damage gets past them."""
    if len(payload) < HEADER + TAIL:
        return payload
    body = payload[:6] + len(payload).to_bytes(4, "little") + payload[10:-TAIL]
    return body + zlib.crc32(body).to_bytes(4, "little")


def flip(payload: bytes, draw: random.Random) -> bytes:
    """Turn over one to eight bits."""
    data = bytearray(payload)
    for _ in range(draw.randint(1, 8)):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def overwrite(payload: bytes, draw: random.Random) -> bytes:
    """Replace a byte by one that parsers trip over."""
    data = bytearray(payload)
    for _ in range(draw.randint(1, 3)):
        data[draw.randrange(len(data))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
    return bytes(data)


def truncate(payload: bytes, draw: random.Random) -> bytes:
    """Cut the end off."""
    return payload[: draw.randrange(len(payload))]


def extend(payload: bytes, draw: random.Random) -> bytes:
    """Insert bytes somewhere, mostly at the end."""
    at = draw.choice((len(payload), len(payload) - TAIL, draw.randrange(len(payload))))
    return payload[:at] + draw.randbytes(draw.randint(1, 40)) + payload[at:]


def forge_header(payload: bytes, draw: random.Random) -> bytes:
    """Change magic, version, length, binding or shapes."""
    at = draw.randrange(HEADER)
    return payload[:at] + draw.randbytes(draw.randint(1, HEADER - at)) + payload[HEADER:]


def noise(payload: bytes, draw: random.Random) -> bytes:
    """Random bytes, sometimes behind a genuine header."""
    head = payload[: draw.choice((0, 4, 6, HEADER))]
    return head + draw.randbytes(draw.randrange(200))


def forge_section(payload: bytes, draw: random.Random) -> bytes:
    """Drop, repeat, swap, retype or rewrite whole sections; lengths stay consistent."""
    try:
        sections = split(payload)
    except PayloadError:  # corrupted already
        return noise(payload, draw)
    if not sections:
        return noise(payload, draw)
    at = draw.randrange(len(sections))
    kind, data = sections[at]
    what = draw.randrange(6)
    if what == 0:
        del sections[at]
    elif what == 1:
        sections.insert(at, sections[draw.randrange(len(sections))])
    elif what == 2:
        other = draw.randrange(len(sections))
        sections[at], sections[other] = sections[other], sections[at]
    elif what == 3:
        sections[at] = (draw.choice((0x01, 0x7F, *range(0x80, 0x88))), data)
    elif what == 4:
        sections[at] = (kind, draw.randbytes(draw.randrange(30)))
    else:
        sections[at] = (kind, (flip if draw.random() < 0.5 else overwrite)(data or b"\0", draw))
    return join(payload, sections)


def split(payload: bytes) -> list[tuple[int, bytes]]:
    """The sections of a valid payload."""
    return sections.split(payload[BODY], len(payload))


def join(payload: bytes, sections: list[tuple[int, bytes]]) -> bytes:
    """The payload with other sections, sealed."""
    body = b"".join(bytes([kind]) + varint(len(data)) + data for kind, data in sections)
    return seal(payload[:HEADER] + body + bytes(TAIL))


MUTATIONS: tuple[Mutation, ...] = (
    flip,
    overwrite,
    truncate,
    extend,
    forge_header,
    noise,
    forge_section,
)


def corrupt(payload: bytes, draw: random.Random) -> tuple[str, bytes]:
    """One mutation, or two, sealed half of the time; its name and the bytes."""
    mutate = draw.choice(MUTATIONS)
    corrupted = mutate(payload, draw)
    if draw.random() < 0.2:
        corrupted = (
            draw.choice(MUTATIONS)(corrupted, draw) if len(corrupted) > HEADER + TAIL else corrupted
        )
    sealed = mutate is forge_section or draw.random() < 0.6
    return mutate.__name__ + (" sealed" if sealed else ""), seal(corrupted) if sealed else corrupted


def range_of(payload: bytes) -> tuple[float, float]:
    """What a payload that decodes says about the magnitude of values that are not zero."""
    if payload.startswith(lowrank.MAGIC):
        return 0.0, torch.finfo(torch.float32).max
    sections = dict(split(payload))
    u_min, u_max = struct.unpack("<ff", sections.get(Section.RANGE, bytes(8))[:8])
    return u_min, u_max


def outcome(payload: bytes) -> str:
    """What the decoder says; `ACCEPTED` if it decodes, and then everything about it must hold.

    Raises:
        AssertionError: If it decodes to something out of shape, range or mask.
    """
    try:
        update = decompress(payload, PLAN, binding=BINDING)
    except PayloadError as error:
        return str(error)
    low, high = range_of(payload)
    for name, shape in PLAN.items():
        value, mask = update.values[name], update.masks[name]
        size = value[value != 0].abs()
        good = value.shape == mask.shape == shape and not bool(value[~mask].any())
        if not good or not bool(((size >= low) & (size <= high)).all()):
            raise AssertionError(f"{name} of {payload.hex()}")
    return ACCEPTED


def survives(payload: bytes) -> bool:
    """Whether it decodes."""
    return outcome(payload) == ACCEPTED
