"""Messages out, replies in: Flower's Grid without its pauses and without waiting for the dead.

Flower's own `send_and_receive` sleeps three seconds between looks and waits for ever where no time
is set. Pulling a reply whose sender died while sending it blocks for minutes, and one that cannot
be read takes all that were pulled with it. Here, a thread watches for the reply to each message,
and whatever comes lands in one inbox.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

import httpx
from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.superlink.grid import HttpGrid, http_grid

LOOK_S = 0.1  # between two looks for a reply
FEW = 16  # messages; of more, each is looked for less often, so that all cost the same


def quicken() -> None:
    """Look soon again for a part of a reply that is on its way; Flower waits a second first."""
    vars(http_grid)["pull_objects"] = partial(pull_objects, initial_backoff=0.05)


@dataclass(frozen=True, slots=True)
class Spoilt:
    """A reply that cannot be read: to which message, and why."""

    name: str
    why: str


class PostOffice:
    """Posts messages and collects replies, in the order in which they come."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._inbox: SimpleQueue[Message | Spoilt] = SimpleQueue()

    def nodes(self) -> list[int]:
        """Who is connected."""
        return list(self._grid.get_node_ids())

    def send(self, message: Message) -> str:
        """Send one message; its id, empty if it was not taken."""
        return next(iter(self._grid.push_messages([message])), "") or ""

    def watch(self, ids: Sequence[str], wait_s: float) -> None:
        """Look out for the replies to some messages."""
        until = time.monotonic() + wait_s
        pause_s = LOOK_S * max(len(ids) / FEW, 1.0)
        for name in ids:
            about = (name, until, pause_s)
            threading.Thread(target=self._watch, args=about, daemon=True).start()

    def forget(self, ids: Iterable[str]) -> None:
        """Have the SuperLink drop messages that nobody will fetch any more.

        When a message lapses, Flower forgets it but keeps what it holds, until the run ends.
        """
        grid = self._grid
        if not isinstance(grid, HttpGrid):
            return
        for name in ids:
            request = ConfirmMessageReceivedRequest(
                node=grid.node, run_id=grid.run.run_id, message_object_id=name
            )
            with suppress(OSError, httpx.HTTPError):
                grid._runtime_client.ConfirmMessageReceived(request)

    def take(self, wait_s: float) -> Message | Spoilt | None:
        """The next reply, if one comes in time."""
        try:
            return self._inbox.get(timeout=max(wait_s, 0.0))
        except Empty:
            return None

    def _watch(self, name: str, until: float, pause_s: float) -> None:
        while time.monotonic() < until:
            try:
                replies: Sequence[Message | Spoilt] = list(self._grid.pull_messages([name]))
            except (OSError, httpx.HTTPError):  # the SuperLink is busy or gone: look again
                replies = []
            except Exception as error:
                replies = [Spoilt(name, f"{type(error).__name__}: {error}"[:200])]
            for reply in replies:
                self._inbox.put(reply)
            if replies:
                return
            time.sleep(pause_s)
