"""The command line for tests: as a program of its own, or in this process, which is much faster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from small_runs import small_overrides

PROGRAM = str(Path(sys.executable).with_name("anycostfl"))

Call = Callable[..., tuple[int, str, str]]
"""Calls it in this process, in the test's folder: exit code, output, complaints as one line."""


def sets(folder: Path, *more: str) -> list[str]:
    return [part for item in small_overrides(folder, *more) for part in ("--set", item)]


def program(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *words], capture_output=True, text=True, cwd=cwd, check=False, timeout=300
    )
