"""The round loop, the paper's Sec. III-A top to bottom: the only place where rounds follow rounds.

A fleet decides where devices run (`fleets`), `rounds` what a round does, the caller what happens to
its record.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from anycostfl.device import threads
from anycostfl.experiment import Experiment
from anycostfl.fleets import Fleet
from anycostfl.records.round import RoundRecord
from anycostfl.rounds import (
    ServerState,
    calibrate,
    close_round,
    deployed,
    first_state,
    is_evaluated,
    keep_best,
    open_round,
    with_score,
)


@dataclass(frozen=True, slots=True, eq=False)
class RoundResult:
    """A finished round, the state after it, and the wall seconds of its phases."""

    record: RoundRecord
    state: ServerState
    seconds: Mapping[str, float] = field(default_factory=dict)


Rounds = Generator[RoundResult, None, None]


def run_rounds(
    experiment: Experiment,
    fleet: AbstractContextManager[Fleet],
    start: ServerState | None = None,
    *,
    min_replies: int = 1,
) -> Rounds:
    """Train: round after round, from the beginning or from where a run stopped."""
    run = experiment.config.run
    state = start or first_state(experiment)
    with fleet as devices:
        for number in range(state.rounds, run.rounds):
            with threads(1):  # every process computes alike, so results are the same everywhere
                clock = Stopwatch()
                # Who is there, and what can each device spend in this round?
                offers = devices.offers(number, state.suspensions)
                clock.lap("offers_s")
                # The server sorts its channels and plans a width, a rate and a clock for each.
                state, plan = open_round(experiment, state, offers)
                clock.lap("plan_s")
                # Devices shrink, train and compress; replies are checked as they arrive, and
                # what counts moves the global model.
                replies = devices.perform(plan)
                state, record = close_round(
                    experiment, state, plan, replies, min_replies=min_replies
                )
                clock.lap("devices_s")
                # Now and then: how good is the model?
                if is_evaluated(run, number):
                    state = calibrate(experiment, state)
                    record = with_score(record, devices.evaluate(deployed(state)))
                    state, record = keep_best(experiment, state, record)
                clock.lap("evaluate_s")
                state = replace(state, memories=devices.memory())
            yield RoundResult(record, state, clock.laps)


class Stopwatch:
    """Where the wall seconds of a round go."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """What was done since the last lap has this name."""
        now = time.perf_counter()
        self.laps[name] = round(now - self._last, 4)
        self._last = now
