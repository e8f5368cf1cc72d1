"""The page of a run in progress, served on 127.0.0.1 only.

There are two addresses, `/` and `/data`; neither names a file, so no path can be traversed. The
page polls `/data` and gets 304 until a round is added. Requests with a foreign Host header are
refused, so no other web page can read the data (DNS rebinding).
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

from anycostfl.errors import AnycostError, ConfigError
from anycostfl.records.run import CONFIG, JOURNAL, WIDTHS
from anycostfl.report.gather import Document
from anycostfl.report.page import gather_all, policy, render

HOST = "127.0.0.1"


class LiveServer(ThreadingHTTPServer):
    """Serves the page of some runs on 127.0.0.1; port 0 is any free one."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int) -> None:
        self.folders = tuple(folders)
        self._lock = threading.Lock()
        self._read: tuple[str, list[Document]] = ("", [])
        self.latest()
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            why = f"cannot listen on {port}: {error}; choose another, or 0 for any free one"
            raise ConfigError([f"--port: {why}"]) from error

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore browsers that disconnect early."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(cast("Any", request), client_address)

    @property
    def address(self) -> str:
        """The URL to open in a browser."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def latest(self) -> tuple[str, list[Document]]:
        """The runs, and a tag that changes with them; they are read again only when it has."""
        with self._lock:
            tag = _tag(self.folders)
            if tag != self._read[0]:
                self._read = (tag, gather_all(self.folders, growing=True))
            return self._read


def _tag(folders: Sequence[Path]) -> str:
    """A checksum of sizes and times of the files that change."""
    paths = [folder / name for folder in folders for name in (CONFIG, JOURNAL, WIDTHS)]
    stats = [path.stat() if path.exists() else None for path in paths]
    state = str([(found.st_size, found.st_mtime_ns) if found else None for found in stats])
    return f'"{zlib.crc32(state.encode()):08x}"'


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "anycostfl", ""
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds a connection may stay silent

    def do_GET(self) -> None:
        """Send the page, or its data if they have changed."""
        port = self.server.server_address[1]
        path = self.path.partition("?")[0]
        if self.headers.get("Host", "") not in {f"{HOST}:{port}", f"localhost:{port}"}:
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", "wrong Host\n")
            return
        if path not in ("/", "/data"):
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "only / exists\n")
            return
        try:
            tag, runs = self.server.latest()
        except (AnycostError, OSError) as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")
            return
        if path == "/":
            self._answer(HTTPStatus.OK, "text/html", render(runs, live=True))
        elif self.headers.get("If-None-Match") == tag:
            self._answer(HTTPStatus.NOT_MODIFIED, "application/json", "", tag)
        else:
            content = json.dumps(runs, separators=(",", ":"), allow_nan=False)
            self._answer(HTTPStatus.OK, "application/json", content, tag)

    def _answer(self, status: HTTPStatus, kind: str, text: str, tag: str = "") -> None:
        content = text.encode()
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
        """Do not log requests."""
