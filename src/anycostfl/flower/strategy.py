"""AnycostFL as a `Strategy` of Flower, for a ServerApp of one's own.

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = AnycostStrategy(load_preset("demo"))
        strategy.start(grid, strategy.initial_arrays(), num_rounds=20, timeout=60.0)

Flower's loop asks it for messages and hands it the replies. The rounds are those of `server.play`,
to the bit; what Flower's loop cannot do is missing: it keeps no run directory, cannot be resumed,
and looks for replies every three seconds. `anycostfl serve` uses `server.play`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from anycostfl.attacks import check_honest
from anycostfl.config import Config, essence
from anycostfl.fleet import choose
from anycostfl.flower.broadcast import Chain
from anycostfl.flower.messages import Ask, MessageError, Offer, Task, read_offer, wire_bytes
from anycostfl.flower.roster import ASK_S, answer_to, as_missing, cohort_of
from anycostfl.flower.server import make_tasks
from anycostfl.rounds import receive
from anycostfl.server import Round, Server
from anycostfl.state import clone_state
from anycostfl.types import RoundRecord
from anycostfl.workers import InProcess


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """What a round's messages were made from."""

    planned: Round
    tasks: Mapping[int, Task]  # by node
    sizes: Mapping[int, int]  # of the messages, in bytes


class AnycostStrategy(Strategy):
    """Every device gets the sub-model it can afford; `records` says what each round cost."""

    def __init__(self, config: Config) -> None:
        check_honest(config.attack)
        self.config = config
        self.records: list[RoundRecord] = []
        self._server = Server(config)
        self._chain = Chain(self._server.public)
        self._sent: _Sent | None = None

    def initial_arrays(self) -> ArrayRecord:
        """The global model to start from."""
        return ArrayRecord(clone_state(self._server.net.module))

    def summary(self) -> None:
        """Log what is about to be trained."""
        fleet, run = self.config.fleet, self.config.run
        log(INFO, "\t├──> %s on %s", run.method, self.config.model.name)
        log(INFO, "\t└──> %d of %d devices a round", fleet.cohort, fleet.devices)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask who can afford what, plan, and make every chosen device its task."""
        del config  # what devices need to know is in their tasks
        server, number = self._server, server_round - 1
        server.net.load(arrays.to_torch_state_dict())
        server.begin(number)
        self._chain.add(server.step, server.public)
        ask = Ask(essence(self.config), number, server.side.shared.scale)
        nodes = self._offers(grid, ask)
        seed, fleet = self.config.run.seed, self.config.fleet
        free = server.bench.free(nodes, number)
        chosen = choose(fleet, free, seed=seed, round_index=number).tolist()
        drawn = choose(fleet, nodes, seed=seed, round_index=number).tolist()
        self._sent = None
        if not chosen:
            log(WARNING, "no device is there; the round changes nothing")
            return []
        planned = server.plan(number, cohort_of([nodes[i][1] for i in chosen]), drawn)
        holds = {device: offer.holds for device, (_, offer) in nodes.items()}
        made = make_tasks(server, ask, planned, self._chain, holds)
        tasks = {nodes[task.device][0]: task for task in made}
        letters = [
            Message(task.pack(), node, MessageType.TRAIN, group_id=str(number))
            for node, task in tasks.items()
        ]
        sizes = {letter.metadata.dst_node_id: wire_bytes(letter) for letter in letters}
        self._sent = _Sent(planned, tasks, sizes)
        return letters

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check every reply against what its device was told; add up what counts."""
        sent, number = self._sent, server_round - 1
        if sent is None:
            self.records.append(RoundRecord(number, None, ()))
            return None, None
        found = {
            message.metadata.src_node_id: message
            for message in replies
            if message.metadata.src_node_id in sent.tasks
        }
        answers = [
            answer_to(task, found[node], sent.sizes[node])
            if node in found
            else as_missing(task, "no reply in time", sent.sizes[node])
            for node, task in sent.tasks.items()
        ]
        server = self._server
        replied = (answer.reply for answer in answers)
        outcomes = server.absorb(receive(server.method, sent.planned.assignments, replied))
        accuracy = server.accuracy(number, InProcess(server.side))
        downloads = {task.device: task.size for task in sent.tasks.values()}
        record = server.close(sent.planned, outcomes, accuracy, downloads=downloads)
        self.records.append(record)
        return self.initial_arrays(), _metrics(record)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nobody is asked: the server evaluates."""
        del server_round, arrays, config, grid
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Nothing was asked, so nothing comes back."""
        del server_round, replies
        return None

    def _offers(self, grid: Grid, ask: Ask) -> dict[int, tuple[int, Offer]]:
        """Every device that answers: its node, and what it can afford."""
        letters = [
            Message(ask.pack(), node, MessageType.QUERY, ttl=ASK_S, group_id=str(ask.round))
            for node in grid.get_node_ids()
        ]
        found: dict[int, tuple[int, Offer]] = {}
        for message in grid.send_and_receive(letters, timeout=ASK_S):
            node = message.metadata.src_node_id
            if message.has_error():
                log(WARNING, "node %s did not answer: %s", node, message.error.reason)
                continue
            try:
                offer = read_offer(message.content)
            except MessageError as error:
                log(WARNING, "node %s is ignored: %s", node, error)
                continue
            if offer.device in found or not 0 <= offer.device < self.config.fleet.devices:
                log(WARNING, "node %s is ignored: no device %d is free", node, offer.device)
                continue
            found[offer.device] = node, offer
        return found


def _metrics(record: RoundRecord) -> MetricRecord:
    """What a round cost, as Flower shows it."""
    values: dict[str, int | float] = {
        "devices": sum(device.status == "ok" for device in record.devices),
        "latency_s": record.latency_s,
        "energy_j": record.energy_j,
        "bytes_up": record.bytes_up,
    }
    if record.accuracy is not None:
        values["accuracy"] = record.accuracy
    return MetricRecord(dict(values))
