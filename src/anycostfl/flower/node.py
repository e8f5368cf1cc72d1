"""A device as a node of Flower, in one process: pull a message, answer it, push the reply.

Flower's SuperNode starts a process for every message, which loads torch anew, and looks for work
every three seconds. This one speaks the same protocol with Flower's own client, keeps the app in
memory, and looks often while there is work. It needs no port, and runs only the code that is
installed on the device, never code that a server sends.
"""

from __future__ import annotations

import math
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.logger import log, update_console_handler
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient

from anycostfl.errors import AnycostError, ConfigError
from anycostfl.flower.clock import Signature, date_reply
from anycostfl.flower.device import Setup
from anycostfl.flower.keys import private_key
from anycostfl.flower.messages import DeviceRejectedError

Request = TypeVar("Request")
Answer = TypeVar("Answer")

HEARTBEAT_S = 10.0  # Flower's least; after two missed ones a device counts as gone
REFUSED_S = 45.0  # a device that crashed is refused until it counts as gone
LOOK_MIN_S, LOOK_MAX_S = 0.1, 1.0  # between two looks for work
PAUSE_MAX_S = 10.0  # before trying an unreachable server again
WRONG_SERVER = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")
"""What TLS says of another's certificate, or of a server without any; a line that breaks in the
middle of a greeting is no more than that."""


class RefusedError(AnycostError):
    """The server does not let this device in."""


class UnreachableError(AnycostError):
    """The server has not been there for too long."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is, how to recognise it, and the key to be recognised by.

    Without a certificate to trust, the connection is plaintext and anybody may join. `patience_s`
    is how long to try a server that cannot be reached; 0 is for ever.
    """

    server: str  # host:port
    trust: Path | None
    key: Path | None
    patience_s: float = 0.0


def join(address: Address, app: ClientApp, setup: Setup) -> None:
    """Be a device of the fleet until the process is stopped, or the server says no."""
    watched = sys.stderr.isatty()
    update_console_handler(timestamps=not watched, colored=watched)
    key = private_key(address.key) if address.key else ec.generate_private_key(ec.SECP384R1())
    context = Context(
        run_id=0, node_id=0, node_config=setup.node_config(), state=RecordDict(), run_config={}
    )
    with _client(address, key) as client:
        line = Line(address, client)
        while True:
            node = line.enter(key.public_key())
            log(INFO, "joined %s as node %s", address.server, node.node_id)
            with _heartbeat(client, node):
                try:
                    line.converse(node, app, context)
                finally:
                    with suppress(httpx.HTTPError):
                        client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
            log(WARNING, "the server does not know this device any more; joining again")


def _client(address: Address, key: ec.EllipticCurvePrivateKey) -> FleetHttpClient:
    try:
        return FleetHttpClient.from_server_address(
            address.server,
            insecure=address.trust is None,
            root_certificates=address.trust.read_bytes() if address.trust else None,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                Signature(key),
            ],
        )
    except ssl.SSLError as error:
        raise ConfigError(
            [f"--trust: given {address.trust}, which holds no certificate; allowed the ca.crt of "
             "`anycostfl keys`"]
        ) from error  # fmt: skip


class Line:
    """A device's line to the server, which may be down for a while."""

    def __init__(self, address: Address, client: FleetHttpClient) -> None:
        self._address, self._client = address, client

    def enter(self, key: ec.EllipticCurvePublicKey) -> Node:
        """Become a node; wait for a server that is not there yet."""
        public = public_key_to_bytes(key)
        request = ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT_S)
        if self._address.key is None:
            registration = RegisterNodeFleetRequest(public_key=public)
            with suppress(httpx.HTTPStatusError):  # it may be registered from an earlier time
                self._patient(self._client.RegisterNode)(registration)
        until = math.inf  # counts from the first refusal: the server may not have been there before
        while True:
            try:
                answer = self._patient(self._client.ActivateNode)(request)
                return Node(node_id=answer.node_id)
            except httpx.HTTPStatusError as error:
                until = min(until, time.monotonic() + REFUSED_S)
                if time.monotonic() > until:
                    raise RefusedError(
                        f"{self._address.server} refuses this device ({_why(error)}). Is its "
                        "public key among the server's keys/devices/*.pub, and no other process "
                        "using it?"
                    ) from error
                log(WARNING, "refused by the server (%s), trying again", _why(error))
                time.sleep(2.0)

    def converse(self, node: Node, app: ClientApp, context: Context) -> None:
        """Answer messages until the server forgets this node."""
        context.node_id = node.node_id
        look, pause = self._patient(self._client.PullMessages), LOOK_MIN_S
        while True:
            try:
                found = look(PullMessagesRequest(node=node))
                if not found.messages_list:
                    time.sleep(pause)
                    pause = min(1.2 * pause, LOOK_MAX_S)
                    continue
                pause = LOOK_MIN_S
                message = self._fetch(node, found)
                begin = time.monotonic()
                reply = _answer(app, message, context)
                seconds = time.monotonic() - begin
                date_reply(reply, message, seconds)
                self._send(node, reply, seconds)
            except httpx.HTTPStatusError as error:
                if error.response.status_code == httpx.codes.UNAUTHORIZED:
                    return
                log(WARNING, "the server does not take this: %s", _why(error))
                time.sleep(LOOK_MAX_S)
            except (ObjectPullError, ObjectPushError) as error:
                log(WARNING, "a message was cut short: %s", error)

    def _fetch(self, node: Node, found: PullMessagesResponse) -> Message:
        """The whole of a message."""
        client, tree = self._client, found.message_object_trees[0]
        run_id = found.messages_list[0].metadata.run_id
        message: Message = pull_and_inflate_object_from_tree(
            tree,
            make_pull_object_fn_protobuf(self._patient(client.PullObject), node, run_id),
            make_confirm_message_received_fn_protobuf(
                self._patient(client.ConfirmMessageReceived), node, run_id
            ),
            return_type=Message,
            max_time=60.0,
            initial_backoff=0.1,
        )
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def _send(self, node: Node, reply: Message, seconds: float) -> None:
        """Push a reply and everything in it."""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        client, run_id = self._client, reply.metadata.run_id
        with no_object_id_recompute():
            parts = get_all_nested_objects(reply)
            request = PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
            taken = self._patient(client.PushMessages)(request)
            push = make_push_object_fn_protobuf(
                self._patient(client.PushObject), node, run_id, taken.session_id
            )
            push_objects(parts, push, object_ids_to_push=set(taken.objects_to_push))

    def _patient(self, method: Callable[[Request], Answer]) -> Callable[[Request], Answer]:
        """A method of the client that waits for a server that is away."""
        return lambda request: self._call(partial(method, request))

    def _call(self, request: Callable[[], Answer]) -> Answer:
        """Ask the server until it can be reached; a certificate that does not fit is final."""
        pause, begin, told = 0.5, time.monotonic(), ""
        while True:
            try:
                return request()
            except httpx.TransportError as error:
                if any(word in str(error) for word in WRONG_SERVER):
                    raise RefusedError(
                        f"the server is not who it should be: {error}. Give the ca.crt that its "
                        "certificate was made with, and an address that the certificate names"
                    ) from error
                gone_s, patience_s = time.monotonic() - begin, self._address.patience_s
                if patience_s and gone_s + pause > patience_s:
                    raise UnreachableError(
                        f"{self._address.server} cannot be reached: {error}"
                    ) from error
                if str(error) != told:  # once: it may be away for days
                    log(WARNING, "the server cannot be reached (%s), trying again", error)
                    told = str(error)
                time.sleep(pause)
                pause = min(2 * pause, PAUSE_MAX_S)


@contextmanager
def _heartbeat(client: FleetHttpClient, node: Node) -> Iterator[None]:
    """Tell the server now and then that the device is alive."""
    stop = threading.Event()
    request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_S)

    def beat() -> None:
        while not stop.wait(0.7 * HEARTBEAT_S):
            with suppress(httpx.HTTPError):
                client.SendNodeHeartbeat(request)

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        stop.set()


def _answer(app: ClientApp, message: Message, context: Context) -> Message:
    """What the app answers; what goes wrong in it is an answer too, unless the server says go."""
    about = message.metadata
    TaskIdentity.run_id, TaskIdentity.node_id = about.run_id, context.node_id
    TaskIdentity.task_id = about.dst_task_id or 0
    context.run_id = about.run_id
    log(INFO, "round %s: %s", about.group_id, about.message_type)
    try:
        return app(message, context)
    except DeviceRejectedError:
        raise
    except Exception as error:  # a device outlives whatever a message does to it
        log(ERROR, "the message cannot be answered: %s", error)
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)


def _why(error: httpx.HTTPStatusError) -> str:
    return f"{error.response.status_code} {error.response.text[:200]}".strip()
