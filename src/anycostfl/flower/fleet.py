"""Real devices as a fleet: who is connected, what each can spend, who has done its task.

A node of Flower that is connected is asked who it is; its capabilities make it a device that can be
drawn. Every result brings the capabilities for the next round, so that no device is asked twice. A
device that misses a deadline is asked again and returns with its answer, however late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from logging import INFO, WARNING
from typing import Self

import numpy as np
from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from anycostfl.checks import Count, Positive, check_fields
from anycostfl.device import Reply
from anycostfl.errors import AnycostError
from anycostfl.experiment import Experiment
from anycostfl.fleets.attackers import reject_attacks
from anycostfl.flower._internal import ErrorCode, log
from anycostfl.flower.broadcast import Chain
from anycostfl.flower.messages import message_bytes, to_envelope, to_message
from anycostfl.flower.numbers import NotReadyError, Numbers, NumberTakenError
from anycostfl.flower.post import Corrupt, ReplyCollector
from anycostfl.planning.cost import Devices
from anycostfl.planning.draw import Cohort, choose
from anycostfl.planning.planner import needed_budgets
from anycostfl.planning.strategy import Reason
from anycostfl.rounds import Offers, RoundPlan, ServerState, one_line
from anycostfl.server.suspensions import Suspensions
from anycostfl.state import State
from anycostfl.wire.envelope import Envelope, MessageError
from anycostfl.wire.messages import (
    Capabilities,
    Download,
    EvaluateTask,
    Evaluation,
    ExperimentInfo,
    RoundInfo,
    Task,
    pack_rejection,
    pack_weights,
    read_capabilities,
    read_evaluation,
    read_result,
)

ASK_S = 30.0  # how long a question stands
GONE_S = 25.0  # a device that crashed counts as connected for 20 s, and returns as another node
REFRESH_S = 1.0  # between two looks at who is connected
SPARE_S = 10.0  # a task outlives its deadline, so that it is the deadline that is recorded
SLOWEST_BPS = 8e6  # at which tasks are handed out; the deadline counts from the last of them
FAR = 2.0  # a device that works this many times its planned seconds does not match its profile

NOTHING_CAME = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
)
"""What the SuperLink says on behalf of a device; anything else that goes wrong, the device says."""


class NotEnoughDevicesError(AnycostError):
    """Too few devices are connected, for too long."""


@dataclass(frozen=True, slots=True)
class RoundPolicy:
    """How long the server waits, and for how many.

    deadline_s: of a round, from the moment its tasks are sent.
    wait_for: devices that must have joined before the first round.
    min_replies: usable replies without which a round changes nothing.
    patience_s: how long to wait for devices before giving up.
    """

    deadline_s: Positive = 120.0
    wait_for: Count = 1
    min_replies: Count = 1
    patience_s: Positive = 600.0

    def __post_init__(self) -> None:
        check_fields(self)


class FlowerFleet:
    """The devices behind a Grid of Flower; they keep what they remember themselves."""

    def __init__(
        self,
        grid: Grid,
        experiment: Experiment,
        policy: RoundPolicy,
        *,
        start: ServerState,
        numbers: Numbers | None = None,
    ) -> None:
        reject_attacks(experiment.config.attack)
        self._experiment, self._policy = experiment, policy
        self._collector, self._numbers = ReplyCollector(grid), numbers or Numbers()
        self._about = ExperimentInfo.of(experiment)
        self._chain = Chain(start.public)
        self._first = start.rounds
        self._capabilities: dict[int, Capabilities] = {}  # by node, the latest
        self._asked: dict[str, tuple[int, float]] = {}  # message → node, when the question lapses
        self._ignored: set[int] = set()  # nodes that cannot be a device of this fleet
        self._twins: dict[int, float] = {}  # node whose number is another's → since when
        self._unfit: dict[int, str] = {}  # node that is connected and no device → why
        self._slow: set[int] = set()  # devices that were warned about
        self._online: set[int] = set()
        self._looked = 0.0  # when
        self._coming = start.rounds  # the round that newcomers are asked about

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def memory(self) -> Mapping[int, State]:
        """Nothing: devices keep it."""
        return {}

    def offers(self, number: int, suspensions: Suspensions) -> Offers:
        """Wait until enough devices are there, draw the cohort, learn what each can spend.

        As many as must reply must be there and not suspended.
        """
        policy = self._policy
        least = policy.wait_for if number == self._first else policy.min_replies
        self._coming = number
        until = time.monotonic() + policy.patience_s

        def are_enough() -> bool:
            free = len(suspensions.available(self._nodes(), number))
            return len(self._capabilities) >= least and free >= min(least, policy.min_replies)

        while True:
            self._wait(are_enough, until)
            if not are_enough():
                there = len(self._capabilities)
                free = len(suspensions.available(self._nodes(), number))
                raise NotEnoughDevicesError(
                    f"{there} devices are ready after {policy.patience_s:g} s, {there - free} of "
                    f"them suspended; at least {least} are needed. Start them with `anycostfl "
                    f"join`, then resume with --resume{self._reasons()}"
                )
            if offers := self._draw(number, suspensions):
                return offers

    def _reasons(self) -> str:
        """Why nodes that are connected take no part."""
        words = sorted(set(map(one_line, self._unfit.values())))
        return f". {len(self._unfit)} more are here but cannot: {'; '.join(words)}" if words else ""

    def perform(self, plan: RoundPlan) -> Iterator[Reply]:
        """Send each device its task; one reply each in the same order, by the deadline.

        Further replies of a device come last.
        """
        warn_infeasible(plan)
        tasks = self._tasks(plan)
        self._coming = plan.number + 1
        nodes = self._nodes()
        places, sizes = self._hand_out(tasks, nodes)
        replies, surplus = self._collect(tasks, nodes, places, sizes)
        for task, reply in zip(tasks, replies, strict=True):
            if reply.missing:  # it may still be busy: it counts again when it answers
                self._capabilities.pop(nodes[task.device], None)
        self._collector.forget(n for n, place in places.items() if replies[place].missing)
        self._warn_slow(plan, replies)
        yield from (*replies, *surplus)

    def _tasks(self, plan: RoundPlan) -> list[Task]:
        """What each device is sent: the channels of its sub-model, or the steps that it missed."""
        info = RoundInfo(self._about, plan.number)
        nodes = self._nodes()
        held = {i: self._capabilities[node].model_digest for i, node in nodes.items()}
        return make_tasks(self._experiment, info, plan, self._chain, held)

    def evaluate(self, weights: State) -> float | None:
        """The accuracy on the server's test data, or else on that of all connected devices."""
        if self._experiment.test is not None:
            return self._experiment.accuracy(weights)
        task = EvaluateTask(RoundInfo(self._about, self._coming), weights)
        kind, wait_s = MessageType.EVALUATE, self._policy.deadline_s
        nodes = self._nodes()
        names = {
            self._collector.send(to_message(task.pack(), node, kind, self._coming, wait_s)): device
            for device, node in nodes.items()
        }
        names.pop("", None)
        self._collector.watch(list(names), wait_s)
        found: dict[int, Evaluation] = {}

        def take(name: str, message: Message | Corrupt) -> None:
            if name in names:
                device = names.pop(name)
                if isinstance(message, Message) and not message.has_error():
                    with suppress(MessageError):
                        found[device] = read_evaluation(to_envelope(message.content))

        until = time.monotonic() + wait_s
        while names and time.monotonic() < until:
            self._step(take, until)
        self._collector.forget(names)
        samples = sum(evaluation.samples for evaluation in found.values())
        return sum(e.correct for e in found.values()) / samples if samples else None

    def _collect(
        self,
        tasks: Sequence[Task],
        nodes: Mapping[int, int],
        places: Mapping[str, int],
        sizes: Mapping[int, int],
    ) -> tuple[list[Reply], list[Reply]]:
        """One reply to each task by the deadline, and whatever came beyond that."""
        sent = set(places.values())
        replies = {
            place: as_missing(task, "Flower did not take the task", 0)
            for place, task in enumerate(tasks)
            if place not in sent
        }
        surplus: list[Reply] = []

        def take(name: str, message: Message | Corrupt) -> None:
            place = places.get(name)
            if place is None:
                return
            reply = reply_to(tasks[place], message, sizes[place])
            if place in replies and not replies[place].missing:
                surplus.append(reply)
            else:
                replies[place] = reply

        wait_s = self._policy.deadline_s
        until = time.monotonic() + wait_s
        while len(replies) < len(tasks) and time.monotonic() < until:
            self._step(take, until)
            gone = {i for i, task in enumerate(tasks) if nodes[task.device] not in self._online}
            for place in gone - replies.keys():
                replies[place] = as_missing(tasks[place], "the device is gone", sizes[place])
        while self._step(take, 0.0):
            pass  # what has come already, such as second replies
        late = f"no reply within {wait_s:g} s"
        whole = [
            replies.get(place) or as_missing(task, late, sizes[place])
            for place, task in enumerate(tasks)
        ]
        return whole, surplus

    def _hand_out(
        self, tasks: Sequence[Task], nodes: Mapping[int, int]
    ) -> tuple[dict[str, int], dict[int, int]]:
        """Send tasks one by one, the largest first: which message is which task, and its size."""
        places: dict[str, int] = {}
        sizes: dict[int, int] = {}
        stands_s = self._policy.deadline_s + SPARE_S
        lives_s = stands_s + 8 * sum(task.size for task in tasks) / SLOWEST_BPS
        for place in sorted(range(len(tasks)), key=lambda i: -tasks[i].size):
            task = tasks[place]
            node, number = nodes[task.device], task.info.round
            message = to_message(task.pack(), node, MessageType.TRAIN, number, lives_s)
            sizes[place] = message_bytes(message)
            places[self._collector.send(message)] = place
        places.pop("", None)
        self._collector.watch(list(places), stands_s)  # late replies too, for Flower keeps them
        return places, sizes

    def _warn_slow(self, plan: RoundPlan, replies: Sequence[Reply]) -> None:
        """Warn once about every device that took far longer than planned."""
        busy_s = {reply.device: reply.busy_s for reply in replies}
        planned = zip(plan.offers.cohort.index.tolist(), plan.strategies.latency_s, strict=True)
        for device, planned_s in planned:
            worked_s = busy_s.get(device, 0.0)
            if worked_s > FAR * planned_s and device not in self._slow:
                self._slow.add(device)
                log(
                    WARNING,
                    "device %d worked %.2f s where %.2f s were planned; measure its profile on it "
                    "with `anycostfl profile`",
                    *(device, worked_s, planned_s),
                )

    # --- who is there -----------------------------------------------------------------------------

    def _nodes(self) -> dict[int, int]:
        """The node of every device."""
        return {found.device: node for node, found in self._capabilities.items()}

    def _draw(self, number: int, suspensions: Suspensions) -> Offers | None:
        """Choose among the devices that are there; nothing if none of the chosen answers."""
        nodes, config = self._nodes(), self._experiment.config
        draw = partial(choose, config.fleet, seed=config.run.seed, round_index=number)
        chosen = draw(suspensions.available(nodes, number)).tolist()

        def is_fresh(device: int) -> bool:
            known = self._capabilities.get(nodes[device])
            return known is not None and known.round == number

        self._question([nodes[i] for i in chosen if not is_fresh(i)], number)
        until = time.monotonic() + min(ASK_S, self._policy.deadline_s)
        self._wait(lambda: all(map(is_fresh, chosen)), until)
        silent = tuple(i for i in chosen if not is_fresh(i))
        ready = [self._capabilities[nodes[i]] for i in chosen if is_fresh(i)]
        for device in silent:
            self._capabilities.pop(nodes[device], None)
        return Offers(cohort_of(ready), draw(nodes).tolist(), silent) if ready else None

    def _wait(self, done: Callable[[], bool], until: float) -> None:
        """Handle messages until something holds, or the time is over."""
        while self._step(lambda *_: None, 0.0):
            pass  # what has come already
        while not done() and time.monotonic() < until:
            self._step(lambda *_: None, until)

    def _step(self, take: Callable[[str, Message | Corrupt], None], until: float) -> bool:
        """Handle the next message, if one comes soon; now and then see who is connected."""
        now = time.monotonic()
        if now - self._looked >= REFRESH_S:
            self._looked = now
            self._refresh(set(self._collector.nodes()), now)
        message = self._collector.take(min(until - now, REFRESH_S / 4))
        if message is None:
            return False
        if isinstance(message, Corrupt):
            self._reject(message)
            take(message.name, message)
            return True
        name = message.metadata.reply_to_message_id
        asked = self._asked.get(name)
        if asked is None:
            take(name, message)
            self._renew(message)
        elif message.has_error():
            self._unfit[asked[0]] = message.error.reason or "no reason given"
            log(INFO, "node %s did not answer: %s", asked[0], one_line(self._unfit[asked[0]]))
        else:
            del self._asked[name]
            self._welcome(asked[0], message)
        return True

    def _refresh(self, online: set[int], now: float) -> None:
        self._online = online
        self._ignored &= online
        self._unfit = {node: why for node, why in self._unfit.items() if node in online}
        self._twins = {node: since for node, since in self._twins.items() if node in online}
        self._capabilities = {n: c for n, c in self._capabilities.items() if n in online}
        self._asked = {
            name: (node, lapses)
            for name, (node, lapses) in self._asked.items()
            if node in online and now < lapses
        }
        asked = {node for node, _ in self._asked.values()}
        self._question(
            sorted(online - self._capabilities.keys() - self._ignored - asked), self._coming
        )

    def _question(self, nodes: Sequence[int], number: int) -> None:
        """Ask nodes who they are and what they can spend in a round."""
        lapses = time.monotonic() + ASK_S
        info = RoundInfo(self._about, number).pack()
        for node in nodes:
            message = to_message(info, node, MessageType.QUERY, number, ASK_S)
            if name := self._collector.send(message):
                self._asked[name] = (node, lapses)
        self._collector.watch([n for n, (_, t) in self._asked.items() if t == lapses], ASK_S)

    def _reject(self, corrupt: Corrupt) -> None:
        """Stop asking a node whose answer cannot be read, until it connects again."""
        asked = self._asked.pop(corrupt.name, None)
        if asked is not None:
            log(WARNING, "node %s is rejected: %s", asked[0], one_line(corrupt.why))
            self._ignored.add(asked[0])
            self._unfit[asked[0]] = corrupt.why

    def _renew(self, message: Message) -> None:
        """A result carries the next round's capabilities; without them, the device is asked."""
        node = message.metadata.src_node_id
        before = self._capabilities.get(node)
        envelope = Envelope() if message.has_error() else to_envelope(message.content)
        if before is None or "evaluation" in envelope.tables:
            return
        del self._capabilities[node]
        with suppress(MessageError):
            latest = read_capabilities(envelope)
            if latest.device == before.device:
                self._capabilities[node] = latest

    def _welcome(self, node: int, message: Message) -> None:
        """Add a device, unless it cannot be one of this fleet's."""
        try:
            found = read_capabilities(to_envelope(message.content))
            if not 0 <= found.device < self._experiment.config.fleet.devices:
                raise MessageError(f"there is no device {found.device} in this fleet")
            self._numbers.claim(node, found.device)
            self._check_free(node, found.device)
        except NotReadyError as error:
            log(INFO, "node %s waits: %s", node, error)  # it is asked again
            return
        except (MessageError, NumberTakenError) as error:
            log(WARNING, "node %s is rejected: %s", node, one_line(str(error)))
            self._ignored.add(node)
            self._unfit[node] = str(error)
            rejection = pack_rejection(str(error))
            self._collector.send(
                to_message(rejection, node, MessageType.QUERY, self._coming, ASK_S)
            )
            return
        if node not in self._capabilities:
            log(INFO, "device %d is ready", found.device)
        self._unfit.pop(node, None)
        self._capabilities[node] = found

    def _check_free(self, node: int, device: int) -> None:
        """Reject a number that is another node's, unless that one may have crashed just now."""
        if self._nodes().get(device, node) == node:
            self._twins.pop(node, None)
            return
        now = time.monotonic()
        if now - self._twins.setdefault(node, now) < GONE_S:
            raise NotReadyError(
                f"device {device} is connected as another node, which may have crashed"
            )
        raise MessageError(f"device {device} is connected already")


def make_tasks(
    experiment: Experiment,
    info: RoundInfo,
    plan: RoundPlan,
    chain: Chain,
    held: Mapping[int, bytes],
) -> list[Task]:
    """What each device is sent: the channels of its sub-model, or the steps that it missed."""
    net, feedback = experiment.net, experiment.method.feedback
    if plan.step:
        own = (name for name, _ in net.module.named_parameters())
        chain.add(plan.step, {name: plan.model[name] for name in own})
    return [
        Task(
            info=info,
            device=a.device,
            alpha=a.plan.alpha,
            widths=a.plan.widths,
            upload=a.upload,
            seed=a.seed,
            weights=b"" if plan.step else pack_weights(net, plan.model, a.plan),
            moved=plan.moved if feedback else {},
            download=chain.since(held.get(a.device, b"")) if plan.step else Download(),
        )
        for a in plan.assignments
    ]


def warn_infeasible(plan: RoundPlan) -> None:
    """Log which budgets would suffice for devices that cannot take part."""
    strategies, cohort = plan.strategies, plan.offers.cohort
    for i in np.flatnonzero(~strategies.feasible).tolist():
        log(
            WARNING,
            "device %d sits out (%s); it needs %s",
            *(cohort.index[i], Reason(int(strategies.reason[i]))),
            needed_budgets(strategies, cohort.devices, i),
        )


def cohort_of(found: Sequence[Capabilities]) -> Cohort:
    """The devices with these capabilities."""
    resources = {
        item.name: np.concatenate([getattr(one.resources, item.name) for one in found])
        for item in fields(Devices)
    }
    return Cohort(
        np.array([one.device for one in found], np.intp),
        np.array([one.distance_m for one in found]),
        Devices(**resources),
    )


def reply_to(task: Task, message: Message | Corrupt, sent_bytes: int) -> Reply:
    """What a reply to a task says, if it can be read."""
    known = Reply(task.device, bytes_down=task.size, wire_bytes_down=sent_bytes)
    if isinstance(message, Corrupt):
        return replace(known, unreadable=message.why)
    if message.has_error() and message.error.code in NOTHING_CAME:
        return replace(known, missing=message.error.reason or "no reason given")
    known = replace(known, wire_bytes_up=message_bytes(message))
    if message.has_error():
        return replace(known, error=message.error.reason or "no reason given")
    try:
        result = read_result(to_envelope(message.content))
        if result.next.device != task.device:
            raise MessageError(f"device {result.next.device} answers for {task.device}")
    except MessageError as problem:
        return replace(known, unreadable=str(problem))
    return replace(known, payload=result.payload, error=result.error, busy_s=result.busy_s)


def as_missing(task: Task, why: str, sent_bytes: int) -> Reply:
    """The reply of a device that gave none."""
    return Reply(task.device, missing=why, bytes_down=task.size, wire_bytes_down=sent_bytes)
