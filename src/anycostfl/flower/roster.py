"""Who is there, what each can afford, and who has done its task: the server's view of the fleet.

A node of Flower that is connected is asked who it is; its offer makes it a device that can be
chosen. Every result brings the offer for the next round, so that nobody has to be asked twice. A
device that misses a deadline is asked again and comes back with its answer, however late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from logging import INFO, WARNING

import numpy as np
from flwr.app import Message, MessageType

from anycostfl.bench import Bench
from anycostfl.checks import Count, Positive, check_fields
from anycostfl.config import Config, essence
from anycostfl.errors import AnycostError
from anycostfl.fleet import Cohort, choose
from anycostfl.flower._internal import ErrorCode, log
from anycostfl.flower.messages import (
    Ask,
    MessageError,
    Offer,
    Task,
    pack_refusal,
    read_offer,
    read_result,
    wire_bytes,
)
from anycostfl.flower.numbers import NotReadyError, Numbers, NumberTakenError
from anycostfl.flower.post import Corrupt, ReplyCollector
from anycostfl.rounds import one_line
from anycostfl.types import Devices, Scale
from anycostfl.workers import Reply

ASK_S = 30.0  # how long a question stands
GONE_S = 25.0  # a device that crashed counts as connected for 20 s, and comes back as another node
REFRESH_S = 1.0  # between two looks at who is connected
SPARE_S = 10.0  # a task outlives its deadline, so that it is the deadline that is recorded
SLOWEST_BPS = 8e6  # at which tasks are handed out; the deadline counts from the last of them

NOTHING_CAME = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
)
"""What the SuperLink says in a device's place; all else that goes wrong, the device says itself."""


class NotEnoughDevicesError(AnycostError):
    """Too few devices are connected, for too long."""


@dataclass(frozen=True, slots=True)
class Terms:
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


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """The cohort of a round and the chosen devices that did not answer in time.

    `drawn` is whom the draw would have chosen if nobody were benched; `holds` marks what each
    device of the cohort holds.
    """

    cohort: Cohort
    silent: tuple[int, ...]
    drawn: tuple[int, ...]
    holds: Mapping[int, bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What came back for a task, and how long the device worked."""

    reply: Reply
    busy_s: float = 0.0


class Roster:
    """The devices behind a post office."""

    def __init__(
        self,
        office: ReplyCollector,
        config: Config,
        terms: Terms,
        *,
        scale: Scale,
        numbers: Numbers | None = None,
    ) -> None:
        self._office, self._config, self._terms = office, config, terms
        self._scale, self._numbers = scale, numbers or Numbers()
        self._text = essence(config)
        self._offers: dict[int, Offer] = {}  # node → its latest offer
        self._asked: dict[str, tuple[int, float]] = {}  # message → node, when the question lapses
        self._ignored: set[int] = set()  # nodes that cannot be a device of this fleet
        self._twins: dict[int, float] = {}  # node whose number is another's → since when
        self._unfit: dict[int, str] = {}  # node that is here and no device → why
        self._online: set[int] = set()
        self.send_s = 0.0  # how long it took to hand over the last tasks
        self._looked = 0.0  # when
        self._coming = 0  # the round that newcomers are asked about

    def ask(self, number: int) -> Ask:
        """What every message says about the experiment."""
        return Ask(self._text, number, self._scale)

    def gather(self, number: int, least: int, bench: Bench) -> Gathered:
        """Wait until enough devices are there, draw the cohort, learn what each can afford.

        Of those who are there, as many as must reply must be free to be drawn.
        """
        self._coming = number
        until = time.monotonic() + self._terms.patience_s

        def are_enough() -> bool:
            free = len(bench.free(self._nodes(), number))
            return len(self._offers) >= least and free >= min(least, self._terms.min_replies)

        while True:
            self._wait(are_enough, until)
            if not are_enough():
                free = len(bench.free(self._nodes(), number))
                raise NotEnoughDevicesError(
                    f"{len(self._offers)} devices are ready after {self._terms.patience_s:g} s, "
                    f"{len(self._offers) - free} of them benched; at least {least} are needed. "
                    f"Start them with `anycostfl join`, then go on with --resume{self._reasons()}"
                )
            if gathered := self._draw(number, bench):
                return gathered

    def _reasons(self) -> str:
        """Why some that are connected take no part, in their own words or in ours."""
        words = sorted(set(map(one_line, self._unfit.values())))
        return f". {len(self._unfit)} more are here but cannot: {'; '.join(words)}" if words else ""

    def perform(self, tasks: Sequence[Task]) -> list[Answer]:
        """Send each device its task; one answer each, in the same order, by the deadline.

        Whatever a device answers beyond that comes last.
        """
        begin = time.monotonic()
        self._coming += 1
        nodes = self._nodes()
        places, sizes = self._hand_out(tasks, nodes)
        self.send_s = time.monotonic() - begin
        answers, surplus = self._collect(tasks, nodes, places, sizes)
        for task, answer in zip(tasks, answers, strict=True):
            if answer.reply.missing:  # it may still be busy: it counts again when it answers
                self._offers.pop(nodes[task.device], None)
        self._office.forget(n for n, place in places.items() if answers[place].reply.missing)
        return answers + surplus

    def _collect(
        self,
        tasks: Sequence[Task],
        nodes: Mapping[int, int],
        places: Mapping[str, int],
        sizes: Mapping[int, int],
    ) -> tuple[list[Answer], list[Answer]]:
        """One answer to each task by the deadline, and whatever came beyond that."""
        taken = set(places.values())
        answers = {
            place: as_missing(task, "Flower did not take the task", 0)
            for place, task in enumerate(tasks)
            if place not in taken
        }
        surplus: list[Answer] = []

        def take(name: str, message: Message | Corrupt) -> None:
            place = places.get(name)
            if place is None:
                return
            answer = answer_to(tasks[place], message, sizes[place])
            if place in answers and not answers[place].reply.missing:
                surplus.append(answer)
            else:
                answers[place] = answer

        wait_s = self._terms.deadline_s
        until = time.monotonic() + wait_s
        while len(answers) < len(tasks) and time.monotonic() < until:
            self._step(take, until)
            gone = {i for i, task in enumerate(tasks) if nodes[task.device] not in self._online}
            for place in gone - answers.keys():
                answers[place] = as_missing(tasks[place], "the device is gone", sizes[place])
        while self._step(take, 0.0):
            pass  # what has come already, such as second replies
        late = f"no reply within {wait_s:g} s"
        whole = [
            answers.get(place) or as_missing(task, late, sizes[place])
            for place, task in enumerate(tasks)
        ]
        return whole, surplus

    def _hand_out(
        self, tasks: Sequence[Task], nodes: Mapping[int, int]
    ) -> tuple[dict[str, int], dict[int, int]]:
        """Send tasks one by one, the largest first: which message is which task, and its size."""
        places: dict[str, int] = {}
        sizes: dict[int, int] = {}
        stands_s = self._terms.deadline_s + SPARE_S
        lives_s = stands_s + 8 * sum(task.size for task in tasks) / SLOWEST_BPS
        for place in sorted(range(len(tasks)), key=lambda i: -tasks[i].size):
            task = tasks[place]
            node, group = nodes[task.device], str(task.ask.round)
            letter = Message(task.pack(), node, MessageType.TRAIN, ttl=lives_s, group_id=group)
            sizes[place] = wire_bytes(letter)
            places[self._office.send(letter)] = place
        places.pop("", None)
        self._office.watch(list(places), stands_s)  # late replies too, for Flower keeps them
        return places, sizes

    # --- who is there -----------------------------------------------------------------------------

    def _nodes(self) -> dict[int, int]:
        """The node of every device."""
        return {offer.device: node for node, offer in self._offers.items()}

    def _draw(self, number: int, bench: Bench) -> Gathered | None:
        """Choose among those who are ready; nothing if none of the chosen answers."""
        nodes = self._nodes()
        draw = partial(choose, self._config.fleet, seed=self._config.run.seed, round_index=number)
        chosen = draw(bench.free(nodes, number)).tolist()

        def is_fresh(device: int) -> bool:
            offer = self._offers.get(nodes[device])
            return offer is not None and offer.round == number

        self._question([nodes[i] for i in chosen if not is_fresh(i)], number)
        until = time.monotonic() + min(ASK_S, self._terms.deadline_s)
        self._wait(lambda: all(map(is_fresh, chosen)), until)
        index = [i for i in chosen if is_fresh(i)]
        silent = tuple(i for i in chosen if not is_fresh(i))
        for device in silent:
            self._offers.pop(nodes[device], None)
        offers = [self._offers[nodes[i]] for i in index]
        if not offers:
            return None
        holds = {offer.device: offer.holds for offer in offers}
        return Gathered(cohort_of(offers), silent, tuple(draw(nodes).tolist()), holds)

    def _wait(self, done: Callable[[], bool], until: float) -> None:
        """Look after the fleet until something holds, or the time is over."""
        while self._step(lambda *_: None, 0.0):
            pass  # what has come already
        while not done() and time.monotonic() < until:
            self._step(lambda *_: None, until)

    def _step(self, take: Callable[[str, Message | Corrupt], None], until: float) -> bool:
        """Handle the next message, if one comes soon; now and then see who is connected."""
        now = time.monotonic()
        if now - self._looked >= REFRESH_S:
            self._looked = now
            self._refresh(set(self._office.nodes()), now)
        message = self._office.take(min(until - now, REFRESH_S / 4))
        if message is None:
            return False
        if isinstance(message, Corrupt):
            self._shun(message)
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
        self._offers = {node: offer for node, offer in self._offers.items() if node in online}
        self._asked = {
            name: (node, lapses)
            for name, (node, lapses) in self._asked.items()
            if node in online and now < lapses
        }
        asked = {node for node, _ in self._asked.values()}
        self._question(sorted(online - self._offers.keys() - self._ignored - asked), self._coming)

    def _question(self, nodes: Sequence[int], number: int) -> None:
        """Ask nodes who they are and what they can afford in a round."""
        lapses = time.monotonic() + ASK_S
        content, group = self.ask(number).pack(), str(number)
        for node in nodes:
            name = self._office.send(
                Message(content, node, MessageType.QUERY, ttl=ASK_S, group_id=group)
            )
            if name:
                self._asked[name] = (node, lapses)
        self._office.watch([n for n, (_, t) in self._asked.items() if t == lapses], ASK_S)

    def _shun(self, spoilt: Corrupt) -> None:
        """Ask a node no more whose offer cannot be read, until it connects anew."""
        asked = self._asked.pop(spoilt.name, None)
        if asked is not None:
            log(WARNING, "node %s is refused: %s", asked[0], one_line(spoilt.why))
            self._ignored.add(asked[0])
            self._unfit[asked[0]] = spoilt.why

    def _renew(self, message: Message) -> None:
        """A result carries the offer for the next round; without one, the device is asked."""
        node = message.metadata.src_node_id
        before = self._offers.pop(node, None)
        if before is None or message.has_error():
            return
        with suppress(MessageError):
            offer = read_offer(message.content)
            if offer.device == before.device:
                self._offers[node] = offer

    def _welcome(self, node: int, message: Message) -> None:
        """Take an offer, unless it cannot be one of this fleet's."""
        try:
            offer = read_offer(message.content)
            if not 0 <= offer.device < self._config.fleet.devices:
                raise MessageError(f"there is no device {offer.device} in this fleet")
            self._numbers.claim(node, offer.device)
            self._check_free(node, offer.device)
        except NotReadyError as error:
            log(INFO, "node %s waits: %s", node, error)  # it is asked again
            return
        except (MessageError, NumberTakenError) as error:
            log(WARNING, "node %s is refused: %s", node, one_line(str(error)))
            self._ignored.add(node)
            self._unfit[node] = str(error)
            content = pack_refusal(str(error))
            self._office.send(Message(content, node, MessageType.QUERY, ttl=ASK_S))
            return
        if node not in self._offers:
            log(INFO, "device %d is ready", offer.device)
        self._unfit.pop(node, None)
        self._offers[node] = offer

    def _check_free(self, node: int, device: int) -> None:
        """Refuse a number that is another node's, unless that one may have crashed just now."""
        if self._nodes().get(device, node) == node:
            self._twins.pop(node, None)
            return
        now = time.monotonic()
        if now - self._twins.setdefault(node, now) < GONE_S:
            raise NotReadyError(
                f"device {device} is connected as another node, which may have crashed"
            )
        raise MessageError(f"device {device} is connected already")


def cohort_of(offers: Sequence[Offer]) -> Cohort:
    """The devices that made these offers."""
    means = {
        item.name: np.concatenate([getattr(offer.means, item.name) for offer in offers])
        for item in fields(Devices)
    }
    return Cohort(
        np.array([offer.device for offer in offers], np.intp),
        np.array([offer.distance_m for offer in offers]),
        Devices(**means),
    )


def answer_to(task: Task, message: Message | Corrupt, sent_bytes: int) -> Answer:
    """What a reply to a task says, if it can be read."""
    if isinstance(message, Corrupt):
        return Answer(Reply(task.device, wire_bytes_down=sent_bytes, unreadable=message.why))
    if message.has_error() and message.error.code in NOTHING_CAME:
        return as_missing(task, message.error.reason or "no reason given", sent_bytes)
    sizes = Reply(task.device, wire_bytes_down=sent_bytes, wire_bytes_up=wire_bytes(message))
    if message.has_error():
        return Answer(replace(sizes, error=message.error.reason or "no reason given"))
    try:
        result = read_result(message.content)
        if result.offer.device != task.device:
            raise MessageError(f"device {result.offer.device} answers for {task.device}")
    except MessageError as problem:
        return Answer(replace(sizes, unreadable=str(problem)))
    reply = replace(sizes, payload=result.payload, error=result.error)
    return Answer(reply, result.busy_s)


def as_missing(task: Task, why: str, sent_bytes: int) -> Answer:
    """The answer of a device that gave none."""
    return Answer(Reply(task.device, missing=why, wire_bytes_down=sent_bytes))
