"""What drills share: a small experiment, a run of it in a separate process, its expected outcome.

A drill is a file here with a function `drill(order) -> Report`. It injects a fault N times and
reports what was lost; the runner finds it by its file's name.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from anycostfl.cli.run import run
from anycostfl.errors import AnycostError
from anycostfl.records.run import CONFIG, JOURNAL
from small_runs import small_overrides

FAILED = 2  # exit code of a run that ends with a message, as on the command line
ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Order:
    """What a drill is asked for: how many faults to inject, where, and the seed of its dice."""

    times: int
    folder: Path
    seed: int

    def dice(self) -> random.Random:
        """The moments and places of faults."""
        return random.Random(self.seed)


@dataclass(slots=True)
class Report:
    """What a drill did: the fault, how often it was injected, what was lost or went wrong."""

    fault: str
    injected: int = 0
    lost: list[str] = field(default_factory=list)
    note: str = ""

    def expect(self, good: bool, otherwise: str) -> None:
        """Record a loss unless a condition holds."""
        if not good:
            self.lost.append(otherwise)


@dataclass(frozen=True, slots=True)
class Trial:
    """A small run in a folder that can be started, resumed and compared with an undisturbed one."""

    folder: Path
    workers: int = 1
    rounds: int = ROUNDS

    @property
    def home(self) -> Path:
        """The run directory."""
        return self.folder / "run"

    def start(self, before: Callable[[], None] = lambda: None) -> int:
        """Start or resume in a forked process, after calling `before` there; returns its id."""
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            self._redirect()
            # A fork server of the parent is no child of this process, which needs its own.
            forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]
            before()
            code = self._run()
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)

    def finish(self) -> int:
        """Start or resume, and run to the end undisturbed; returns the exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.start(), 0)[1])

    def outcome(self) -> tuple[bytes, bytes]:
        """The bytes of the journal and the last checkpoint; empty where there is none."""
        last = self.home / f"checkpoint-{self.rounds}.safetensors"
        files = (self.home / JOURNAL, last)
        journal, checkpoint = (path.read_bytes() if path.exists() else b"" for path in files)
        return journal, checkpoint

    def _redirect(self) -> None:
        """Send the run's output to a file."""
        log = os.open(self.folder / "run.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")

    def _run(self) -> int:
        try:
            if (self.home / CONFIG).exists():
                run(resume=self.home, workers=self.workers, json=True)
            else:
                every = (f"run.rounds={self.rounds}", "run.checkpoint_every=1")
                overrides = small_overrides(self.folder, *every)
                run("demo", overrides, self.home, None, self.workers, json=True)
        except AnycostError as error:
            print(error)
            return FAILED
        return 0


def undisturbed(folder: Path) -> tuple[tuple[bytes, bytes], float]:
    """The outcome of an undisturbed run, and how many seconds it takes."""
    folder.mkdir(parents=True)
    trial, begun = Trial(folder), time.monotonic()
    if trial.finish():
        raise SystemExit((folder / "run.log").read_text())
    return trial.outcome(), time.monotonic() - begun


def kill_within(child: int, seconds: float) -> bool:
    """Kill a process after a number of seconds; returns whether it was still running."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True
