"""The server's processes: Flower's SuperLink, and the server app that it runs.

    this process ── superlink (python -m anycostfl.flower.superlink)
                       └── superexec ── server app (anycostfl.flower.server)

Nothing is downloaded or reported: no telemetry, no look for updates, no installation at run time.
The server app writes the run directory; this process reads it. If the app dies, it is started again
and goes on at the last finished round. Whatever happens to this process, the others follow it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import httpx
from flwr.app.user_config import UserConfig
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest, UnregisterNodeRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor

from anycostfl.errors import AnycostError, ConfigError
from anycostfl.files import open_nofollow, try_lock
from anycostfl.flower.keys import KeyFolder, public_key
from anycostfl.flower.numbers import note_nodes
from anycostfl.flower.orphans import PARENT
from anycostfl.flower.roster import Terms
from anycostfl.flower.server import FAILURE, LOCK, LOG, mark_of
from anycostfl.records.round import RoundRecord
from anycostfl.records.run import JOURNAL, read_journal

START_S = 120.0  # for the SuperLink, and for the server app, to come up
STOP_S = 10.0  # for them to go down
TRIES = 3  # starts of the server app without a finished round in between
LOOK_S = 0.2  # between two looks at the run directory

logger = logging.getLogger(__name__)

OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}


class ServerDiedError(AnycostError):
    """The server's processes do not stay up; says where to look."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Where to serve a run, and how; without keys, in plaintext and open to anybody."""

    folder: Path  # the run directory
    host: str
    port: int
    keys: KeyFolder | None
    terms: Terms

    @property
    def reached(self) -> str:
        """The address by which this machine reaches its own server."""
        return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104

    @property
    def log(self) -> Path:
        """What Flower's processes say."""
        return self.folder / LOG


@contextmanager
def open_link(serving: Serving) -> Iterator[Link]:
    """Start the SuperLink, ready for devices; stop everything at the end."""
    home = serving.folder / "flower"
    home.mkdir(parents=True, exist_ok=True)
    with open(serving.log, "ab", opener=open_nofollow) as file:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "anycostfl.flower.superlink", *_options(serving)],
            env=_environment(home),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    link = Link(serving, process)
    try:
        link.wait_until_up()
        note_nodes(serving.folder, None if serving.keys is None else {})
        link.register()
        yield link
    finally:
        link.close()


class Link:
    """A running SuperLink."""

    def __init__(self, serving: Serving, process: subprocess.Popen[bytes]) -> None:
        self.serving = serving
        self.restarts = 0
        self._process = process
        self._registered: dict[str, int] = {}
        self._files: dict[str, bytes] = {}  # the public keys as they were last looked at
        keys = serving.keys
        self._control = ControlHttpClient.from_server_address(
            f"[{serving.reached}]:{serving.port}"
            if ":" in serving.reached
            else f"{serving.reached}:{serving.port}",
            insecure=keys is None,
            root_certificates=keys.authority.read_bytes() if keys else None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )

    def wait_until_up(self) -> None:
        """Wait until the port answers."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise ServerDiedError(f"Flower's SuperLink ended at once; see {self.serving.log}")
            where = self.serving.reached, self.serving.port
            with suppress(OSError), socket.create_connection(where, 1):
                return
            time.sleep(LOOK_S)
        raise ServerDiedError(f"Flower's SuperLink did not come up; see {self.serving.log}")

    def register(self) -> None:
        """Let in the devices whose public keys lie in the folder, and only those.

        A key that is replaced loses its place at once. One that cannot be read (a copy on its way)
        or that Flower does not take is passed over until its file changes.
        """
        if self.serving.keys is None:
            return
        paths = self.serving.keys.registered()
        found = {name: _content(path) for name, path in paths.items()}
        files = {name: content for name, content in found.items() if content is not None}
        if files == self._files:
            return
        changed = {
            n for n in files.keys() | self._files.keys() if files.get(n) != self._files.get(n)
        }
        for name in changed & self._registered.keys():
            self._control.UnregisterNode(UnregisterNodeRequest(node_id=self._registered.pop(name)))
        for name in sorted(changed & files.keys()):
            try:
                request = RegisterNodeRequest(public_key=public_key(paths[name]), name=name)
                self._registered[name] = self._control.RegisterNode(request).node_id
            except (ConfigError, OSError) as error:  # half a key, or gone again
                logger.warning("%s", error)
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.PRECONDITION_FAILED:
                    raise
                logger.warning(
                    "%s: Flower lets a key in once, under one name, as long as it runs; make a new "
                    "one with `anycostfl keys`, or start the server again",
                    paths[name],
                )
        self._files = files
        note_nodes(self.serving.folder, self._registered)

    def follow(self, rounds: int) -> Iterator[RoundRecord]:
        """Run the server app until so many rounds are done; each round as it is finished."""
        folder = self.serving.folder
        (folder / FAILURE).unlink(missing_ok=True)
        records, _ = read_journal(folder)
        seen, size = len(records), -1
        tries, run_id, began = 1, self._start(), time.monotonic()
        while True:
            alive = _is_at_work(folder, run_id, began)  # before the journal: no round is missed
            if (now := (folder / JOURNAL).stat().st_size) != size:
                size, (records, _) = now, read_journal(folder)
            yield from records[seen:]
            if len(records) > seen:
                seen, tries = len(records), 1
            if alive:
                self.register()
                time.sleep(LOOK_S)
            elif len(records) >= rounds:
                return
            else:
                self._explain(tries)
                tries, run_id, began = tries + 1, self._start(), time.monotonic()
                self.restarts += 1

    def close(self) -> None:
        """Stop the SuperLink; its own processes go with it."""
        with suppress(httpx.HTTPError):
            self._control.close()
        for how in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, how)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_S)
        _await_release(self.serving.folder)

    def _start(self) -> int:
        """Submit the app to the SuperLink."""
        manifest = resources.files("anycostfl.flower").joinpath("app", "pyproject.toml")
        content, _ = build_fab_from_files({"pyproject.toml": manifest.read_bytes()})
        terms = self.serving.terms
        table: UserConfig = {
            "run-dir": str(self.serving.folder.resolve()),
            "deadline-s": float(terms.deadline_s),
            "wait-for": terms.wait_for,
            "min-replies": terms.min_replies,
            "patience-s": float(terms.patience_s),
        }
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = StartRunRequest(
            fab=fab_to_proto(fab), override_config=user_config_to_proto(table)
        )
        return int(self._control.StartRun(request).run_id)

    def _explain(self, tries: int) -> None:
        """The server app is gone: say why if it said so, or if it keeps dying."""
        failure = self.serving.folder / FAILURE
        if failure.exists():
            raise AnycostError(failure.read_text() or f"the disk of {failure.parent} is full")
        if self._process.poll() is not None:
            raise ServerDiedError(f"Flower's SuperLink died; see {self.serving.log}")
        if tries >= TRIES:
            raise ServerDiedError(f"the server app died {tries} times; see {self.serving.log}")


def _content(path: Path) -> bytes | None:
    """A file as it is now; nothing if it is on its way out."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def _options(serving: Serving) -> list[str]:
    where = ["--host", serving.host, "--port", str(serving.port)]
    quiet = ["--disable-runtime-dependency-installation"]
    keys = serving.keys
    if keys is None:
        return [*where, *quiet, "--insecure"]
    return [
        *where,
        *quiet,
        "--enable-supernode-auth",
        "--ssl-ca-certfile",
        str(keys.authority.resolve()),
        "--ssl-certfile",
        str(keys.certificate.resolve()),
        "--ssl-keyfile",
        str(keys.certificate_key.resolve()),
    ]


def _environment(home: Path) -> dict[str, str]:
    """Flower finds its own programs whether or not the virtual environment is activated."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    own = {"FLWR_HOME": str(home.resolve()), "PATH": path, PARENT: str(os.getpid())}
    return {**os.environ, **OFFLINE, **own}


def check_port(host: str, port: int) -> None:
    """Fail clearly if nothing can listen there."""
    if not 0 < port < 65536:
        raise ConfigError([f"--port: given {port}, allowed 1 to 65535"])
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                [f"--host {host} --port {port}: cannot be used ({error.strerror})"]
            ) from error


def _is_at_work(folder: Path, run_id: int, began: float) -> bool:
    """Whether the server app of this run holds the run directory, or is still coming up."""
    with open(folder / LOCK, "a+", opener=open_nofollow) as file:
        if not try_lock(file):
            return True
        file.seek(0)
        came_up = file.read() == mark_of(run_id)
        return not came_up and time.monotonic() - began < START_S


def _await_release(folder: Path) -> None:
    """Wait until the server app has let go of the run directory."""
    until = time.monotonic() + STOP_S
    path = folder / LOCK
    while path.exists() and time.monotonic() < until:
        with open(path, "a+", opener=open_nofollow) as file:
            if try_lock(file):
                return
        time.sleep(LOOK_S)
