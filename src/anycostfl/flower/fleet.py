"""Real devices as a fleet: who is connected, what each can spend, who has done its task.

A node of Flower that is connected is asked who it is; its capabilities make it a device that can be
drawn. Every result brings the capabilities for the next round, so that no device is asked twice. A
device that misses a deadline is asked again and returns with its answer, however late.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from torch import Tensor

from anycostfl.checks import AtLeastZero, Count, Positive, check_fields
from anycostfl.data.prepare import Prepare, add_sums
from anycostfl.device import Reply
from anycostfl.errors import AnycostError
from anycostfl.experiment import Experiment
from anycostfl.fleets.attackers import reject_attacks
from anycostfl.flower._internal import ErrorCode, drop_messages, log, message_bytes
from anycostfl.flower.messages import ReplyCollector, read_reply, reason_of, to_message
from anycostfl.flower.numbers import NotReadyError, claim_number
from anycostfl.metrics import Metric, Score, score
from anycostfl.planning.cost import Devices
from anycostfl.planning.draw import Cohort, choose, reject_simulated_only
from anycostfl.planning.planner import needed_budgets
from anycostfl.planning.strategy import Reason
from anycostfl.rounds import (
    CLOSED,
    LateReply,
    Offers,
    RoundPlan,
    ServerState,
    one_line,
)
from anycostfl.server.suspensions import Suspensions
from anycostfl.state import State
from anycostfl.wire import messages as wire
from anycostfl.wire.envelope import Envelope, MessageError

ASK_S, ASK_MOST_S = 30.0, 480.0  # until a question is repeated: twice as long every time
ANSWER_S = 600.0  # how long an answer is waited for, repeated question or not
MOST_OPEN = 1000  # unanswered tasks of closed rounds that are remembered
BATCH, BATCH_BYTES = 100, 4 << 20  # messages in one request
GONE_S = 25.0  # a device that crashed counts as connected for 20 s, and returns as another node
REFRESH_S = 1.0  # between two looks at who is connected
SPARE_S = 10.0  # a task outlives its deadline, so that it is the deadline that is recorded
SLOWEST_BPS = 8e6  # at which tasks are handed out; the deadline counts from the last of them
FAR = 2.0  # a device that works this many times its planned seconds does not match its profile

NOTHING_CAME = set(ErrorCode) - {ErrorCode.CLIENT_APP_RAISED_EXCEPTION}
"""What the SuperLink says on behalf of a device; anything else that goes wrong, the device says."""


class NotEnoughDevicesError(AnycostError):
    """Too few devices are connected, for too long."""


@dataclass(frozen=True, slots=True)
class RoundPolicy:
    """How long the server waits, and for how many."""

    deadline_s: Positive = 120.0  # of a round, from the moment its tasks are sent
    wait_for: Count = 1  # devices that must have joined before the first round
    min_replies: Count = 1  # usable replies without which a round changes nothing
    patience_s: Positive = 600.0  # how long to wait for devices before giving up
    close_after: Annotated[int, AtLeastZero] = 0  # replies that end a round early; 0: all

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(slots=True, eq=False)
class Node:
    """A node of Flower that is connected, and what was asked of it."""

    asked: int = 0  # how often it was asked without an answer
    lapses: float = 0.0  # when it is asked again; never, if it was rejected
    twin_since: float = math.inf  # when it was first seen that its number is another node's
    unfit: str = ""  # why it is no device


@dataclass(slots=True, eq=False)
class Sent:
    """A message on its way to a node, and what has come back."""

    node: int
    name: str  # of the message; empty if Flower did not take it
    known: Reply  # what is known of the reply beforehand
    replies: list[Message | MessageError] = field(default_factory=list)
    lost: str = ""  # why no reply can come

    def __post_init__(self) -> None:
        if not self.name:
            self.lost = "Flower did not take the task"
            self.known = replace(self.known, wire_bytes_down=0)


class FlowerFleet:
    """The devices behind a Grid of Flower; they keep what they remember themselves.

    With the folder of a run, the number of a device is bound to its key (`numbers`).
    """

    def __init__(
        self,
        grid: Grid,
        experiment: Experiment,
        policy: RoundPolicy,
        *,
        start: ServerState,
        folder: Path | None = None,
    ) -> None:
        reject_attacks(experiment.config.attack)
        reject_simulated_only(experiment.config.fleet)
        self._grid, self._experiment, self._policy = grid, experiment, policy
        self._collector, self._folder = ReplyCollector(grid), folder
        self._about = wire.ExperimentInfo.of(experiment)
        self._fitted = start.fitted or experiment.fitted
        self._tell_fitted()
        self._chain = wire.Chain(start.public)
        self._first = start.rounds
        self._coming = start.rounds  # the round that devices are asked about
        self._nodes: dict[int, Node] = {}  # that are connected
        self._capabilities: dict[int, wire.Capabilities] = {}  # of nodes that are devices
        self._sent: dict[str, Sent] = {}  # the latest tasks, or models to evaluate
        self._open: dict[str, tuple[Sent, int]] = {}  # tasks of closed rounds that are unanswered
        self._late: list[LateReply] = []  # since the last round was planned
        self._questions: dict[str, int] = {}  # that have not been answered, and to which node
        self._slow: set[int] = set()  # devices that were warned about
        self._looked = 0.0  # when

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

        def are_enough() -> bool:
            there = self.devices()
            free = suspensions.available(there, number)
            return len(there) >= least and len(free) >= min(least, policy.min_replies)

        until = time.monotonic() + policy.patience_s
        while self._wait(are_enough, until):
            self._fit()
            if offers := self._draw(number, suspensions):
                return offers
        there = self.devices()
        suspended = len(there) - len(suspensions.available(there, number))
        unfit = [one_line(node.unfit) for node in self._nodes.values() if node.unfit]
        others = f". {len(unfit)} more are here but cannot: {'; '.join(sorted(set(unfit)))}"
        raise NotEnoughDevicesError(
            f"{len(there)} devices are ready after {policy.patience_s:g} s, {suspended} of them "
            f"suspended; at least {least} are needed. Start them with `anycostfl join`, then "
            f"resume with --resume{others if unfit else ''}"
        )

    def offers_at_once(self, number: int, suspensions: Suspensions) -> Offers | None:
        """The same of those who are there now; nothing if nobody answers."""
        self._coming = number

        def have_answered() -> bool:
            strangers = (known for n, known in self._nodes.items() if n not in self._capabilities)
            return not any(known.asked and not known.unfit for known in strangers)

        self._wait(have_answered, time.monotonic() + ASK_S)
        if self._capabilities:
            self._fit()
        return self._draw(number, suspensions)

    def _draw(self, number: int, suspensions: Suspensions) -> Offers | None:
        """Choose among the devices that are there; nothing if none of the chosen answers."""
        nodes, config = self.devices(), self._experiment.config
        last = suspensions.drawn_last(number)
        draw = partial(choose, config.fleet, seed=config.run.seed, round_index=number, last=last)
        chosen = draw(suspensions.available(nodes, number)).tolist()

        def silent() -> list[int]:
            """Those chosen that have not said what they can spend in this round."""
            known = {i: self._capabilities.get(nodes[i]) for i in chosen}
            return [i for i, found in known.items() if found is None or found.round != number]

        self._question([nodes[i] for i in silent()])
        until = time.monotonic() + min(ASK_S, self._policy.deadline_s)
        self._wait(lambda: not silent(), until)
        lost = silent()
        ready = [self._capabilities[nodes[i]] for i in chosen if i not in lost]
        for device in lost:
            self._capabilities.pop(nodes[device], None)
        if not ready:
            return None
        return Offers(
            cohort_of(ready),
            draw(nodes).tolist(),
            lost,
            {} if self._experiment.fitted else self._fitted,
            self._take_late(),
            {i: one.offer for i, one in enumerate(ready) if one.offer},
        )

    def _take_late(self) -> tuple[LateReply, ...]:
        late, self._late = tuple(self._late), []
        return late

    def _fit(self) -> None:
        """Fit what samples are prepared by on all devices that are there, and tell them."""
        how = self._experiment.task.preparation
        if how is None or self._fitted:
            return
        said = [found.sums for found in self._capabilities.values()]
        sums = [one for one in said if fitted_on(how, one)]
        shapes = Counter(tuple((n, s.shape) for n, s in sorted(one.items())) for one in sums)
        if not shapes:  # there is nothing to fit, such as on whole numbers
            return
        usual = shapes.most_common(1)[0][0]  # of a device with other channels nothing adds up
        alike = [s for s in sums if tuple((n, v.shape) for n, v in sorted(s.items())) == usual]
        self._fitted = fitted_on(how, add_sums(alike))
        self._tell_fitted()

    def _tell_fitted(self) -> None:
        if self._fitted:
            self._about = replace(self._about, fitted=wire.pack_fitted(self._fitted))

    def messages(self, plan: RoundPlan, wait_s: float | None) -> Iterator[tuple[Message, Reply]]:
        """Each device's task, the largest first, and what is known of its reply beforehand."""
        tasks, nodes, kind = self._tasks(plan), self.devices(), MessageType.TRAIN
        handing_out_s = 8 * sum(task.size for task in tasks) / SLOWEST_BPS
        lives_s = wait_s + SPARE_S + handing_out_s if wait_s else None
        for task in sorted(tasks, key=lambda task: -task.size):
            message = to_message(task.pack(), nodes[task.device], kind, plan.number, lives_s)
            size = message_bytes(message)
            yield message, Reply(task.device, bytes_down=task.size, wire_bytes_down=size)

    def _tasks(self, plan: RoundPlan) -> list[wire.TrainTask]:
        """What each device is sent: the channels of its sub-model, or the steps that it missed."""
        net, feedback = self._experiment.net, self._experiment.method.feedback
        info = wire.RoundInfo(self._about, plan.number)
        held = {found.device: found.model_digest for found in self._capabilities.values()}
        if plan.step:
            own = (name for name, _ in net.module.named_parameters())
            self._chain.add(plan.step, {name: plan.model[name] for name in own})
        return [
            wire.TrainTask(
                info=info,
                device=a.device,
                alpha=a.plan.alpha,
                widths=a.plan.widths,
                upload=a.upload,
                seed=a.seed,
                learning_rate=a.learning_rate,
                work=a.work,
                weights=b"" if plan.step else wire.pack_weights(net, plan.model, a.plan),
                moved=plan.moved if feedback else {},
                download=self._chain.since(held[a.device]) if plan.step else wire.Download(),
            )
            for a in plan.assignments
        ]

    def perform(self, plan: RoundPlan) -> Iterator[Reply]:
        """Send each device its task; one reply each in the same order, by the deadline.

        Further replies of a device come last.
        """
        warn_infeasible(plan)
        wait_s, self._coming = self._policy.deadline_s, plan.number + 1
        # Late replies are fetched, too: Flower keeps them.
        sent = self._exchange(
            self.messages(plan, wait_s), SPARE_S, close_after=self._policy.close_after
        )
        early = 0 < self._policy.close_after <= sum(map(is_answered, sent.values()))
        unanswered = {s.name: (s, plan.number) for s in sent.values() if s.name and not s.replies}
        self._open = dict([*self._open.items(), *unanswered.items()][-MOST_OPEN:])
        replies: list[Reply] = []
        surplus: list[Reply] = []
        for one in (sent[a.device] for a in plan.assignments):
            late = one.lost or (CLOSED if early else f"no reply within {wait_s:g} s")
            came = [reply_to(one.known, r) for r in one.replies] or [
                replace(one.known, missing=late)
            ]
            usable = [reply for reply in came if not reply.missing] or came[:1]
            replies.append(usable[0])
            surplus += usable[1:]
            if usable[0].missing:  # it may still be busy: it counts again when it answers
                self._capabilities.pop(one.node, None)
        self._warn_slow(plan, replies)
        yield from (*replies, *surplus)

    def evaluate(self, weights: State) -> Score | None:
        """How good a model is on the server's test data, or else on that of connected devices."""
        if self._experiment.test is not None:
            return self._experiment.evaluate(weights)
        task = wire.EvaluateTask(wire.RoundInfo(self._about, self._coming), weights).pack()
        kind, wait_s = MessageType.EVALUATE, self._policy.deadline_s
        messages = (
            (to_message(task, node, kind, self._coming, wait_s), Reply(device))
            for device, node in self.devices().items()
        )
        sent = self._exchange(messages)
        found: list[wire.Evaluation] = []
        for one in sent.values():
            with suppress(MessageError, IndexError):  # IndexError: it did not reply
                found.append(wire.read_evaluation(read_reply(one.replies[0])))
        metrics = self._experiment.task.metrics
        found = [one for one in found if are_possible(metrics, one.sums)]
        shapes = Counter(tuple(map(len, one.sums)) for one in found)
        if not shapes:
            return None
        usual = shapes.most_common(1)[0][0]
        chunks = [[s[None] for s in e.sums] for e in found if tuple(map(len, e.sums)) == usual]
        total = [torch.cat(parts).sum(0) for parts in zip(*chunks, strict=True)]
        return score(metrics, chunks) if are_possible(metrics, total) else None

    def _exchange(
        self,
        messages: Iterable[tuple[Message, Reply]],
        spare_s: float = 0.0,
        *,
        close_after: int = 0,
    ) -> dict[int, Sent]:
        """Send messages; wait till all are answered or their nodes gone, or the time is over.

        Or till so many are answered.
        """
        sent, wait_s = {}, self._policy.deadline_s
        for batch in batched(messages):
            names = self._collector.send([message for message, _ in batch])
            for (message, known), name in zip(batch, names, strict=True):
                sent[known.device] = Sent(message.metadata.dst_node_id, name, known)
        self._sent = {one.name: one for one in sent.values() if one.name}
        self._collector.watch(list(self._sent), wait_s + spare_s)

        def is_over() -> bool:
            for one in sent.values():
                if one.node not in self._nodes:
                    one.lost = one.lost or "the device is gone"
            if 0 < close_after <= sum(map(is_answered, sent.values())):
                return True
            return all(one.replies or one.lost for one in sent.values())

        self._wait(is_over, time.monotonic() + wait_s)
        unanswered = (n for n, one in self._sent.items() if all(map(is_silence, one.replies)))
        drop_messages(self._grid, unanswered)
        return sent

    def _warn_slow(self, plan: RoundPlan, replies: Sequence[Reply]) -> None:
        """Warn once about every device that took far longer than planned."""
        for assignment, reply in zip(plan.assignments, replies, strict=True):
            planned_s = plan.strategies.latency_s[assignment.position]
            if reply.busy_s > FAR * planned_s and reply.device not in self._slow:
                self._slow.add(reply.device)
                log(
                    WARNING,
                    "device %d worked %.2f s where %.2f s were planned; measure its profile on it "
                    "with `anycostfl profile`",
                    *(reply.device, reply.busy_s, planned_s),
                )

    # --- who is there -----------------------------------------------------------------------------

    def devices(self) -> dict[int, int]:
        """The node of every device."""
        return {found.device: node for node, found in self._capabilities.items()}

    def _wait(self, done: Callable[[], bool], until: float) -> bool:
        """Handle messages until something holds, or the time is over; and all that have come."""
        while True:
            while self._step(0.0):
                pass
            if done():
                return True
            if time.monotonic() >= until:
                return False
            self._step(until)

    def _step(self, until: float) -> bool:
        """Handle the next message, if one comes soon; now and then see who is connected."""
        now = time.monotonic()
        if now - self._looked >= REFRESH_S:
            self._looked = now
            self._refresh(now)
        arrived = self._collector.take(min(until - now, REFRESH_S / 4))
        if arrived is not None:
            self._handle(*arrived)
        return arrived is not None

    def _refresh(self, now: float) -> None:
        """Forget nodes that are gone; ask those that are no devices, unless asked lately."""
        online = sorted(self._grid.get_node_ids())
        there = set(online)
        self._questions = {name: n for name, n in self._questions.items() if n in there}
        self._nodes = {node: self._nodes.get(node, Node()) for node in online}
        self._capabilities = {n: c for n, c in self._capabilities.items() if n in self._nodes}
        strangers = (n for n in online if n not in self._capabilities)
        self._question([n for n in strangers if self._nodes[n].lapses <= now])

    def _question(self, nodes: Sequence[int]) -> None:
        """Ask nodes who they are and what they can spend in the coming round."""
        info, now = wire.RoundInfo(self._about, self._coming).pack(), time.monotonic()
        for start in range(0, len(nodes), BATCH):
            some, kind = nodes[start : start + BATCH], MessageType.QUERY
            names = self._collector.send(
                [to_message(info, node, kind, self._coming, ANSWER_S) for node in some]
            )
            asked = {name: node for name, node in zip(names, some, strict=True) if name}
            self._questions |= asked
            self._collector.watch(asked, ANSWER_S)
            for known in map(self._nodes.__getitem__, asked.values()):
                known.lapses = now + min(ASK_S * 2**known.asked, ASK_MOST_S)
                known.asked += 1

    def _handle(self, name: str, reply: Message | MessageError) -> None:
        """Note a reply to what was sent, now or earlier, or welcome a node that says who it is."""
        if name in self._open:
            one, number = self._open.pop(name)
            if isinstance(reply, MessageError) or not is_silence(reply):
                size = message_bytes(reply) if isinstance(reply, Message) else 0
                self._late.append(LateReply(one.known.device, number, size))
                self._renew(one.node, reply)
            return
        if sent := self._sent.get(name):
            sent.replies.append(reply)
            self._renew(sent.node, reply)
            return
        node = self._questions.pop(name, None)
        if node in self._nodes:
            self._welcome(node, self._nodes[node], reply)

    def _renew(self, node: int, reply: Message | MessageError) -> None:
        """A result carries the next round's capabilities; without them, the device is asked."""
        before = self._capabilities.get(node)
        if before is None or isinstance(reply, MessageError):
            return
        envelope = Envelope() if reply.has_error() else read_reply(reply)
        if "evaluation" in envelope.tables:
            return
        del self._capabilities[node]
        with suppress(MessageError):
            latest = self._read_capabilities(envelope)
            if latest.device == before.device:
                self._capabilities[node] = latest

    def _read_capabilities(self, envelope: Envelope) -> wire.Capabilities:
        """What a device can spend; a plan of its own only within the limits of the experiment."""
        found, method = wire.read_capabilities(envelope), self._experiment.method
        if found.offer and not method.plans_alone:
            raise MessageError("an offer, though this method plans for the whole cohort")
        if found.offer and (problem := found.offer.problem(self._experiment.limits)):
            raise MessageError(f"an offer outside the limits: {problem}")
        return found

    def _welcome(self, node: int, known: Node, answer: Message | MessageError) -> None:
        """Add a device, unless it cannot be one of this fleet's."""
        if isinstance(answer, Message) and answer.has_error():
            known.unfit = reason_of(answer)
            log(INFO, "node %s did not answer: %s", node, one_line(reason_of(answer)))
            return
        known.asked, known.lapses = 0, 0.0
        try:
            found = self._read_capabilities(read_reply(answer))
            if not 0 <= found.device < self._experiment.config.fleet.devices:
                raise MessageError(f"there is no device {found.device} in this fleet")
            if self._folder:
                claim_number(self._folder, node, found.device)
            self._check_free(node, known, found.device)
        except NotReadyError as error:
            log(INFO, "node %s waits: %s", node, error)  # it is asked again
        except (MessageError, wire.DeviceRejectedError) as error:
            log(WARNING, "node %s is rejected: %s", node, one_line(str(error)))
            known.unfit, known.lapses = str(error), math.inf  # until it connects again
            if isinstance(answer, Message):
                no = wire.pack_rejection(str(error))
                kind = MessageType.QUERY
                self._collector.send([to_message(no, node, kind, self._coming, ASK_S)])
        else:
            if node not in self._capabilities:
                log(INFO, "device %d is ready", found.device)
            if node not in self._capabilities or found.round >= self._capabilities[node].round:
                self._capabilities[node] = found
            known.unfit = ""

    def _check_free(self, node: int, known: Node, device: int) -> None:
        """Reject a number that is another node's, unless that one may have crashed just now."""
        if self.devices().get(device, node) == node:
            known.twin_since = math.inf
            return
        known.twin_since = min(known.twin_since, time.monotonic())
        if time.monotonic() < known.twin_since + GONE_S:
            raise NotReadyError(f"device {device} is another node's, which may have crashed")
        raise wire.DeviceRejectedError(f"device {device} is connected already")


def warn_infeasible(plan: RoundPlan) -> None:
    """Log which budgets would suffice for devices that cannot take part."""
    strategies, cohort = plan.strategies, plan.offers.cohort
    for i in np.flatnonzero(~strategies.feasible).tolist():
        if i in plan.offers.own:  # it tells its owner; nobody else knows its budgets
            continue
        reason, needs = strategies.reason[i], needed_budgets(strategies, cohort.devices, i)
        text = "device %d sits out (%s); it needs %s"
        log(WARNING, text, cohort.index[i], Reason(int(reason)), needs)


def batched(
    messages: Iterable[tuple[Message, Reply]],
) -> Iterator[list[tuple[Message, Reply]]]:
    """Messages in groups that one request can carry; a large one is alone."""
    batch: list[tuple[Message, Reply]] = []
    size = 0
    for message, known in messages:
        if batch and (len(batch) == BATCH or size + known.wire_bytes_down > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append((message, known))
        size += known.wire_bytes_down
    if batch:
        yield batch


def cohort_of(found: Sequence[wire.Capabilities]) -> Cohort:
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


def fitted_on(how: Prepare, sums: State) -> State:
    """What is fitted on sums; nothing if these can be the sums of no samples."""
    try:
        fitted = how.fit(sums)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return {}
    return fitted if all(tensor.isfinite().all() for tensor in fitted.values()) else {}


def are_possible(metrics: Sequence[Metric], sums: Sequence[Tensor]) -> bool:
    """Whether a device can have measured these sums."""
    same = len(metrics) == len(sums)
    return same and all(m.is_possible(s) for m, s in zip(metrics, sums, strict=True))


def is_answered(one: Sent) -> bool:
    """Whether a device itself has replied."""
    return any(isinstance(r, MessageError) or not is_silence(r) for r in one.replies)


def is_silence(reply: Message | MessageError) -> bool:
    """Whether this is what the SuperLink says on behalf of a device that gave no reply."""
    return isinstance(reply, Message) and reply.has_error() and reply.error.code in NOTHING_CAME


def reply_to(known: Reply, reply: Message | MessageError) -> Reply:
    """What a reply to a task says, if it can be read; `known` is what was known before it came."""
    if isinstance(reply, Message):
        if is_silence(reply):
            return replace(known, missing=reason_of(reply))
        known = replace(known, wire_bytes_up=message_bytes(reply))
        if reply.has_error():
            return replace(known, error=reason_of(reply))
    try:
        result = wire.read_result(read_reply(reply))
        if result.next.device != known.device:
            raise MessageError(f"device {result.next.device} answers for {known.device}")
    except MessageError as problem:
        return replace(known, unreadable=str(problem))
    return replace(
        known,
        payload=result.payload,
        error=result.error,
        busy_s=result.busy_s,
        done=result.done,
        measured=result.measured,
    )
