"""The one door to what Flower does not document.

Flower documents `flwr.app`, `flwr.clientapp`, `flwr.serverapp`, `flwr.simulation` and its programs.
Whatever else this package uses is listed in `NEEDS`, touched in this file only, and looked up when
it is first needed: importing the SuperLink alone takes a board several seconds. Where the installed
version lacks it, `available` says so once and the caller takes the documented path.
"""

from __future__ import annotations

import hashlib
import logging
import ssl
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from enum import IntEnum
from functools import cache, partial
from importlib import import_module, resources
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
from flwr.app import Message, UserConfig
from flwr.serverapp import Grid

from anycostfl.errors import AnycostError, ConfigError
from anycostfl.files import memory_bytes
from anycostfl.flower.keys import public_key

NEEDS: Mapping[str, tuple[str, ...]] = {
    # `join` in one process. Flower's SuperNode starts a process for every message, which loads
    # torch again, and runs whatever app the server sends.
    "node": (
        "flwr.supernode.fleet_http_client:FleetHttpClient",
        "flwr.supercore.interceptors.http.runtime_version:RuntimeVersionHttpInterceptor",
        "flwr.proto.fleet_pb2",
        "flwr.proto.heartbeat_pb2:SendNodeHeartbeatRequest",
        "flwr.proto.node_pb2:Node",
        "flwr.common.serde:message_to_proto",
        "flwr.app.message:remove_content_from_message",
        "flwr.supercore.inflatable.inflatable_object",
        "flwr.supercore.inflatable.inflatable_protobuf_utils",
        "flwr.supercore.inflatable.inflatable_utils",
        "flwr.supercore.task_identity:TaskIdentity",  # a reply takes its sender's ids from here
        "flwr.common.constant:TIMESTAMP_HEADER",
        "flwr.supercore.constant:FLEET_HTTP_PUBLIC_KEY_HEADER",
        "flwr.supercore.constant:FLEET_HTTP_SIGNATURE_HEADER",
    ),
    # Registering keys and starting runs; the `flwr` program takes a process of seconds for each.
    "control": (
        "flwr.supercore.control:ControlHttpClient",
        "flwr.supercore.interceptors.http.runtime_version:RuntimeVersionHttpInterceptor",
        "flwr.proto.control_pb2",
        "flwr.cli.build:build_fab_from_files",
        "flwr.supercore.fab:Fab",
        "flwr.common.serde:fab_to_proto",
        "flwr.common.serde:user_config_to_proto",
    ),
    # The filter in front of Control and Runtime: it works only if uvicorn serves all of the
    # SuperLink. Versions that have the constant open a gRPC port only when asked to.
    "filter": (
        "flwr.superlink.cli.flower_superlink:uvicorn",
        "flwr.common.constant:FLWR_INTERNAL_GRPC_FLEET_API",
        "uvicorn.protocols.http.h11_impl:H11Protocol",
    ),
    # Fetching replies without Flower's pauses, and dropping those that nobody will fetch.
    "collector": (
        "flwr.superlink.grid:http_grid",
        "flwr.superlink.grid:HttpGrid",
        "flwr.supercore.inflatable.inflatable_utils:pull_objects",
        "flwr.proto.message_pb2:ConfirmMessageReceivedRequest",
        "flwr.proto.runtime_pb2:PullAppMessagesRequest",
    ),
    # The bytes of a message as it is sent; its records tell only those of the arrays.
    "sizes": ("flwr.supercore.inflatable.inflatable_object:get_all_nested_objects",),
    # Time stamps in the console output of `join`.
    "console": ("flwr.common.logger:update_console_handler",),
}

log = logging.getLogger("flwr").log  # Flower's own logger, which its processes show


ANSWER_BYTES = 32 << 20  # Flower sends messages in parts of 5 MiB
MESSAGE_BYTES = memory_bytes() // 2
CONNECTIONS = 2  # of a device: Flower fetches parts of a message by ten at once, a handshake each
PULL_S = 300.0  # until all parts of a message are there; the sender may be busy with others'
KEEP_S = 25.0  # for the next request: a handshake costs more than many requests
TIMEOUT_S = 30.0  # of a request, as Flower has it


class TransferError(AnycostError):
    """A message that did not arrive whole."""


class ErrorCode(IntEnum):
    """Why there is no reply, as Flower numbers it on the wire."""

    CLIENT_APP_RAISED_EXCEPTION = 2
    MESSAGE_UNAVAILABLE = 3
    REPLY_MESSAGE_UNAVAILABLE = 4
    NODE_UNAVAILABLE = 5


# --- what is available ----------------------------------------------------------------------------


@cache
def _use(capability: str) -> Any:
    """Everything that a capability needs."""
    found = SimpleNamespace()
    for name in NEEDS[capability]:
        module, _, attribute = name.partition(":")
        try:
            value = import_module(module)
            value = getattr(value, attribute) if attribute else value
        except (ImportError, AttributeError) as error:
            raise AnycostError(
                f"Flower {version('flwr')} does not offer what the {capability} of anycostfl needs "
                f"({error})"
            ) from error
        setattr(found, attribute or module.rpartition(".")[2], value)
    return found


@cache
def available(capability: str, otherwise: str) -> bool:
    """Whether Flower has what a capability needs; warns once about what is done otherwise."""
    try:
        _use(capability)
    except AnycostError as error:
        log(logging.WARNING, "%s: %s", error, otherwise)
        return False
    return True


# --- devices --------------------------------------------------------------------------------------


def _tls(trust: bytes) -> ssl.SSLContext:
    """What recognises a server by a certificate, and nothing else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=trust.decode("ascii"))
    return context


Retry = Callable[[Callable[[], Any]], Any]
"""Makes a request, again while the server cannot be reached."""


class BoundedAnswers(httpx.BaseTransport):
    """Plain HTTP, with a limit on one answer and on all answers that make up a message."""

    def __init__(self, verify: ssl.SSLContext | bool) -> None:
        limits = httpx.Limits(max_connections=CONNECTIONS, keepalive_expiry=KEEP_S)
        self._inner = httpx.HTTPTransport(verify=verify, limits=limits)
        self.message = 0  # bytes of answers since the last message began

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """The answer to a request, read only as far as the limits go."""
        request.headers["accept-encoding"] = "identity"  # a few packed bytes may be gigabytes
        answer = self._inner.handle_request(request)
        if answer.headers.get("content-encoding", "identity") != "identity":
            answer.close()
            raise httpx.RemoteProtocolError("the server packs its answer, which was not asked for")
        return httpx.Response(
            answer.status_code,
            headers=answer.headers,
            stream=_Counted(cast(httpx.SyncByteStream, answer.stream), self),
            extensions=answer.extensions,
        )

    def close(self) -> None:
        """Close all connections."""
        self._inner.close()


class _Counted(httpx.SyncByteStream):
    def __init__(self, parts: httpx.SyncByteStream, counter: BoundedAnswers) -> None:
        self._parts, self._counter = parts, counter

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for part in self._parts:
            size += len(part)
            self._counter.message += len(part)
            if size > ANSWER_BYTES:
                raise httpx.RemoteProtocolError(f"an answer of more than {ANSWER_BYTES} bytes")
            if self._counter.message > MESSAGE_BYTES:
                raise TransferError(f"it has more than {MESSAGE_BYTES} bytes")
            yield part

    def close(self) -> None:
        self._parts.close()


class FleetClient:
    """The Fleet interface of a SuperLink, as one device uses it."""

    def __init__(self, server: str, trust: bytes | None, signer: object, retry: Retry) -> None:
        flower = self._flower = _use("node")
        kind = flower.RuntimeVersionHttpInterceptor(component_name="SuperNode")
        self._client = flower.FleetHttpClient.from_server_address(
            server, insecure=trust is None, root_certificates=trust, interceptors=[kind, signer]
        )
        # Flower's own client follows redirects and reads answers of any length into memory.
        self._answers = BoundedAnswers(_tls(trust) if trust else False)
        self._client._client.close()
        self._client._client = httpx.Client(transport=self._answers, timeout=TIMEOUT_S)
        self._retry = retry

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def register(self, public_key: bytes) -> None:
        """Ask a server without a list of keys to take this one."""
        request = self._flower.fleet_pb2.RegisterNodeFleetRequest(public_key=public_key)
        self._retried("RegisterNode")(request)

    def activate(self, public_key: bytes, heartbeat_s: float) -> int:
        """Come online; the node id."""
        request = self._flower.fleet_pb2.ActivateNodeRequest(
            public_key=public_key, heartbeat_interval=heartbeat_s
        )
        return int(self._retried("ActivateNode")(request).node_id)

    def deactivate(self, node_id: int) -> None:
        """Go offline."""
        self._client.DeactivateNode(self._flower.fleet_pb2.DeactivateNodeRequest(node_id=node_id))

    def send_heartbeat(self, node_id: int, heartbeat_s: float) -> None:
        """Stay online for another interval or two."""
        node, request = self._flower.Node(node_id=node_id), self._flower.SendNodeHeartbeatRequest
        self._client.SendNodeHeartbeat(request(node=node, heartbeat_interval=heartbeat_s))

    def pull(self, node_id: int) -> Message | None:
        """The next message for this node, if there is one."""
        self._answers.message = 0
        flower, node = self._flower, self._flower.Node(node_id=node_id)
        request = flower.fleet_pb2.PullMessagesRequest(node=node)
        found = self._retried("PullMessages")(request)
        if not found.messages_list:
            return None
        tree, run_id = found.message_object_trees[0], found.messages_list[0].metadata.run_id
        make, about = flower.inflatable_protobuf_utils, (node, run_id)
        confirm = self._retried("ConfirmMessageReceived")
        try:
            message = flower.inflatable_utils.pull_and_inflate_object_from_tree(
                tree,
                make.make_pull_object_fn_protobuf(self._retried("PullObject"), *about),
                make.make_confirm_message_received_fn_protobuf(confirm, *about),
                return_type=Message,
                max_time=PULL_S,
                initial_backoff=0.1,
            )
        except flower.inflatable_utils.ObjectPullError as error:
            raise TransferError(str(error)) from error
        message.metadata.__dict__["_message_id"] = tree.object_id
        return cast(Message, message)

    def push(self, node_id: int, reply: Message, seconds: float) -> None:
        """Send a reply that took so long to make."""
        flower, node = self._flower, self._flower.Node(node_id=node_id)
        objects, run_id = flower.inflatable_object, reply.metadata.run_id
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with objects.no_object_id_recompute():
            request = flower.fleet_pb2.PushMessagesRequest(
                node=node,
                messages_list=[flower.message_to_proto(flower.remove_content_from_message(reply))],
                message_object_trees=[objects.get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
            taken = self._retried("PushMessages")(request)
            push = flower.inflatable_protobuf_utils.make_push_object_fn_protobuf(
                self._retried("PushObject"), node, run_id, taken.session_id
            )
            parts, wanted = objects.get_all_nested_objects(reply), set(taken.objects_to_push)
            try:
                flower.inflatable_utils.push_objects(parts, push, object_ids_to_push=wanted)
            except flower.inflatable_utils.ObjectPushError as error:
                raise TransferError(str(error)) from error

    def _retried(self, name: str) -> Callable[[Any], Any]:
        method = getattr(self._client, name)
        return lambda request: self._retry(partial(method, request))


def sign_headers(request: httpx.Request, public: str, when: str, signature: str) -> None:
    """Put a device's signature where the SuperLink looks for it."""
    flower = _use("node")
    request.headers[flower.FLEET_HTTP_PUBLIC_KEY_HEADER] = public
    request.headers[flower.TIMESTAMP_HEADER] = when
    request.headers[flower.FLEET_HTTP_SIGNATURE_HEADER] = signature


def date_reply(reply: Message, message: Message, seconds: float) -> None:
    """Date a reply by its message and the seconds it took: by the clock of the server."""
    asked = message.metadata
    reply.metadata.__dict__["_created_at"] = asked.created_at + seconds
    reply.metadata.__dict__["_ttl"] = max(asked.ttl - seconds, 1e-3)


def set_task(run_id: int, node_id: int, task_id: int) -> None:
    """Say whose replies this process makes from now on."""
    identity = _use("node").TaskIdentity
    identity.run_id, identity.node_id, identity.task_id = run_id, node_id, task_id


def format_console() -> None:
    """Have Flower's logger write colours to a terminal, and times elsewhere."""
    if available("console", "log lines have no time"):
        watched = sys.stderr.isatty()
        _use("console").update_console_handler(timestamps=not watched, colored=watched)


# --- server ---------------------------------------------------------------------------------------


class ControlClient:
    """The Control interface of a SuperLink: registers devices, starts runs."""

    def __init__(self, address: str, trust: bytes | None) -> None:
        self._flower = _use("control")
        component = self._flower.RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        self._client = self._flower.ControlHttpClient.from_server_address(
            address, insecure=trust is None, root_certificates=trust, interceptors=[component]
        )

    def register(self, name: str, path: Path) -> int:
        """Let in the device with this public key; its node id."""
        request = self._flower.control_pb2.RegisterNodeRequest(
            public_key=public_key(path), name=name
        )
        try:
            return int(self._client.RegisterNode(request).node_id)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.PRECONDITION_FAILED:
                raise
            raise ConfigError(
                [f"{path} is refused: Flower registers a key once, under one name, as long as it "
                 "runs. Make a new one with `anycostfl keys`, or start the server again"]
            ) from error  # fmt: skip

    def unregister(self, node_id: int) -> None:
        """Put a device out."""
        self._client.UnregisterNode(self._flower.control_pb2.UnregisterNodeRequest(node_id=node_id))

    def start_run(self, config: UserConfig) -> int:
        """Start the server app; Flower's number of the run."""
        manifest = resources.files("anycostfl.flower").joinpath("app", "pyproject.toml")
        content, _ = self._flower.build_fab_from_files({"pyproject.toml": manifest.read_bytes()})
        fab = self._flower.Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = self._flower.control_pb2.StartRunRequest(
            fab=self._flower.fab_to_proto(fab),
            override_config=self._flower.user_config_to_proto(config),
        )
        return int(self._client.StartRun(request).run_id)

    def close(self) -> None:
        """Close the connection."""
        with suppress(httpx.HTTPError):
            self._client.close()


def uvicorn_classes() -> tuple[type[Any], type[Any]]:
    """The settings of the server that Flower runs the SuperLink in, and its connections.

    Patching the constructor of the settings reaches every server that Flower starts.
    """
    flower = _use("filter")
    return flower.uvicorn.Config, flower.H11Protocol


def reduce_polling() -> None:
    """Look soon again for a part of a reply that is on its way; Flower waits a second first."""
    if available("collector", "replies are fetched as often as Flower looks for them"):
        flower = _use("collector")
        vars(flower.http_grid)["pull_objects"] = partial(flower.pull_objects, initial_backoff=0.05)


Fetch = Callable[[], Iterable[Message]]
"""Fetches a reply; nothing if there is none yet."""


class _Known:
    """A connection to the SuperLink that knows the answer to a question already."""

    def __init__(self, connection: Any, answer: Any) -> None:
        self._connection, self._answer = connection, answer

    def PullMessages(self, _request: Any) -> Any:  # noqa: N802 - Flower's name
        return self._answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def ready_replies(grid: Grid, ids: Sequence[str]) -> Mapping[str, Fetch]:
    """To which messages replies have come, and how to fetch each; of some Grids, only how to try.

    One request for all; the parts of a reply may still be on their way.
    """
    if not available("collector", "every reply is looked for by itself"):
        return {name: partial(grid.pull_messages, [name]) for name in ids}
    flower = _use("collector")
    if not isinstance(grid, flower.HttpGrid):
        return {name: partial(grid.pull_messages, [name]) for name in ids}
    connection = cast(Any, grid)._runtime_client
    found = connection.PullMessages(flower.PullAppMessagesRequest(message_ids=ids))
    ready: dict[str, Fetch] = {}
    for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
        one = type(found)(messages_list=[message], message_object_trees=[tree])
        view = copy(cast(Any, grid))  # Flower's code, for this reply alone
        view._client = _Known(connection, one)
        ready[message.metadata.reply_to_message_id] = partial(view.pull_messages, [])
    return ready


def drop_messages(grid: Grid, ids: Iterable[str]) -> None:
    """Have the SuperLink drop messages that nobody will fetch any more.

    When a message expires, Flower forgets it but keeps its content until the run ends.
    """
    if not available("collector", "what nobody fetches stays in memory until the run ends"):
        return
    flower, connection = _use("collector"), cast(Any, grid)
    for name in ids if isinstance(grid, flower.HttpGrid) else ():
        request = flower.ConfirmMessageReceivedRequest(
            node=connection.node, run_id=connection.run.run_id, message_object_id=name
        )
        with suppress(OSError, httpx.HTTPError):
            connection._runtime_client.ConfirmMessageReceived(request)


def message_bytes(message: Message) -> int:
    """Bytes of a message on the wire, without the overhead of HTTP."""
    if available("sizes", "bytes on the wire are those of the arrays alone"):
        parts = _use("sizes").get_all_nested_objects(message)
        return sum(len(part.deflate()) for part in parts.values())
    records = message.content.array_records.values() if message.has_content() else ()
    return sum(len(array.data) for record in records for array in record.values())
