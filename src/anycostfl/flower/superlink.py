"""Flower's SuperLink with its doors closed; started by `link` as `python -m` this module.

Flower serves three interfaces on one port: Fleet for devices, Control for whoever starts runs and
registers devices, Runtime for the server app. Only the first asks who is calling. Left open, anyone
who reaches the port could register a device, or run code on the server. Here, Control and Runtime
answer this machine only.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.superlink import extensions
from flwr.superlink.cli import flower_superlink
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from anycostfl.flower.orphans import end_with_parent

PUBLIC = ("/v1/fleet/", "/health")


class LocalControl:
    """Lets devices reach what is theirs, and this machine everything."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] == "lifespan" or is_allowed(scope):
            await self._app(scope, receive, send)
        else:
            await PlainTextResponse("for this machine only", 403)(scope, receive, send)


def is_allowed(scope: Mapping[str, Any]) -> bool:
    """Whether a request may pass: a device's, or one from this machine."""
    if str(scope.get("path", "")).startswith(PUBLIC):
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
    end_with_parent(lambda: os.kill(os.getpid(), signal.SIGINT))
    flower_superlink()


if __name__ == "__main__":
    main()
