"""Corrupt files: the newest checkpoint or the journal is damaged between two starts of a run."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from anycostfl.records.checkpoint import checkpoints
from anycostfl.records.run import JOURNAL, read_run
from drills.common import Order, Report, Trial, kill_within, undisturbed


def drill(order: Order) -> Report:
    """Damage one of the two files after a kill; the resumed run must report it and end the same."""
    report, dice = Report("damaged checkpoint or journal"), order.dice()
    expected, longest = undisturbed(order.folder / "undisturbed")
    trial = Trial(order.folder)
    while report.injected < order.times:
        kill_within(trial.start(), dice.uniform(0.3, 1.0) * longest)
        found = checkpoints(trial.home)
        if len(found) < 2:
            continue  # the first round is not over: there is no checkpoint before this one
        victim = dice.choice([found[0], trial.home / JOURNAL])
        corrupt(victim, dice)
        report.injected += 1
        saved = read_run(trial.home)
        report.expect(
            any("damaged" in text for text in saved.remarks), f"no remark on {victim.name}"
        )
        report.expect(saved.checkpoint is not None, f"every checkpoint, with {victim.name}")
        if dice.random() < 0.5:
            report.expect(trial.finish() == 0, "a run that could not be resumed")
            report.expect(trial.outcome() == expected, "a run that ended otherwise")
            shutil.rmtree(trial.home)
    report.expect(trial.finish() == 0, "a run that could not be resumed")
    report.expect(trial.outcome() == expected, "a run that ended otherwise")
    return report


def corrupt(path: Path, dice: random.Random) -> None:
    """Truncate a file, empty it, or flip all bits of eight bytes."""
    content = bytearray(path.read_bytes())
    how = dice.randrange(3)
    if how == 0:
        del content[dice.randrange(len(content) - 1) :]
    elif how == 1:
        content.clear()
    else:
        at = dice.randrange(len(content) - 8)
        content[at : at + 8] = bytes(b ^ 0xFF for b in content[at : at + 8])
    path.write_bytes(content)
