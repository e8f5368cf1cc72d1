"""How far memory rises while hostile payloads are decoded; run as a program, one JSON line a case.

python tests/decoder_memory.py METHOD CODEC
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from anycostfl import methods
from anycostfl.codec import entropy, frame, kernelplus, kernels, sections
from anycostfl.codec.context import Writer, likelihoods
from anycostfl.codec.varint import varint
from anycostfl.errors import PayloadError
from anycostfl.methods import Upload

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
    if codec == "kernel+":
        yield "every element a kernel", in_context(lambda _: 1)
        yield "kernels one short of a row", in_context(lambda width: width - 1)
    little = {n: torch.randn(s, generator=draw) for n, s in SMALL.items()}
    valid = method.encode(little, Upload(0.5, 0, BINDING, codec=codec))
    magic, tie = valid[:4], frame.bond(BINDING, PLAN)
    body = valid[frame._HEADER.size : -frame._CHECKSUM.size]
    yield "of a small plan", frame.seal(magic, body, tie)
    for claim in HUGE:
        for at in range(min(len(body), 24)):
            bold = body[:at] + varint(claim) + body[at + 1 :]
            yield f"claims {claim} at {at}", frame.seal(magic, bold, tie)
    yield "zeros", frame.seal(magic, bytes(int(BETA * size_bytes())), tie)
    yield "ones", frame.seal(magic, b"\xff" * int(BETA * size_bytes()), tie)


def amplified() -> bytes:
    """A few bytes that make every element a kernel of its own and keep them all."""
    count = sum(map(math.prod, PLAN.values()))
    tensors = tuple(
        sections.TensorSection(i, 1, math.prod(PLAN[name]), bytes([entropy.MaskCoding.ALL]))
        for i, name in enumerate(sorted(PLAN))
    )
    tokens = np.zeros(count, np.uint16)
    freq = np.zeros(entropy.token_count(2), np.int64)
    freq[0] = 1 << 6
    levels = entropy.encode_levels(tokens, 6, freq)
    body = sections.Body(
        tensors, kernels.Grid(0.0, 1.0, 1), entropy.encode_table(6, freq), levels, b"", b""
    )
    return sections.write(body, frame.bond(BINDING, PLAN))


def in_context(block_of: Callable[[int], int]) -> bytes:
    """A few bytes that keep all kernels, of a length that depends on the width of their row."""
    writer, flags, levels = Writer(0), likelihoods(), likelihoods()
    head = struct.pack("<ff", 0.0, 1.0) + varint(1)
    for name in sorted(PLAN):
        part = kernels.Part(name, PLAN[name], 0, block_of(kernels.row_width(PLAN[name])))
        flat = (kernelplus.rows_of(part), part.kernels // kernelplus.rows_of(part))
        writer.integers(np.ones(flat, np.int32), flags, signed=False)
        writer.integers(np.zeros((part.kernels, part.block), np.int32), levels)
        head += varint(part.block)
    return frame.seal(kernelplus.MAGIC, head + writer.finish(), frame.bond(BINDING, PLAN))


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
