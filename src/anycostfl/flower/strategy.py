"""AnycostFL as a `Strategy` of Flower, for a custom ServerApp (an example is in docs/deploy.md).

Flower's loop asks it for messages and hands it the replies; both halves of a round are those of
`rounds`, to the bit. What Flower's loop cannot do is missing: it keeps no run directory, cannot be
resumed, and looks for replies every three seconds. `anycostfl serve` uses the round loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from anycostfl import rounds
from anycostfl.config import Config
from anycostfl.device import Reply
from anycostfl.fleets.attackers import reject_attacks
from anycostfl.flower._internal import log
from anycostfl.flower.fleet import FlowerFleet, RoundPolicy, reply_to
from anycostfl.flower.server import server_experiment
from anycostfl.records.round import RoundRecord, Status


class AnycostStrategy(Strategy):
    """Every device gets the sub-model it can afford; `records` says what each round cost."""

    def __init__(self, config: Config) -> None:
        reject_attacks(config.attack)
        self.config = config
        self.records: list[RoundRecord] = []
        self._experiment = server_experiment(config)
        self._state = rounds.first_state(self._experiment)
        self._fleet: FlowerFleet | None = None
        self._plan: rounds.RoundPlan | None = None  # of the round that runs
        self._sent: dict[int, Reply] = {}  # by node, what is known of its reply beforehand

    def initial_arrays(self) -> ArrayRecord:
        """The global model to start from."""
        return ArrayRecord(dict(self._state.weights))

    def summary(self) -> None:
        """Log what is about to be trained."""
        fleet, run = self.config.fleet, self.config.run
        log(INFO, "\t├──> %s on %s", run.method, self.config.model.name)
        log(INFO, "\t└──> %d of %d devices a round", fleet.cohort, fleet.devices)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask who can spend what, open the round, and make a task for every chosen device."""
        del config  # what devices need to know is in their tasks
        number, self._plan, self._sent = server_round - 1, None, {}
        if self._fleet is None:
            self._fleet = FlowerFleet(grid, self._experiment, RoundPolicy(), start=self._state)
        offers = self._fleet.offers_at_once(number, self._state.suspensions)
        if offers is None:
            log(WARNING, "no device is there; the round changes nothing")
            return []
        weights = arrays.to_torch_state_dict()
        self._state = replace(self._state, rounds=number, weights=weights)
        self._state, self._plan = rounds.open_round(self._experiment, self._state, offers)
        messages = []
        for message, known in self._fleet.messages(self._plan, None):
            self._sent[message.metadata.dst_node_id] = known
            messages.append(message)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Close the round with the replies that came."""
        number, experiment = server_round - 1, self._experiment
        if self._plan is None:
            self.records.append(RoundRecord(number, None, ()))
            return None, None
        found = {message.metadata.src_node_id: message for message in replies}
        replied = (
            reply_to(known, found[node])
            if node in found
            else replace(known, missing="no reply in time")
            for node, known in self._sent.items()
        )
        self._state, record = rounds.close_round(experiment, self._state, self._plan, replied)
        if rounds.is_evaluated(self.config.run, number):
            self._state = rounds.calibrate(experiment, self._state)
            record = rounds.with_score(record, experiment.evaluate(rounds.deployed(self._state)))
        self.records.append(record)
        return self.initial_arrays(), _metrics(record, self.config.metric.name)

    def configure_evaluate(self, *_: Any, **__: Any) -> Iterable[Message]:
        """No device is asked: the server evaluates."""
        return []

    def aggregate_evaluate(self, *_: Any, **__: Any) -> MetricRecord | None:
        """Nothing was asked, so nothing comes back."""
        return None


def _metrics(record: RoundRecord, name: str) -> MetricRecord:
    """What a round cost, as Flower shows it."""
    values = {
        "devices": sum(device.status is Status.OK for device in record.devices),
        "latency_s": record.latency_s,
        "energy_j": record.energy_j,
        "bytes_up": record.bytes_up,
        name: record.metric,
    }
    return MetricRecord({name: value for name, value in values.items() if value is not None})
