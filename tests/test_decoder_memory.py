"""Decoding hostile payloads takes no more than four times the plan's size and 4 MiB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from anycostfl import methods
from anycostfl.codec import CODECS
from decoder_memory import MIB, size_bytes

LIMIT = 4 * size_bytes() + 4 * MIB


CASES = [("anycostfl", codec) for codec in CODECS if codec != "kernel"]
CASES += [(name, "kernel") for name in methods.names() if name != "anycostfl"]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(("method", "codec"), [("anycostfl", "kernel"), *SLOW])
def test_no_payload_makes_a_decoder_take_more(method: str, codec: str) -> None:
    program = [sys.executable, str(Path(__file__).with_name("decoder_memory.py")), method, codec]
    told = subprocess.run(program, capture_output=True, check=True, text=True, timeout=300).stdout
    found = [json.loads(line) for line in told.splitlines()]
    assert len(found) > 40
    assert any(case["taken"] for case in found)
    worst = max(found, key=lambda case: case["bytes"])
    assert 0.5 * size_bytes() < worst["bytes"] <= LIMIT, worst
