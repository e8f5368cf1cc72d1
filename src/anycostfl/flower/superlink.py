"""Flower's SuperLink with its doors closed; started by `link` as `python -m` this module.

Flower serves three interfaces on one port: Fleet for devices, Control for whoever starts runs and
registers devices, Runtime for the server app. Only the first asks who is calling. Left open, anyone
who reaches the port could register a device, or run code on the server. Here, Control and Runtime
answer this machine only. And Flower reads a request, however long, before it asks whose it is:
here, nothing longer than a device has to send is read.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.superlink import extensions
from flwr.superlink.cli import flower_superlink
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anycostfl.flower.orphans import PARENT, end_with_parent

PUBLIC = ("/v1/fleet/", "/health")
LARGEST_BODY = FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE + (1 << 20)
"""Bytes of a request: messages travel in parts of at most such a chunk, and what is around it."""


class LocalControl:
    """Lets devices reach what is theirs, and this machine everything."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] == "http" and is_public(scope):
            await self._answer_device(scope, receive, send)
        elif scope["type"] == "lifespan" or is_allowed(scope):
            await self._app(scope, receive, send)
        else:
            await PlainTextResponse("for this machine only", 403)(scope, receive, send)

    async def _answer_device(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        if body is None:
            words = f"a request has at most {LARGEST_BODY} bytes"
            refusal = PlainTextResponse(words, 413, headers={"connection": "close"})
            await refusal(scope, receive, send)
            return
        unread = [{"type": "http.request", "body": body}]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        await self._app(scope, replay, send)


async def read_body(receive: Receive) -> bytes | None:
    """The body of a request; nothing if it breaks off or is too long."""
    parts: list[bytes] = []
    left = LARGEST_BODY
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        left -= len(parts[-1])
        if left < 0 or message["type"] != "http.request":
            return None
        if not message.get("more_body"):
            return b"".join(parts)


def is_public(scope: Mapping[str, Any]) -> bool:
    """Whether a request is for what devices may reach."""
    return str(scope.get("path", "")).startswith(PUBLIC)


def is_allowed(scope: Mapping[str, Any]) -> bool:
    """Whether a request may pass: a device's, or one from this machine."""
    if is_public(scope):
        return True
    caller, here = _address(scope.get("client")), _address(scope.get("server"))
    return caller is not None and (caller.is_loopback or caller == here)


def _address(end: Sequence[Any] | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address of one end of a connection, if it is one."""
    try:
        found = ipaddress.ip_address(end[0]) if end else None
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def main() -> None:
    """Run the SuperLink for as long as the process that started it lives."""
    extensions.get_middleware = lambda: (Middleware(LocalControl),)
    logging.getLogger("uvicorn.access").addFilter(lambda _: False)  # devices look in often
    parent = int(os.environ.get(PARENT, os.getppid()))  # it may have died while this one came up
    end_with_parent(lambda: os.kill(os.getpid(), signal.SIGINT), parent)
    flower_superlink()


if __name__ == "__main__":
    main()
