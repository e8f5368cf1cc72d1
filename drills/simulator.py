"""kill -9 of the simulator at random moments: journal and model end as if nothing had happened."""

from __future__ import annotations

import shutil

from drills.common import Order, Report, Trial, kill_within, undisturbed


def drill(order: Order, workers: int = 1) -> Report:
    """Kill a run N times and resume it each time; start a new one whenever one ends."""
    report, dice = Report("SIGKILL of the simulator"), order.dice()
    expected, longest = undisturbed(order.folder / "undisturbed")
    trial = Trial(order.folder, workers)
    while report.injected < order.times:
        if kill_within(trial.start(), dice.uniform(0.0, longest)):
            report.injected += 1
        else:
            report.expect(trial.outcome() == expected, "a run that ended otherwise")
            shutil.rmtree(trial.home)
    report.expect(trial.finish() == 0, "a run that could not be resumed")
    report.expect(trial.outcome() == expected, "a run that ended otherwise")
    return report
