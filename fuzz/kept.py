"""Inputs worth keeping: one for every answer of a parser, replayed by the tests."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mutations import ACCEPTED
from targets import Target

FOLDER = Path(__file__).with_name("corpus")
MOST = 30  # inputs of a parser
VARIABLE = re.compile(r"b?'[^']*'|b?\"[^\"]*\"|[-+]?\d[\d.,eE+-]*|\b(nan|inf)\b")


def kind_of(said: str) -> str:
    """What a parser said, without the numbers and words of the input."""
    return VARIABLE.sub("#", said[:200])[:60]


def write(folder: Path, name: str, target: Target, kept: Mapping[str, Any]) -> None:
    """Keep the shortest of these inputs as bytes; those that cannot be written are dropped."""
    found = {}
    for kind, corrupted in kept.items():
        try:
            found[kind] = target.dump(corrupted)
        except (TypeError, ValueError):  # no file can hold it
            continue
    shortest = sorted(found, key=lambda kind: (kind != ACCEPTED, len(found[kind])))[:MOST]
    lines = {
        kind: base64.b64encode(zlib.compress(found[kind], 9)).decode() for kind in sorted(shortest)
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(lines, indent=0, ensure_ascii=False) + "\n")


def read(folder: Path, name: str, target: Target) -> Iterator[tuple[str, Any]]:
    """What a parser said to each input that was kept, and the input."""
    for kind, text in json.loads((folder / f"{name}.json").read_text()).items():
        yield kind, target.load(zlib.decompress(base64.b64decode(text)))
