"""kill -9 of worker processes: the run ends with a message, and resuming it loses nothing."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

from drills.common import FAILED, Order, Report, Trial, undisturbed


def drill(order: Order) -> Report:
    """Kill one of two workers at a random moment, N times; resume after each."""
    report, dice = Report("SIGKILL of a worker"), order.dice()
    expected, longest = undisturbed(order.folder / "undisturbed")
    trial = Trial(order.folder, workers=2)
    while report.injected < order.times:
        child = trial.start()
        found = wait_for_workers(child)
        time.sleep(dice.uniform(0.0, longest))
        struck = bool(found) and kill(dice.choice(found))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            report.expect(trial.outcome() == expected, "a run that ended otherwise")
            shutil.rmtree(trial.home)
        else:
            report.injected += struck
            report.expect(code == FAILED, f"a run that ended with code {code} and no message")
    report.expect(trial.finish() == 0, "a run that could not be resumed")
    report.expect(trial.outcome() == expected, "a run that ended otherwise")
    return report


def wait_for_workers(parent: int) -> list[int]:
    """The grandchildren of a process (its fork server's children), once there are two."""
    until = time.monotonic() + 30.0
    while time.monotonic() < until and os.waitid(os.P_PID, parent, PEEK) is None:
        found = [pid for child in children(parent) for pid in children(child)]
        if len(found) > 1:
            return found
        time.sleep(0.02)
    return []


PEEK = os.WEXITED | os.WNOHANG | os.WNOWAIT


def children(parent: int) -> list[int]:
    """The living children of a process."""
    with suppress(OSError):
        text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        return [int(word) for word in text.split()]
    return []


def kill(pid: int) -> bool:
    """Kill a process; returns whether it existed."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False
