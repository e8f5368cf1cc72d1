"""Flower's SuperLink behind a filter; started by `link` as `python -P -m` this module.

Flower serves three interfaces on one port: Fleet for devices, Control for starting runs and
registering devices, Runtime for the server app. Only Fleet authenticates its callers; through the
others anybody could register a device, or run code on the server. So they answer this machine only.

Flower also reads a request to its end before it checks the key. So headers (the default parser of
uvicorn has no limit), bodies, connections from other machines and silence are bounded.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import resource
import signal
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, NoReturn

from anycostfl.errors import ConfigError
from anycostfl.flower._internal import available, uvicorn_classes
from anycostfl.processes import PARENT, end_with_parent

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

PUBLIC = ("/v1/fleet/", "/health")
OPEN_PATH = "/open"  # asked for by `link` once all keys are registered
CLOSED_VARIABLE = "ANYCOSTFL_CLOSED"  # environment: devices wait until then
HEADER_BYTES = 1 << 16
BODY_BYTES = 6 << 20  # Flower sends messages in parts of 5 MiB, plus what is around them
ALL_BODIES_BYTES = 1 << 30
CONNECTIONS = 1000  # from other machines
FILES = 4096  # that may be open at once, if the system allows it
IDLE_S = 30.0  # without a request, or without more of one
REFUSALS = {
    408: f"nothing came for {IDLE_S:g} s",
    413: f"a request has at most {BODY_BYTES} bytes",
    503: "too many requests at once",
}
NOT_YET = "the server is registering keys"
UNFILTERED = "the SuperLink runs without a filter, and therefore on loopback addresses only"


class LocalControl:
    """Lets devices reach the Fleet interface, and this machine everything.

    Not before all keys are registered: hundreds of devices that are refused meanwhile and try again
    would take the time that registering needs.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._is_open = not os.environ.get(CLOSED_VARIABLE)
        self._held = 0  # bytes of all bodies that are in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        path, here = str(scope.get("path", "")), is_local(scope.get("client"), scope.get("server"))
        if path == OPEN_PATH and here:
            self._is_open = True
            await _refuse(send, 200, "open")
        elif path.startswith(PUBLIC[0]) and not self._is_open:
            await _refuse(send, 503, NOT_YET)
        elif scope["type"] == "http" and path.startswith(PUBLIC):
            await self._answer_device(scope, receive, send)
        elif scope["type"] == "lifespan" or here:
            await self._app(scope, receive, send)
        else:
            await _refuse(send, 403, "for this machine only")

    async def _answer_device(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()
        try:
            status = await self._read(receive, body)
            if status != 200:
                await _refuse(send, status, REFUSALS[status])
                return
            unread = [{"type": "http.request", "body": bytes(body)}]

            async def replay() -> Event:
                return unread.pop() if unread else await receive()

            await self._app(scope, replay, send)
        finally:
            self._held -= len(body)

    async def _read(self, receive: Receive, body: bytearray) -> int:
        """Read the body of a request as long as it stays within bounds; the status, 200 if all."""
        while True:
            try:
                message = await asyncio.wait_for(receive(), IDLE_S)
            except TimeoutError:
                return 408
            part = message.get("body", b"")
            body += part
            self._held += len(part)
            if len(body) > BODY_BYTES or message["type"] != "http.request":
                return 413
            if self._held > ALL_BODIES_BYTES:
                return 503
            if not message.get("more_body"):
                return 200


async def _refuse(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


def is_local(client: Sequence[Any] | None, server: Sequence[Any] | None) -> bool:
    """Whether the two ends of a connection are on one machine."""
    caller = _address(client)
    return caller is not None and (caller.is_loopback or caller == _address(server))


def _address(end: Sequence[Any] | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address of one end of a connection, if it has one."""
    try:
        found = ipaddress.ip_address(end[0]) if end else None
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def bounded(base: type[Any]) -> type[Any]:
    """Uvicorn's connection class, with limits on connections that send no requests."""

    class Bounded(base):  # type: ignore[misc]  # the base is looked up at run time
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._last: object = None  # the request that was last seen
            if is_local(self.client, self.server):
                return
            if len(self.connections) > CONNECTIONS:
                transport.abort()
            else:
                self.loop.call_later(IDLE_S, self._check_idle)

        def _check_idle(self) -> None:
            if self.transport.is_closing():
                return
            is_idle = self.cycle is None or self.cycle.response_complete
            if is_idle and self.cycle is self._last:
                self.transport.abort()
            else:
                self._last = self.cycle
                self.loop.call_later(IDLE_S, self._check_idle)

    return Bounded


def install_filter() -> None:
    """Put the filter and the limits into every server that this process starts from now on."""
    config, connection = uvicorn_classes()
    plain = config.__init__
    limits = {
        "http": bounded(connection),
        "h11_max_incomplete_event_size": HEADER_BYTES,
        "timeout_keep_alive": int(IDLE_S),  # uvicorn's five seconds cost idle devices a handshake
    }

    def limited(self: Any, app: Application, *args: Any, **settings: Any) -> None:
        plain(self, LocalControl(app), *args, **{**settings, **limits, "ws": "none"})

    setattr(config, "__init__", limited)  # noqa: B010 - mypy does not let a method be assigned


def forbid_grpc() -> None:
    """Keep Flower from opening further ports: versions before 1.41 serve Control there, by gRPC."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("no gRPC server is started: no filter can be put in front of it")

    with suppress(ImportError):  # Flower may do without it one day
        vars(import_module("grpc"))["server"] = refuse


def check_host(host: str) -> None:
    """Refuse to be reached by other machines where the filter cannot be installed."""
    is_loopback = host == "localhost" or is_local([host], None)
    if not is_loopback and not available("filter", UNFILTERED):
        raise ConfigError(
            [f"--host: given {host}, must be a loopback address such as 127.0.0.1. This version of "
             "Flower cannot be filtered: anybody who reaches the port could run code here"]
        )  # fmt: skip


def main() -> None:
    """Run the SuperLink for as long as the process that started it lives."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--host", default="")
    check_host(parser.parse_known_args()[0].host)
    forbid_grpc()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # often 1,024: fewer than connections
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, FILES)), hard))
    if available("filter", UNFILTERED):
        install_filter()
    logging.getLogger("uvicorn.access").addFilter(lambda _: False)  # devices look in often
    parent = int(os.environ.get(PARENT, os.getppid()))  # it may have died while this one came up
    end_with_parent(lambda: os.kill(os.getpid(), signal.SIGINT), parent)
    next(iter(entry_points(group="console_scripts", name="flower-superlink"))).load()()


if __name__ == "__main__":
    main()
