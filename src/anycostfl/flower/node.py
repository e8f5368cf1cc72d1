"""A device as a node of Flower, in one process: pull a message, answer it, push the reply.

Flower's SuperNode starts a process for every message, which loads torch again, and looks for work
every three seconds. This one speaks the same protocol, keeps the app in memory, and polls often
while there is work. It needs no port, and runs only the code that is installed on the device, never
code that a server sends. Where the installed Flower does not fit, `flower-supernode` runs instead.
"""

from __future__ import annotations

import json
import math
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from anycostfl.errors import AnycostError, ConfigError, printable
from anycostfl.flower import _internal
from anycostfl.flower._internal import ErrorCode, FleetClient, TransferError, log
from anycostfl.flower.device import Setup
from anycostfl.flower.keys import private_key, public_pem
from anycostfl.flower.messages import Transfer, write_transfer
from anycostfl.flower.superlink import is_local
from anycostfl.processes import program, safe_environment
from anycostfl.wire.messages import DeviceRejectedError

HEARTBEAT_S = 10.0  # Flower's minimum; after two missed ones a device counts as gone
REFUSED_S = 45.0  # a device that crashed is refused until it counts as gone
LEAST_S = 2.0  # a smaller difference between two clocks is not worth signing again
STALE_S = 1.5  # how old the time in a response may be: uvicorn looks at its clock once a second
AHEAD = timedelta(days=1)  # that a server's clock is followed into the future
FAR_AHEAD = "the server's clock says %s, more than %s ahead; set the clock of this device"
SIGNED = 4  # times at most, one request
POLL_MIN_S, POLL_MAX_S = 0.1, 1.0  # between two looks for work
POLL_IDLE_S, GROWTH = 10.0, 1.4  # shorter than connections are kept
IDLE_SHARE, BUSY_SHARE = 0.05, 0.05  # of the time without work; of the time that a server is asked
RETRY_S = 2.0  # before trying again a server that refuses
PAUSE_MAX_S = 10.0  # before trying an unreachable server again
STOP_S, GIVE_UP_S = 10.0, 180.0  # of a SuperNode: to stop, and to keep starting it again
WRONG_SERVER = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")
"""TLS errors of a server with a foreign certificate, or with none. Other errors in a handshake are
those of a connection that broke."""
WRONG_TIME = ("certificate has expired", "certificate is not yet valid")
INSTEAD = (
    "`flower-supernode` runs this device. It is slower, and it runs the app that the server sends: "
    "join only servers that you trust"
)


class RefusedError(AnycostError):
    """The server does not let this device in."""


class UnreachableError(AnycostError):
    """The server could not be reached for too long."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is, how to recognise it, and the key to be recognised by."""

    server: str  # host:port
    trust: Path | None  # its certificate; without one, plaintext, and anybody may join
    key: Path | None
    patience_s: float = 0.0  # how long to try a server that cannot be reached; 0 is forever


def join(address: Address, app: ClientApp, setup: Setup) -> None:
    """Be a device of the fleet until the process is stopped, or the server refuses it."""
    _internal.format_console()
    if not _internal.available("node", INSTEAD):
        run_supernode(address, setup)
        return
    key = private_key(address.key) if address.key else ec.generate_private_key(ec.SECP384R1())
    context = Context(
        run_id=0, node_id=0, node_config=setup.node_config(), state=RecordDict(), run_config={}
    )
    with closing(open_client(address, key)) as client:
        while True:
            context.node_id = enter(address, client, public_pem(key.public_key()))
            log(INFO, "joined %s as node %s", address.server, context.node_id)
            with _online(client, context.node_id):
                answer_messages(client, app, context)
            log(WARNING, "the server does not know this device any more; joining again")


def open_client(address: Address, key: ec.EllipticCurvePrivateKey) -> FleetClient:
    """A client that retries while the server is unreachable."""
    trust = address.trust.read_bytes() if address.trust else None
    try:
        return FleetClient(address.server, trust, Signature(key), partial(patiently, address))
    except ssl.SSLError as error:
        problem = f"--trust: given {address.trust}, which holds no certificate"
        raise ConfigError([f"{problem}; must be the ca.crt of `anycostfl keys`"]) from error


def patiently(address: Address, request: Callable[[], Any]) -> Any:
    """What a request returns, repeated until the server can be reached.

    A certificate that does not fit is final.
    """
    pause_s, begin, told = 0.5, time.monotonic(), ""
    while True:
        try:
            return request()
        except httpx.TransportError as error:
            if any(word in str(error) for word in WRONG_TIME):
                raise RefusedError(
                    f"the server's certificate is not valid today: {error}. Its owner renews it "
                    "with `anycostfl keys`; is the clock of this device right?"
                ) from error
            if any(word in str(error) for word in WRONG_SERVER):
                raise RefusedError(
                    f"the server is not the expected one: {error}. Give the ca.crt that its "
                    "certificate was made with, and an address that the certificate names"
                ) from error
            if 0 < address.patience_s < time.monotonic() + pause_s - begin:
                raise UnreachableError(f"{address.server} cannot be reached: {error}") from error
            if str(error) != told:  # once: it may be away for days
                log(WARNING, "the server cannot be reached (%s), trying again", error)
                told = str(error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)


def enter(address: Address, client: FleetClient, public_key: bytes) -> int:
    """Become a node; wait for a server that is not there yet."""
    if address.key is None:
        with suppress(httpx.HTTPStatusError):  # it may still be registered
            client.register(public_key)
    pause_s = RETRY_S
    until = math.inf  # counts from the first refusal: the server may not have been there before
    while True:
        try:
            return client.activate(public_key, HEARTBEAT_S)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.SERVICE_UNAVAILABLE:  # it is not ready
                until = min(until, time.monotonic() + REFUSED_S)
            if time.monotonic() > until:
                raise RefusedError(
                    f"{address.server} refuses this device ({_why(error)}). Is its public key "
                    "among the server's keys/devices/*.pub, and no other process using it?"
                ) from error
            log(WARNING, "refused by the server (%s), trying again", _why(error))
            time.sleep(pause_s)  # it may have many keys to register, and as many devices that try
            pause_s = min(1.5 * pause_s, PAUSE_MAX_S)


@contextmanager
def _online(client: FleetClient, node_id: int) -> Iterator[None]:
    """Tell the server now and then that the device is alive, and at the end that it leaves."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.7 * HEARTBEAT_S):
            with suppress(httpx.HTTPError):
                client.send_heartbeat(node_id, HEARTBEAT_S)

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        stop.set()
        with suppress(httpx.HTTPError):
            client.deactivate(node_id)


class Pace:
    """How long a device waits between two looks for work.

    Longer the longer nothing came, so that a device that is seldom drawn does not ask every second
    for hours; and longer the longer the server took to answer, so that a thousand devices leave it
    time for its work.
    """

    def __init__(self) -> None:
        self._pause_s, self._latest = POLL_MAX_S, time.monotonic()

    def hurry(self) -> None:
        """There was work, and there may be more soon."""
        self._pause_s, self._latest = POLL_MIN_S, time.monotonic()

    def rest(self, took_s: float) -> float:
        """Seconds to wait after an answer without work, which took so long."""
        idle_s = time.monotonic() - self._latest
        pause_s = max(self._pause_s, took_s / BUSY_SHARE)
        self._pause_s = min(GROWTH * self._pause_s, max(POLL_MAX_S, IDLE_SHARE * idle_s))
        return min(pause_s, POLL_IDLE_S)


def answer_messages(client: FleetClient, app: ClientApp, context: Context) -> None:
    """Answer messages until the server forgets this node."""
    pace, transfer = Pace(), Transfer()
    while True:
        try:
            begin = time.monotonic()
            message = client.pull(context.node_id)
            if message is None:
                time.sleep(pace.rest(time.monotonic() - begin))
                continue
            pace.hurry()
            came = time.monotonic()
            write_transfer(context.state, replace(transfer, download_s=came - begin))
            reply = answer(app, message, context)
            ready = time.monotonic()
            _internal.date_reply(reply, message, ready - came)
            client.push(context.node_id, reply, ready - came)
            if message.metadata.message_type == MessageType.TRAIN:
                number = int(message.metadata.group_id)
                transfer = Transfer(upload_s=time.monotonic() - ready, earlier_round=number)
            del message, reply  # megabytes that would be held until the next ones have come
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.UNAUTHORIZED:
                return
            log(WARNING, "the server does not accept this: %s", _why(error))
            time.sleep(POLL_MAX_S)
        except TransferError as error:
            log(WARNING, "a message was cut short: %s", error)
            time.sleep(POLL_MAX_S)


def answer(app: ClientApp, message: Message, context: Context) -> Message:
    """The app's reply; an error in it is a reply too, unless the server sends the device away."""
    about = message.metadata
    _internal.set_task(about.run_id, context.node_id, getattr(about, "dst_task_id", None) or 0)
    context.run_id = about.run_id
    log(INFO, "round %s: %s", about.group_id, about.message_type)
    try:
        return app(message, context)
    except DeviceRejectedError:
        raise
    except Exception as error:  # a device outlives whatever a message does to it
        log(ERROR, "the message cannot be answered: %s", printable(str(error)[:1000]))
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)


def _why(error: httpx.HTTPStatusError) -> str:
    return printable(f"{error.response.status_code} {error.response.text[:200]}".strip())


# --- wrong clocks ---------------------------------------------------------------------------------


class Signature:
    """Signs every request of a device, by the server's clock.

    A device may be a board without a battery for its clock, or one whose clock has just jumped.
    Flower's server accepts a request only if it was signed with a time within five minutes of its
    own. A refusal carries the server's time, and a device whose clock differs signs again, but
    never for a time more than a day ahead of its own clock: such a signature could be used then.
    The server's time may be a second old, so a refusal just after the server's own clock was set
    proves nothing yet, and the request is repeated a moment later.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self._public = b64encode(public_pem(key.public_key())).decode("ascii")
        self._told = False  # that the server's clock is too far ahead to be followed
        self._behind = timedelta()  # this machine's clock, relative to the server's

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        """Send a request signed; again while it is refused and the clock may be the reason."""
        waited = False
        for _ in range(SIGNED):
            believed = self._sign(context.request)
            response = call_next(context)
            if response.status_code != httpx.codes.UNAUTHORIZED:
                break
            if not self._learn(response, believed):
                if waited:
                    break
                time.sleep(STALE_S)
                waited = True
        return response

    def _sign(self, request: httpx.Request) -> timedelta:
        """Sign a request; how far behind this machine's clock was assumed to be."""
        believed = self._behind
        when = (datetime.now(UTC) + believed).isoformat()
        signature = self._key.sign(when.encode("ascii"), ec.ECDSA(hashes.SHA256()))
        _internal.sign_headers(request, self._public, when, b64encode(signature).decode("ascii"))
        return believed

    def _learn(self, response: httpx.Response, believed: timedelta) -> bool:
        """Adopt the time in a response; whether the request was signed by another one.

        Another thread may have learned it in the meantime, so what counts is what was signed.
        """
        try:
            there = parsedate_to_datetime(response.headers["date"])
            behind = there - datetime.now(UTC)
        except (KeyError, ValueError, TypeError, OverflowError):
            return False
        if behind > AHEAD:
            if not self._told:
                log(WARNING, FAR_AHEAD, there, AHEAD)
            self._told = True
            return False
        self._behind = behind
        return abs((behind - believed).total_seconds()) > LEAST_S


# --- where the installed Flower does not fit ------------------------------------------------------


def run_supernode(address: Address, setup: Setup) -> None:
    """Run Flower's documented SuperNode, with the app that is installed on both sides."""
    host = address.server.rpartition(":")[0].strip("[]")
    if address.trust is None and host != "localhost" and not is_local([host], None):
        problem = f"{INSTEAD}. Without TLS anybody on the way could send one"
        raise ConfigError([f"--insecure: {problem}; give --key and --trust"])
    since = math.inf  # it ends soon after it began
    while True:  # it ends when it is refused, which a key may be until the server has registered it
        begin = time.monotonic()
        code = _run_to_end(supernode_command(address, setup))
        now = time.monotonic()
        since = now if now - begin > GIVE_UP_S else min(since, now)
        if now - since >= GIVE_UP_S:
            raise RefusedError(f"flower-supernode keeps ending, last with exit code {code}")
        log(WARNING, "flower-supernode ended with exit code %d, starting it again", code)
        time.sleep(2.0)


def _run_to_end(command: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="anycostfl-") as home:
        environment = safe_environment(Path(home))
        process = subprocess.Popen(command, env=environment)  # noqa: S603 - Flower's program
        try:
            return process.wait()
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()


def supernode_command(address: Address, setup: Setup) -> list[str]:
    """The command line of a SuperNode that is this device."""
    table = " ".join(f"{name}={json.dumps(value)}" for name, value in setup.node_config().items())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]  # its processes talk to each other there
    command = [program("flower-supernode"), "--superlink", address.server, "--node-config", table]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--root-certificates", str(address.trust)] if address.trust else ["--insecure"]
    if address.key:
        command += ["--auth-supernode-private-key", str(address.key)]
    if address.patience_s:
        command += ["--max-wait-time", str(address.patience_s)]
    return command
