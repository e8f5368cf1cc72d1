"""The page of a run that goes on, served on this machine alone.

Two addresses exist, `/` and `/data`; neither names a file, so there is no path to escape from. The
page asks for `/data` again and again and is told 304 until a round was added. Requests that were
not addressed to this machine by its own name are refused, so no web page elsewhere can read along.
"""

from __future__ import annotations

import json
import sys
import threading
import zlib
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from anycostfl.errors import AnycostError
from anycostfl.records.run import CONFIG, JOURNAL, WIDTHS
from anycostfl.report.gather import Document
from anycostfl.report.page import gather_all, policy, render

HOST = "127.0.0.1"


class PortInUseError(AnycostError, OSError):
    """A port that cannot be listened on."""


class LiveServer(ThreadingHTTPServer):
    """Serves the page of some runs on 127.0.0.1; port 0 takes any that is free."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int) -> None:
        self.folders = tuple(folders)
        self._lock = threading.Lock()
        self._read: tuple[str, list[Document]] = ("", [])
        self.latest()
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise PortInUseError(
                f"cannot listen on port {port}: {error}; choose another --port, or 0 for any"
            ) from error

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that leaves before it has read everything is no mistake."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(cast("Any", request), client_address)

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def latest(self) -> tuple[str, list[Document]]:
        """A tag that changes with the runs, and the runs; they are read again when it changed."""
        with self._lock:
            tag = _tag(self.folders)
            if tag != self._read[0]:
                self._read = (tag, gather_all(self.folders, growing=True))
            return self._read


def _tag(folders: Sequence[Path]) -> str:
    """Sizes and times of the files that change."""
    state = ""
    for path in (folder / name for folder in folders for name in (CONFIG, JOURNAL, WIDTHS)):
        try:
            found = path.stat()
        except OSError:
            state += "-,"
            continue
        state += f"{found.st_size}:{found.st_mtime_ns},"
    return f'"{zlib.crc32(state.encode()):08x}"'


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: LiveServer
    server_version, sys_version = "anycostfl", ""
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds a connection may stay silent

    def do_GET(self) -> None:
        """Answer for the page, or for its data if they changed."""
        if not self._is_for_this_machine():
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", b"not this machine's name\n")
            return
        path = self.path.partition("?")[0]
        if path not in ("/", "/data"):
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is only /\n")
            return
        try:
            tag, runs = self.server.latest()
        except (AnycostError, OSError) as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n".encode())
            return
        if path == "/":
            self._answer(HTTPStatus.OK, "text/html", render(runs, live=True).encode())
        elif self.headers.get("If-None-Match") == tag:
            self._answer(HTTPStatus.NOT_MODIFIED, "application/json", b"", tag)
        else:
            content = json.dumps(runs, separators=(",", ":"), allow_nan=False)
            self._answer(HTTPStatus.OK, "application/json", content.encode(), tag)

    def _is_for_this_machine(self) -> bool:
        port = self.server.server_address[1]
        return self.headers.get("Host", "") in {f"{HOST}:{port}", f"localhost:{port}"}

    def _answer(self, status: HTTPStatus, kind: str, content: bytes, tag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Content-Security-Policy", policy(live=True) + "; frame-ancestors 'none'")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name it has
        """Say nothing."""
