"""Messages out, replies in: Flower's Grid without its pauses and without waiting for dead devices.

Flower's own `send_and_receive` sleeps three seconds between two looks and waits forever where no
timeout is set. Pulling a reply whose sender died while sending it blocks for minutes, and one that
cannot be read takes down all that were pulled with it. Here, a thread waits for the reply to each
message, and all replies arrive in one queue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from anycostfl.flower._internal import drop_messages

POLL_S = 0.1  # between two looks for a reply
FEW = 16  # messages; of more, each is looked for less often, so that all cost the same


@dataclass(frozen=True, slots=True)
class Corrupt:
    """A reply that cannot be read: to which message, and why."""

    name: str
    why: str


class ReplyCollector:
    """Sends messages and collects replies, in the order in which they arrive."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._inbox: SimpleQueue[Message | Corrupt] = SimpleQueue()

    def nodes(self) -> list[int]:
        """The ids of the nodes that are connected."""
        return list(self._grid.get_node_ids())

    def send(self, message: Message) -> str:
        """Send one message; its id, empty if it was not accepted."""
        return next(iter(self._grid.push_messages([message])), "") or ""

    def watch(self, ids: Sequence[str], wait_s: float) -> None:
        """Wait for the replies to some messages in the background."""
        until = time.monotonic() + wait_s
        pause_s = POLL_S * max(len(ids) / FEW, 1.0)
        for name in ids:
            about = (name, until, pause_s)
            threading.Thread(target=self._watch, args=about, daemon=True).start()

    def forget(self, ids: Iterable[str]) -> None:
        """Drop messages that nobody will fetch any more."""
        drop_messages(self._grid, ids)

    def take(self, wait_s: float) -> Message | Corrupt | None:
        """The next reply, if one arrives in time."""
        try:
            return self._inbox.get(timeout=max(wait_s, 0.0))
        except Empty:
            return None

    def _watch(self, name: str, until: float, pause_s: float) -> None:
        while time.monotonic() < until:
            try:
                replies: Sequence[Message | Corrupt] = list(self._grid.pull_messages([name]))
            except (OSError, httpx.HTTPError):  # the SuperLink is busy or gone: look again
                replies = []
            except Exception as error:  # whatever a device can make Flower raise
                replies = [Corrupt(name, f"{type(error).__name__}: {error}"[:200])]
            for reply in replies:
                self._inbox.put(reply)
            if replies:
                return
            time.sleep(pause_s)
