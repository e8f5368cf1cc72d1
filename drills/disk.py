"""A full disk: the run says so, what was saved is intact, and it can be resumed later.

No disk is filled: no file of the process may grow beyond a random size (RLIMIT_FSIZE), so that the
write that crosses it fails half way, in the journal, a checkpoint or the page.
"""

from __future__ import annotations

import os
import resource
import shutil
from functools import partial

from anycostfl.records.run import CONFIG, read_run
from drills.common import FAILED, Order, Report, Trial, undisturbed
from small_runs import small_dataset


def drill(order: Order) -> Report:
    """Let writes fail beyond random sizes, then lift the limit and resume."""
    report, dice = Report("disk full"), order.dice()
    expected, _ = undisturbed(order.folder / "undisturbed")
    small_dataset(order.folder)
    largest = max(map(len, expected))
    trial = Trial(order.folder)
    while report.injected < order.times:
        # Small files fail at few bytes, checkpoints only near their size: try all magnitudes.
        limit = int(largest ** dice.uniform(0.0, 1.0))
        child = trial.start(partial(limit_files, limit))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        report.injected += 1
        report.expect(code in (0, FAILED), f"a run that ended with code {code} and no message")
        if (trial.home / CONFIG).exists():
            saved = read_run(trial.home)
            damaged = [text for text in saved.remarks if "checkpoint" in text]
            report.expect(not damaged, f"a checkpoint: {damaged}")
        if dice.random() < 0.3 or code == 0:
            report.expect(trial.finish() == 0, "a run that could not be resumed")
            report.expect(trial.outcome() == expected, "a run that ended otherwise")
            shutil.rmtree(trial.home)
    report.expect(trial.finish() == 0, "a run that could not be resumed")
    report.expect(trial.outcome() == expected, "a run that ended otherwise")
    return report


def limit_files(size: int) -> None:
    """Let no file of this process grow beyond a size, its log excepted.

    Python ignores the signal that comes with it, so that writes fail as on a full disk.
    """
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
