"""Coverage-guided fuzzing of `decompress` with atheris (pip install 'anycostfl[fuzz]').

python fuzz/guided.py -runs=200000 -seed=1
NUMBA_DISABLE_JIT=1 python -W ignore fuzz/guided.py -runs=20000  # sees the loops too

Coverage is that of the Python code: compiled loops are opaque to it, so run both ways. The mutator
seals most inputs again (length and checksum), else nothing would get past the checksum.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

import atheris

COMPILED = (
    "compiled",
    "kernel",
    "sections",
    "entropy",
    "context",
    "laplace",
    "lowrank",
    "matricization",
    "spectrum",
)  # instrumented loops do not compile
HIDDEN = (
    []
    if os.environ.get("NUMBA_DISABLE_JIT") == "1"
    else [f"anycostfl.codec.{name}" for name in COMPILED]
)

with atheris.instrument_imports(include=["anycostfl.codec"], exclude=HIDDEN):
    from anycostfl.codec import CODECS
    from mutations import corrupt, seal, survives, valid_payloads


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """A structured mutation or one of libFuzzer's, sealed two times out of three."""
    draw = random.Random(seed)
    if draw.random() < 0.5 and len(data) > 30:
        try:
            return corrupt(bytes(data), draw)[1][:most]
        except Exception:  # noqa: S110 - what is corrupted already may not have sections
            pass
    data = atheris.Mutate(data, most)
    return seal(data) if draw.random() < 2 / 3 else data


def main() -> None:
    """Start from valid payloads, then hand over to the fuzzer."""
    with tempfile.TemporaryDirectory() as folder:
        payloads = [payload for codec in CODECS for payload in valid_payloads(codec)]
        for number, payload in enumerate(payloads):
            (Path(folder) / f"{number:03}").write_bytes(payload)
        arguments = [sys.argv[0], "-max_len=2048", "-timeout=5", *sys.argv[1:], folder]
        atheris.Setup(arguments, survives, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
