"""Fleets: where devices run. The round loop knows them only by this protocol.

    simulated   every device of the experiment, in this process
    pool        the same on several processes
    attackers   simulated devices that attack, for experiments

Real devices are `anycostfl.flower.fleet`; Flower's simulation engine is `anycostfl.contrib.ray`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from anycostfl.device import Reply
from anycostfl.metrics import Score
from anycostfl.rounds import Offers, RoundPlan
from anycostfl.server.suspensions import Suspensions
from anycostfl.state import State


class Fleet(Protocol):
    """Devices, wherever they run; opened by a context manager for as long as rounds are run."""

    def offers(self, number: int, suspensions: Suspensions) -> Offers:
        """The cohort of a round, and what each device can spend."""

    def perform(self, plan: RoundPlan) -> Iterable[Reply]:
        """What devices make of their assignments, as replies arrive."""

    def evaluate(self, weights: State) -> Score | None:
        """How good a model is where the test data is; None where there is none."""

    def memory(self) -> Mapping[int, State]:
        """What devices remember, for checkpoints; empty where devices keep it themselves."""
