"""A Grid without a network: messages go straight to the real ClientApp, one context per device.

The only test module that imports what Flower does not document (tests/test_flower_door.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import TIMESTAMP_HEADER, ErrorCode
from flwr.common.logger import console_handler
from flwr.serverapp import Grid
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.supercore.run import Run
from flwr.superlink.grid import HttpGrid
from flwr.superlink.servicer.runtime.runtime_handlers import confirm_message_received

from anycostfl.flower._internal import set_task
from anycostfl.flower.device import app

__all__ = [
    "FIRST_NODE",
    "FLEET_HTTP_PUBLIC_KEY_HEADER",
    "FLEET_HTTP_SIGNATURE_HEADER",
    "TIMESTAMP_HEADER",
    "ErrorCode",
    "HttpGrid",
    "InMemoryObjectStore",
    "LocalGrid",
    "Run",
    "Tamper",
    "bytes_to_public_key",
    "confirm_message_received",
    "console_handler",
    "get_all_nested_objects",
    "get_object_tree",
    "honest",
    "through_bytes",
    "verify_signature",
]

FIRST_NODE = 2**63 + 11  # node ids are unsigned 64-bit numbers

Tamper = Callable[[int, Message, Message], Message | None]
"""Device, what it was sent, what it replies → what arrives; None if nothing does."""


def honest(_device: int, _sent: Message, reply: Message) -> Message:
    return reply


class LocalGrid(Grid):
    """Devices 0, 1, 2 … as nodes; `tamper` stands between them and the server."""

    def __init__(self, devices: int, tamper: Tamper = honest) -> None:
        set_task(run_id=1, node_id=1, task_id=1)
        self.tamper = tamper
        self.contexts = {
            FIRST_NODE + i: Context(
                run_id=1,
                node_id=FIRST_NODE + i,
                node_config={"partition-id": i},
                state=RecordDict(),
                run_config={},
            )
            for i in range(devices)
        }
        self.online = set(self.contexts)
        self.sent: list[tuple[int, Message]] = []
        self._replies: dict[str, Message | None] = {}
        self._count = itertools.count()

    def set_run(self, run: Run) -> None:
        del run

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *_: object, **__: object) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self.online)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            names.append(f"message-{next(self._count)}")
            message.metadata.__dict__["_message_id"] = names[-1]
            self._replies[names[-1]] = self._deliver(message)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = [name for name in message_ids if self._replies.get(name) is not None]
        return [reply for name in found if (reply := self._replies.pop(name)) is not None]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        del timeout  # replies are there at once, or never
        names = self.push_messages(messages)
        return self.pull_messages(names)

    def _deliver(self, message: Message) -> Message | None:
        context = self.contexts[message.metadata.dst_node_id]
        device = int(context.node_config["partition-id"])
        self.sent.append((device, message))
        try:
            reply = app(through_bytes(message), context)
        except Exception as error:  # as Flower's SuperNode does
            reply = Message(Error(1, str(error)), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = context.node_id
        arrived = self.tamper(device, message, reply)
        return None if arrived is None else through_bytes(arrived)


def through_bytes(message: Message) -> Message:
    """The message as it is read from its bytes on the other side."""
    parts = get_all_nested_objects(message)
    contents = {name: part.deflate() for name, part in parts.items()}
    copy = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(copy, Message)
    copy.metadata.__dict__["_message_id"] = message.metadata.message_id
    return copy
