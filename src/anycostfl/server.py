"""The server from round to round: the global model, and everything that moves with it.

The simulator, the server over Flower and the Strategy for Flower play their rounds with it; they
differ in who the devices are and how a job reaches them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from anycostfl.aggregate import advance
from anycostfl.bench import benched
from anycostfl.config import Config, essence
from anycostfl.downlink import Step, charge_downloads, check_share, first_public, make_step, showing
from anycostfl.experiment import prepare
from anycostfl.fleet import Cohort
from anycostfl.rounds import Assignment, Outcome, accepted, assign, describe, screen
from anycostfl.runs import Snapshot
from anycostfl.shrink import Order, calibration_batches, recalibrate
from anycostfl.state import State, clone_state, tensors_of
from anycostfl.types import DeviceRecord, RoundRecord, Strategies
from anycostfl.workers import Executor


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """A round as planned: who takes part, with which strategy, and what each is told.

    `drawn` is whom the draw would have chosen if nobody were benched.
    """

    number: int
    cohort: Cohort
    strategies: Strategies
    assignments: Sequence[Assignment]
    drawn: Sequence[int]


class Server:
    """What the server keeps: weights, momentum, the public model, who is benched."""

    def __init__(self, config: Config, start: Snapshot | None = None) -> None:
        self.config, self.method = config, config.method_of(config.run.method)
        self.side = prepare(config)
        self.net = self.side.net
        self.rules = replace(config.aggregation, momentum=self.method.momentum)
        at = start or Snapshot(0, {})
        self.first = at.rounds  # the round to go on with
        self.velocity, self.public = at.velocity, at.public
        self.moved: Order = at.moved  # where each channel was at first
        self.bench, self.ledger = at.bench, at.ledger
        self.step: Step | None = None
        if start is not None:
            self.net.load(start.state)
        elif share := config.compression.downlink:
            self.public = first_public(self.net.module)
            check_share(share, self.public)

    def begin(self, number: int) -> None:
        """Sort the channels (Sec. III-B.1) and all that lives in their coordinates.

        Then bring the public model up to date, if there is one.
        """
        order = self.net.sort_channels() if self.method.sorts_channels else {}
        self.moved = {n: self.moved[n][new] if self.moved else new for n, new in order.items()}
        if order and self.velocity:
            self.velocity = self.net.permute(self.velocity, order)
        if share := self.config.compression.downlink:
            belongs = essence(self.config), number
            self.step, self.public = make_step(self.net, self.public, order, share, belongs)

    def plan(self, number: int, cohort: Cohort, drawn: Sequence[int]) -> Round:
        """The strategy of every device (Sec. IV), and what those who can afford one are told."""
        strategies = self.config.plan(cohort.devices)
        assignments = assign(self.config, self.side, cohort, strategies, number)
        return Round(number, cohort, strategies, assignments, drawn)

    def showing(self) -> AbstractContextManager[None]:
        """While devices cut their sub-models: the model as they know it."""
        return showing(self.net, self.public)

    def absorb(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Move the global model by the updates that count (Sec. III-D); outcomes say which do."""
        net, rules = self.net, self.rules
        outcomes = screen(self.method, outcomes, rules, tensors_of(net.module), self.bench)
        updates = accepted(self.method, outcomes, rules)
        state, self.velocity = advance(tensors_of(net.module), updates, rules, self.velocity)
        net.load(state)
        return outcomes

    def accuracy(self, number: int, executor: Executor) -> float | None:
        """Of the global model on all test images, after rounds that end with an evaluation."""
        if not self.config.run.evaluates(number):
            return None
        shared = self.side.shared
        recalibrate(self.net.module, calibration_batches(shared.train_images))
        return executor.correct() / len(shared.test_labels)

    def downloads(self, cohort: Cohort) -> dict[int, int]:
        """What every device of a cohort is sent, if there is a public model."""
        if self.step is None:
            return {}
        step, whole = self.step.size, 4 * sum(p.numel() for p in self.public.values())
        return {i: self.ledger.download(i, step, whole) for i in cohort.index.tolist()}

    def close(
        self,
        played: Round,
        outcomes: Sequence[Outcome],
        accuracy: float | None,
        *,
        downloads: Mapping[int, int],
        absent: tuple[DeviceRecord, ...] = (),
    ) -> RoundRecord:
        """The record of a round, counted for those after it; `absent` are devices never told."""
        number = played.number
        devices = describe(self.config, played.cohort, played.strategies, outcomes)
        devices = charge_downloads(devices, downloads)
        devices += absent + benched(self.bench, played.drawn, number)
        record = RoundRecord(number, accuracy, devices, self.step.size if self.step else 0)
        self.bench = self.bench.after(record, self.config.gate)
        self.ledger = self.ledger.after(record)
        return record

    def snapshot(self, number: int, memories: Mapping[int, State]) -> Snapshot:
        """Where to go on after a round."""
        state, kept = clone_state(self.net.module), (self.velocity, self.public, self.moved)
        return Snapshot(number + 1, state, dict(memories), *kept, self.bench, self.ledger)
