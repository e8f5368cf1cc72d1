"""Real processes on loopback; all of them are gone at the end, whatever happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAM = [sys.executable, "-P", "-c", "from anycostfl.cli import main; main()"]
MARK = "ANYCOSTFL_TEST"


class Loopback:
    """Starts commands of this program and finds all they started by a mark in the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []
        self._mark = f"{MARK}={uuid.uuid4().hex}"

    def start(
        self, name: str, *arguments: str, program: Sequence[str] = PROGRAM
    ) -> subprocess.Popen[bytes]:
        key, _, value = self._mark.partition("=")
        with (self.folder / f"{name}.log").open("ab") as file:
            process = subprocess.Popen(
                [*program, *arguments],
                cwd=self.folder,
                env={**os.environ, key: value, "OMP_NUM_THREADS": "1", "TERM": "dumb"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def pids(self, word: str = "") -> list[int]:
        """Processes of this test that live, with a word in their command line."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if not entry.name.isdigit() or "Z" in _state(entry):
                    continue
                mine = self._mark.encode() in (entry / "environ").read_bytes()
                if mine and word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return found


def _state(entry: Path) -> str:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def loopback(folder: Path) -> Iterator[Loopback]:
    processes = Loopback(folder)
    try:
        yield processes
    finally:
        while left := processes.pids():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        for process in processes.started:
            process.wait()


def wait_until(done: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)
