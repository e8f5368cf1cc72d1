"""A simulated fleet: every device of the experiment on this machine, each with its own samples.

Devices, their positions and budgets are drawn (`planning.draw`); what they compute and send is
real. They run one after the other in this process, or on several at once (`fleets.pool`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from anycostfl.config import profiles_of
from anycostfl.data.samples import Dataset, Samples
from anycostfl.data.split import Partition
from anycostfl.device import (
    TEST_CHUNK,
    DeviceRuntime,
    Job,
    Learn,
    Reply,
    learn_honestly,
    learn_privately,
)
from anycostfl.experiment import Experiment
from anycostfl.fleets.attackers import Attackers, choose_attackers
from anycostfl.metrics import Score, score
from anycostfl.planning.draw import choose, draw_cohort, present
from anycostfl.rounds import Offers, RoundPlan
from anycostfl.server.privacy import Privacy
from anycostfl.server.suspensions import Suspensions
from anycostfl.state import State


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """The samples of all devices, and those to test on, of `owners` owners."""

    train: Samples
    test: Samples
    index: Tensor  # of all devices' training samples, one device after the other
    ends: Tensor  # where each device's samples end in the index
    owners: int = 1

    @classmethod
    def of(cls, dataset: Dataset, parts: Partition) -> Self:
        """A dataset split over a fleet."""
        return cls(
            train=dataset.train,
            test=dataset.test,
            index=torch.from_numpy(np.concatenate(parts)),
            ends=torch.tensor([len(part) for part in parts]).cumsum(0),
            owners=max(len(dataset.owner_names), 1),
        )

    def samples_of(self, device: int) -> Samples:
        """What a device trains on."""
        start = int(self.ends[device - 1]) if device else 0
        own = Samples(self.train.inputs, self.train.targets)
        return own.take(self.index[start : int(self.ends[device])])

    def counts(self) -> npt.NDArray[np.int64]:
        """How many samples every device holds."""
        return np.diff(self.ends.numpy(), prepend=0)

    def test_chunks(self) -> range:
        """Where each chunk of the test samples starts."""
        return range(0, len(self.test), TEST_CHUNK)


class Executor(Protocol):
    """Runs what simulated devices do."""

    def perform(self, jobs: Sequence[Job]) -> Iterator[Reply]:
        """The replies, in the order of the jobs."""

    def measure(self) -> Iterator[list[Tensor]]:
        """The sums of every metric for the global model, chunk by chunk of the test samples."""


@dataclass(frozen=True, slots=True, eq=False)
class InProcess:
    """One device after the other, on the weights that the traced model holds at that moment."""

    runtime: DeviceRuntime
    holdings: Holdings
    attackers: Attackers | None = None
    privacy: Privacy = field(default_factory=Privacy)

    def perform(self, jobs: Sequence[Job]) -> Iterator[Reply]:
        """The replies, in the order of the jobs."""
        return map(self.perform_one, jobs)

    def measure(self) -> Iterator[list[Tensor]]:
        """The sums of every metric for the global model, chunk by chunk of the test samples."""
        return map(self.measure_chunk, self.holdings.test_chunks())

    def perform_one(self, job: Job) -> Reply:
        """Cut the device's sub-model and let the device train it on its own samples."""
        sub, samples = self.runtime.net.shrink(job.alpha), self.holdings.samples_of(job.device)
        learn: Learn = self.attackers.learn if self.attackers else learn_honestly
        if self.privacy.mode == "local":
            learn = learn_privately(learn, self.privacy)
        return self.runtime.perform(sub, samples, job, learn)

    def measure_chunk(self, start: int) -> list[Tensor]:
        """The sums of every metric over one chunk of the test samples."""
        chunk = self.holdings.test.take(slice(start, start + TEST_CHUNK))
        module = self.runtime.net.shrink(1.0).module
        [sums] = self.runtime.measure(module, chunk, self.holdings.owners)
        return sums


class SimulatedFleet:
    """All devices of an experiment; what they remember lives here."""

    def __init__(
        self,
        experiment: Experiment,
        holdings: Holdings,
        *,
        memories: Mapping[int, State] | None = None,
        executor: Callable[[InProcess], AbstractContextManager[Executor]] = nullcontext,
    ) -> None:
        self._experiment, self._config = experiment, experiment.config
        self._holdings, self._counts = holdings, holdings.counts()
        self._profiles = profiles_of(self._config.fleet)
        self._memories = dict(memories or {})
        fleet, seed = self._config.fleet, self._config.run.seed
        attackers = choose_attackers(self._config.attack, fleet.devices, seed)
        self._local = InProcess(experiment.runtime, holdings, attackers, self._config.privacy)
        self._executor: Executor = self._local
        # Now, not in __enter__: if data cannot be shared, no run directory is begun.
        self._context, self._stack = executor(self._local), ExitStack()

    def __enter__(self) -> Self:
        self._executor = self._stack.enter_context(self._context)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def offers(self, number: int, suspensions: Suspensions) -> Offers:
        """Draw the cohort of a round with its budgets."""
        fleet, seed = self._config.fleet, self._config.run.seed
        there = present(fleet, seed=seed, round_index=number)
        allowed = suspensions.available(range(fleet.devices), number)
        cohort = draw_cohort(
            fleet,
            seed=seed,
            round_index=number,
            samples=self._counts,
            profiles=self._profiles,
            ready={device for device in there if device in allowed},
        )
        drawn = choose(fleet, there, seed=seed, round_index=number)
        return Offers(cohort, drawn.tolist())

    def perform(self, plan: RoundPlan) -> Iterator[Reply]:
        """Let every device do its job; its memory is kept for its next one."""
        self._experiment.net.load(plan.model)
        memories = self._memories
        jobs = [a.job(memories.get(a.device), plan.moved) for a in plan.assignments]
        for reply in self._executor.perform(jobs):
            if reply.memory:
                memories[reply.device] = reply.memory
            yield reply

    def evaluate(self, weights: State) -> Score | None:
        """How good the model is on all test samples."""
        self._experiment.net.load(weights)
        metrics, held = self._experiment.runtime.task.metrics, self._holdings
        known = held.train.owners if held.owners > 1 else None
        worst = self._config.run.budgets == "strict" and held.owners > 1
        return score(metrics, list(self._executor.measure()), known, worst=worst)

    def memory(self) -> Mapping[int, State]:
        """What devices have left over."""
        return dict(self._memories)
