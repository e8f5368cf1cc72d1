"""Envelopes as the records that Flower carries, and back; messages out, replies in."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from queue import Empty, SimpleQueue
from typing import Any, cast

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from anycostfl.flower._internal import Fetch, ready_replies
from anycostfl.state import State
from anycostfl.wire.envelope import Blob, Envelope, MessageError, blobs_of

POLL_MIN_S, POLL_MAX_S, GROWTH = 0.1, 0.5, 1.1  # between two looks for replies
MOST_FETCHED = 64  # replies that are fetched at once; a device may leave its own half sent


def to_records(envelope: Envelope) -> RecordDict:
    """What Flower carries."""
    tables = {name: ConfigRecord(dict(table)) for name, table in envelope.tables.items()}
    arrays = {
        name: ArrayRecord(
            {
                key: Array(dtype=blob.dtype, shape=blob.shape, stype=blob.kind, data=blob.data)
                for key, blob in blobs.items()
            }
        )
        for name, blobs in envelope.arrays.items()
    }
    return RecordDict({**tables, **arrays})


def to_envelope(records: RecordDict) -> Envelope:
    """What a message holds."""
    tables = {name: dict(table) for name, table in records.config_records.items()}
    arrays = {
        name: {
            key: Blob(array.stype, bytes(array.data), array.dtype, tuple(array.shape))
            for key, array in record.items()
        }
        for name, record in records.array_records.items()
    }
    return Envelope(tables, arrays)


def to_message(envelope: Envelope, node: int, kind: str, group: int, ttl: float | None) -> Message:
    """A message to a node, in the group of a round; Flower drops it after `ttl` seconds."""
    return Message(to_records(envelope), node, kind, ttl=ttl, group_id=str(group))


def read_reply(reply: Message | MessageError) -> Envelope:
    """What a reply holds; MessageError if it cannot be read or is an error itself."""
    if isinstance(reply, MessageError):
        raise reply
    if reply.has_error():
        raise MessageError(reason_of(reply))
    return to_envelope(reply.content)


def reason_of(message: Message) -> str:
    """Why a message is an error."""
    return message.error.reason or "no reason given"


def write_state(records: RecordDict, key: str, state: State | None) -> None:
    """Keep named tensors in a device's context; nothing is kept of an empty state."""
    records.pop(key, None)
    if state:
        records[key] = to_records(Envelope({}, {key: blobs_of(state)}))[key]


def read_state(records: RecordDict, key: str) -> State:
    """Named tensors that `write_state` kept."""
    return to_envelope(records).state(key)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Seconds of a device's transfers; NaN where the transport does not say.

    `download_s` is of the message at hand, `upload_s` of the reply to round `earlier_round`.
    """

    download_s: float = math.nan
    upload_s: float = math.nan
    earlier_round: int | None = None


def write_transfer(records: RecordDict, transfer: Transfer) -> None:
    """Tell the app how long transfers took, in a device's context."""
    known = {item.name: getattr(transfer, item.name) for item in fields(transfer)}
    records["transfer"] = ConfigRecord({k: v for k, v in known.items() if v is not None})


def read_transfer(records: RecordDict) -> Transfer:
    """What `write_transfer` told."""
    return Transfer(**cast(dict[str, Any], dict(records.config_records.get("transfer", {}))))


class ReplyCollector:
    """Sends messages over Flower's Grid and collects replies, in the order in which they arrive.

    Flower's own `send_and_receive` sleeps three seconds between two looks. One thread looks for the
    replies to all messages at once, the less often the longer nothing comes. Fetching a reply whose
    sender died while sending it blocks for minutes, and one that cannot be read takes down all that
    were fetched with it, so each reply is fetched by itself, in a thread of its own.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._inbox: SimpleQueue[tuple[str, Message | MessageError]] = SimpleQueue()
        self._until: dict[str, float] = {}  # when to stop waiting for the reply to a message
        self._fetched: set[str] = set()  # messages whose reply is on its way to here
        self._changed = threading.Condition()  # guards the two above
        self._free = threading.BoundedSemaphore(MOST_FETCHED)
        threading.Thread(target=self._look, daemon=True).start()

    def send(self, messages: Sequence[Message]) -> list[str]:
        """Send messages in one request; the id of each, empty if it was not accepted."""
        names = list(self._grid.push_messages(messages)) if messages else []
        return [names[i] or "" if i < len(names) else "" for i in range(len(messages))]

    def watch(self, ids: Iterable[str], wait_s: float) -> None:
        """Wait for the replies to some messages in the background."""
        with self._changed:
            self._until |= dict.fromkeys(ids, time.monotonic() + wait_s)
            self._changed.notify()

    def take(self, wait_s: float) -> tuple[str, Message | MessageError] | None:
        """The next reply or why it cannot be read, and to which message, if one arrives in time."""
        try:
            return self._inbox.get(timeout=max(wait_s, 0.0))
        except Empty:
            return None

    def _look(self) -> None:
        pause_s = POLL_MIN_S
        while True:
            names = self._awaited()
            try:
                ready = ready_replies(self._grid, names) if names else {}
            except (OSError, httpx.HTTPError):  # the SuperLink is busy or gone: look again
                ready = {}
            with self._changed:
                self._fetched |= ready.keys()
            for name, fetch in ready.items():
                threading.Thread(target=self._fetch, args=(name, fetch), daemon=True).start()
            pause_s = POLL_MIN_S if ready else min(GROWTH * pause_s, POLL_MAX_S)
            with self._changed:
                if self._changed.wait(pause_s):
                    pause_s = POLL_MIN_S

    def _awaited(self) -> list[str]:
        """Messages whose replies are neither here nor on their way."""
        with self._changed:
            now = time.monotonic()
            self._until = {name: until for name, until in self._until.items() if until > now}
            return [name for name in self._until if name not in self._fetched]

    def _fetch(self, name: str, fetch: Fetch) -> None:
        try:
            with self._free:
                replies: Sequence[Message | MessageError] = list(fetch())
        except (OSError, httpx.HTTPError):  # the SuperLink is busy or gone: look again
            replies = []
        except Exception as error:  # whatever a device can make Flower raise
            replies = [MessageError(f"{type(error).__name__}: {error}"[:200])]
        for reply in replies:
            self._inbox.put((name, reply))
        with self._changed:
            self._fetched.discard(name)
            if replies:
                self._until.pop(name, None)
