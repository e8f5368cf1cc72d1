"""How far memory rises while hostile payloads are decoded; run as a program, one JSON line a case.

python tests/decoder_memory.py METHOD CODEC
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from anycostfl import methods
from anycostfl.codec import Upload, entropy, frame, sections
from anycostfl.codec.frame import payload_binding, varint
from anycostfl.errors import PayloadError

BINDING = b"x"
PLAN = {"conv.weight": (256, 128, 3, 3), "fc.weight": (1024, 1536), "fc.bias": (1024,)}
SMALL = {"conv.weight": (8, 4, 3, 3), "fc.weight": (16, 32), "fc.bias": (16,)}
BETA = 1 / 15  # the largest that is planned by default
HUGE = (2**24 - 1, 2**35 - 1)
MIB = 2**20


def size_bytes() -> int:
    """Of the plan, in float32."""
    return 4 * sum(map(math.prod, PLAN.values()))


def peak_bytes(method: methods.Method, payload: bytes) -> tuple[int, bool]:
    """How far resident memory rose above what it was, and whether the payload was taken."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is needed now
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
    before = _status("VmRSS")
    try:
        update = method.decode(payload, PLAN, Upload(1.0, 0, BINDING))
    except PayloadError:
        return _status("VmHWM") - before, False
    del update
    return _status("VmHWM") - before, True


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(name)) * 1024


def payloads(method: methods.Method, codec: str) -> Iterator[tuple[str, bytes]]:
    """As full as the largest β allows, all zeros, and ones that claim far more than they hold."""
    draw = torch.Generator().manual_seed(0)
    full = {n: torch.randn(s, generator=draw) for n, s in PLAN.items()}
    same = {n: torch.full(s, 0.5) for n, s in PLAN.items()}  # every element in next to no bytes
    for name, update in (("noise", full), ("constant", same)):
        yield name, method.encode(update, Upload(BETA, 0, BINDING, codec=codec))
    if method is methods.load("anycostfl") and codec == "kernel":
        yield "every element a kernel", amplified()
    little = {n: torch.randn(s, generator=draw) for n, s in SMALL.items()}
    valid = method.encode(little, Upload(0.5, 0, BINDING, codec=codec))
    magic, body, binding = valid[:4], valid[frame.BODY], payload_binding(BINDING, PLAN)
    yield "of a small plan", frame.seal(magic, body, binding)
    for claim in HUGE:
        for at in range(min(len(body), 24)):
            bold = body[:at] + varint(claim) + body[at + 1 :]
            yield f"claims {claim} at {at}", frame.seal(magic, bold, binding)
    yield "zeros", frame.seal(magic, bytes(int(BETA * size_bytes())), binding)
    yield "ones", frame.seal(magic, b"\xff" * int(BETA * size_bytes()), binding)


def amplified() -> bytes:
    """A few bytes that make every element a kernel of its own and keep them all."""
    count = sum(map(math.prod, PLAN.values()))
    tensors = tuple(
        varint(i) + varint(1) + varint(math.prod(PLAN[name])) + bytes([entropy.MaskCoding.ALL])
        for i, name in enumerate(sorted(PLAN))
    )
    freq = np.zeros(entropy.token_count(2), np.int64)
    freq[0] = 1 << 6
    levels = entropy.encode_levels(np.zeros(count, np.uint16), 6, freq)
    body = sections.Body(
        tensors, sections.Grid(0.0, 1.0, 1), entropy.encode_table(6, freq), levels, b"", b""
    )
    return sections.write(body, payload_binding(BINDING, PLAN))


def main() -> None:
    """Measure one method with one codec."""
    torch.set_num_threads(1)
    method, codec = methods.load(sys.argv[1]), sys.argv[2]
    warm = {n: torch.ones(s) for n, s in SMALL.items()}
    method.decode(
        method.encode(warm, Upload(0.5, 0, BINDING, codec=codec)), SMALL, Upload(0.5, 0, BINDING)
    )
    for name, payload in payloads(method, codec):
        rise, taken = peak_bytes(method, payload)
        sys.stdout.write(json.dumps({"case": name, "bytes": rise, "taken": taken}) + "\n")


if __name__ == "__main__":
    main()
