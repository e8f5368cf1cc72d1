"""AnycostFL as a `Strategy` of Flower, for a custom ServerApp.

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = AnycostStrategy(load_preset("demo"))
        strategy.start(grid, strategy.initial_arrays(), num_rounds=20, timeout=60.0)

Flower's loop asks it for messages and hands it the replies; both halves of a round are those of
`rounds`, to the bit. What Flower's loop cannot do is missing: it keeps no run directory, cannot be
resumed, and looks for replies every three seconds. `anycostfl serve` uses the round loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from logging import INFO, WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from anycostfl.config import Config
from anycostfl.fleets.attackers import reject_attacks
from anycostfl.flower._internal import log
from anycostfl.flower.broadcast import Chain
from anycostfl.flower.fleet import ASK_S, as_missing, cohort_of, make_tasks, reply_to
from anycostfl.flower.messages import message_bytes, to_envelope, to_message
from anycostfl.flower.server import server_experiment
from anycostfl.planning.draw import choose
from anycostfl.records.round import RoundRecord, Status
from anycostfl.rounds import (
    Offers,
    RoundPlan,
    calibrate,
    close_round,
    first_state,
    is_evaluated,
    open_round,
)
from anycostfl.wire.envelope import MessageError
from anycostfl.wire.messages import (
    Capabilities,
    ExperimentInfo,
    RoundInfo,
    Task,
    read_capabilities,
)


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """What a round's messages were made from."""

    plan: RoundPlan
    tasks: Mapping[int, Task]  # by node
    sizes: Mapping[int, int]  # of the messages, in bytes


class AnycostStrategy(Strategy):
    """Every device gets the sub-model it can afford; `records` says what each round cost."""

    def __init__(self, config: Config) -> None:
        reject_attacks(config.attack)
        self.config = config
        self.records: list[RoundRecord] = []
        self._experiment = server_experiment(config)
        self._about = ExperimentInfo.of(self._experiment)
        self._state = first_state(self._experiment)
        self._chain = Chain(self._state.public)
        self._sent: _Sent | None = None

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
        number = server_round - 1
        info, self._sent = RoundInfo(self._about, number), None
        nodes = self._ask(grid, info)
        found = {device: capabilities for device, (_, capabilities) in nodes.items()}
        offers = self._choose(number, found)
        if offers is None:
            log(WARNING, "no device is there; the round changes nothing")
            return []
        weights = arrays.to_torch_state_dict()
        self._state = replace(self._state, rounds=number, weights=weights)
        self._state, plan = open_round(self._experiment, self._state, offers)
        held = {device: capabilities.model_digest for device, capabilities in found.items()}
        made = make_tasks(self._experiment, info, plan, self._chain, held)
        tasks = {nodes[task.device][0]: task for task in made}
        messages = [
            to_message(task.pack(), node, MessageType.TRAIN, number, None)
            for node, task in tasks.items()
        ]
        sizes = {message.metadata.dst_node_id: message_bytes(message) for message in messages}
        self._sent = _Sent(plan, tasks, sizes)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Close the round with the replies that came."""
        sent, number = self._sent, server_round - 1
        if sent is None:
            self.records.append(RoundRecord(number, None, ()))
            return None, None
        found = {message.metadata.src_node_id: message for message in replies}
        replied = (
            reply_to(task, found[node], sent.sizes[node])
            if node in found
            else as_missing(task, "no reply in time", sent.sizes[node])
            for node, task in sent.tasks.items()
        )
        experiment = self._experiment
        self._state, record = close_round(experiment, self._state, sent.plan, replied)
        if is_evaluated(self.config.run, number):
            self._state = calibrate(experiment, self._state)
            record = replace(record, accuracy=experiment.accuracy(self._state.weights))
        self.records.append(record)
        return self.initial_arrays(), _metrics(record)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No device is asked: the server evaluates."""
        del server_round, arrays, config, grid
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Nothing was asked, so nothing comes back."""
        del server_round, replies
        return None

    def _choose(self, number: int, found: Mapping[int, Capabilities]) -> Offers | None:
        """The cohort of a round, drawn among the devices that answered."""
        seed, fleet = self.config.run.seed, self.config.fleet
        free = self._state.suspensions.available(found, number)
        chosen = choose(fleet, free, seed=seed, round_index=number).tolist()
        drawn = choose(fleet, found, seed=seed, round_index=number).tolist()
        return Offers(cohort_of([found[i] for i in chosen]), drawn) if chosen else None

    def _ask(self, grid: Grid, info: RoundInfo) -> dict[int, tuple[int, Capabilities]]:
        """Every device that answers: its node, and what it can spend."""
        messages = [
            to_message(info.pack(), node, MessageType.QUERY, info.round, ASK_S)
            for node in grid.get_node_ids()
        ]
        found: dict[int, tuple[int, Capabilities]] = {}
        for message in grid.send_and_receive(messages, timeout=ASK_S):
            node = message.metadata.src_node_id
            if message.has_error():
                log(WARNING, "node %s did not answer: %s", node, message.error.reason)
                continue
            try:
                known = read_capabilities(to_envelope(message.content))
            except MessageError as error:
                log(WARNING, "node %s is ignored: %s", node, error)
                continue
            if known.device in found or not 0 <= known.device < self.config.fleet.devices:
                log(WARNING, "node %s is ignored: no device %d is free", node, known.device)
                continue
            found[known.device] = node, known
        return found


def _metrics(record: RoundRecord) -> MetricRecord:
    """What a round cost, as Flower shows it."""
    values: dict[str, int | float] = {
        "devices": sum(device.status is Status.OK for device in record.devices),
        "latency_s": record.latency_s,
        "energy_j": record.energy_j,
        "bytes_up": record.bytes_up,
    }
    if record.accuracy is not None:
        values["accuracy"] = record.accuracy
    return MetricRecord(dict(values))
