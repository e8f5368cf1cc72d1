"""The server's processes: Flower's SuperLink, and the server app that it runs.

    this process ── superlink (python -P -m anycostfl.flower.superlink)
                       └── superexec ── server app (anycostfl.flower.server)

The server app writes the run directory; this process reads it. If the app or the SuperLink dies or
hangs, it is started again and the run resumes at the last finished round. However this process
ends, the others end with it.

A run directory may come from a stranger, so Flower's home, from which it loads apps, is a new
folder elsewhere at every start.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from anycostfl.errors import AnycostError, ConfigError
from anycostfl.files import StorageError, open_nofollow, try_lock
from anycostfl.flower._internal import KeyRefusedError
from anycostfl.flower.control import open_control
from anycostfl.flower.fleet import RoundPolicy
from anycostfl.flower.keys import KeyFolder
from anycostfl.flower.numbers import note_nodes
from anycostfl.flower.server import FAILURE, LOCK, LOG, lock_owner, run_config
from anycostfl.flower.superlink import check_host
from anycostfl.processes import follow_output, safe_environment
from anycostfl.records.round import RoundRecord
from anycostfl.records.run import JOURNAL, read_journal

START_S = 120.0  # for the SuperLink, and for the server app, to come up
STOP_S = 10.0  # for them to go down
TRIES = 3  # starts without a finished round in between
POLL_S = 0.2  # between two looks at the run directory
HEALTH_S, ANSWER_S = 5.0, 10.0  # between two health checks; for the SuperLink to answer one
MISSED = 3  # health checks in a row; then it counts as hung

logger = logging.getLogger(__name__)


class ServerDiedError(AnycostError):
    """The server's processes do not stay up; says where to look."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to serve a run, and how; without keys, in plaintext and open to anybody."""

    folder: Path  # the run directory
    host: str
    port: int
    keys: KeyFolder | None
    policy: RoundPolicy

    @property
    def reached(self) -> str:
        """The address by which this machine reaches its own server."""
        return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104

    @property
    def address(self) -> str:
        """The same with the port."""
        host = f"[{self.reached}]" if ":" in self.reached else self.reached
        return f"{host}:{self.port}"

    @property
    def log(self) -> Path:
        """The output of Flower's processes."""
        return self.folder / LOG

    def superlink_arguments(self) -> list[str]:
        """The command line of Flower's SuperLink."""
        where = ["--host", self.host, "--port", str(self.port)]
        where += ["--disable-runtime-dependency-installation"]
        if self.keys is None:
            return [*where, "--insecure"]
        files = {
            "--ssl-ca-certfile": self.keys.authority,
            "--ssl-certfile": self.keys.certificate,
            "--ssl-keyfile": self.keys.certificate_key,
        }
        tls = [part for name, path in files.items() for part in (name, str(path.resolve()))]
        return [*where, "--enable-supernode-auth", *tls]


@contextmanager
def open_superlink(options: ServerOptions) -> Iterator[SuperLinkProcess]:
    """Start the SuperLink, ready for devices; stop everything at the end."""
    check_host(options.host)
    folder = options.log.parent
    if folder.is_symlink():
        raise StorageError(f"{folder} is a link, which no run writes; it is not followed")
    folder.mkdir(parents=True, exist_ok=True)
    superlink = SuperLinkProcess(options)
    try:
        superlink.start()
        yield superlink
    finally:
        superlink.stop()


class SuperLinkProcess:
    """Flower's SuperLink, and the run on it."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.restarts = 0  # of the server app, alone or with the SuperLink
        self._failures = 0  # since the last finished round
        self._registered: dict[str, int] = {}
        self._files: dict[str, bytes] = {}  # the public keys as they were last looked at
        trust = options.keys.authority if options.keys else None
        self._tls = ssl.create_default_context(cafile=trust) if trust else None
        self._process: subprocess.Popen[bytes] | None = None

    # --- the process ---

    def start(self) -> None:
        """Start it, wait until it answers, and register the keys."""
        keys = self.options.keys
        reading, writing = os.pipe()
        self._output = follow_output(os.fdopen(reading, "rb"), self.options.log)
        self._home = Path(tempfile.mkdtemp(prefix="anycostfl-"))  # readable by this user only
        self._control = open_control(
            self.options.address, keys.authority if keys else None, self._home
        )
        module = [sys.executable, "-P", "-m", "anycostfl.flower.superlink"]
        with os.fdopen(writing, "wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [*module, *self.options.superlink_arguments()],
                env=safe_environment(self._home),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._checked, self._missed = time.monotonic(), 0
        self._wait_until_up(self._process)
        self._registered, self._files = {}, {}
        note_nodes(self.options.folder, None if keys is None else {})
        self.register()

    def stop(self) -> None:
        """Stop it; its own processes end with it."""
        if self._process is None:
            return
        self._control.close()
        is_hung = self._missed >= MISSED
        for how in [signal.SIGKILL] if is_hung else [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]:
            if self._process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, how)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_S)
        self._output.join(STOP_S)  # until superexec and the server app have ended, too
        _await_release(self.options.folder)
        shutil.rmtree(self._home, ignore_errors=True)

    def is_healthy(self) -> bool:
        """Whether it lives and answers; asked now and then."""
        if self._process is None or self._process.poll() is not None:
            return False
        if time.monotonic() - self._checked >= HEALTH_S:
            self._missed = 0 if self._answers(ANSWER_S) else self._missed + 1
            self._checked = time.monotonic()
        return self._missed < MISSED

    def _answers(self, wait_s: float) -> bool:
        """Whether it answers a request, with whatever status."""
        scheme = "https" if self._tls else "http"
        try:
            httpx.get(
                f"{scheme}://{self.options.address}/health",
                verify=self._tls or False,
                timeout=wait_s,
                trust_env=False,
            )
        except httpx.TransportError:
            return False
        return True

    def _wait_until_up(self, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if process.poll() is not None:
                raise ServerDiedError(f"Flower's SuperLink ended at once; see {self.options.log}")
            if self._answers(ANSWER_S):
                return
            time.sleep(POLL_S)
        raise ServerDiedError(f"Flower's SuperLink did not come up; see {self.options.log}")

    # --- the devices ---

    def register(self) -> None:
        """Let in the devices whose public keys are in the folder, and only those.

        A key that is replaced loses its place at once. One that cannot be read (it is still being
        copied) or that Flower refuses is skipped until its file changes.
        """
        if self.options.keys is None:
            return
        paths = self.options.keys.registered()
        found = {name: _content(path) for name, path in paths.items()}
        files = {name: content for name, content in found.items() if content is not None}
        if files == self._files:
            return
        names = files.keys() | self._files.keys()
        changed = {name for name in names if files.get(name) != self._files.get(name)}
        for name in changed & self._registered.keys():
            self._control.unregister(self._registered[name])
            del self._registered[name]  # only now: while it fails, it is tried again
        for name in sorted(changed & files.keys()):
            try:
                self._registered[name] = self._control.register(name, paths[name])
            except (ConfigError, OSError) as error:  # half a key, or gone again
                logger.warning("%s", error)
            except KeyRefusedError as error:
                logger.warning("%s is refused: %s", paths[name], error)
        self._files = files
        note_nodes(self.options.folder, self._registered)

    # --- the run ---

    def follow(self, rounds: int) -> Iterator[RoundRecord]:
        """Run the server app until N rounds are done; yields each round as it is finished."""
        folder = self.options.folder
        (folder / FAILURE).unlink(missing_ok=True)
        records, _ = read_journal(folder)
        seen, size = len(records), -1
        run_id, began = self._start_run()
        while True:
            alive = _is_at_work(folder, run_id, began)  # before the journal: no round is missed
            if (now := (folder / JOURNAL).stat().st_size) != size:
                size, (records, _) = now, read_journal(folder)
            yield from records[seen:]
            if len(records) > seen:
                seen, self._failures = len(records), 0
            if alive and self._look_after():
                time.sleep(POLL_S)
            elif len(records) >= rounds:
                return
            else:
                self._count_failure()
                run_id, began = self._start_run()
                self.restarts += 1

    def _look_after(self) -> bool:
        """Follow changes in the folder of keys; whether the SuperLink is healthy."""
        with suppress(httpx.TransportError):  # the next health check tells
            self.register()
        return self.is_healthy()

    def _start_run(self) -> tuple[int, float]:
        """Start the server app, on a new SuperLink if the old one is not healthy; its id, when."""
        config = run_config(self.options.folder, self.options.policy)
        while True:
            try:
                if not self.is_healthy():
                    logger.warning("Flower's SuperLink died or hangs; starting it again")
                    self.stop()
                    self.start()
                return self._control.start_run(config), time.monotonic()
            except httpx.TransportError as error:
                logger.warning("Flower's SuperLink does not answer: %s", error)
                self._missed = MISSED
                self._count_failure()

    def _count_failure(self) -> None:
        """Give up if the server app said why it ended, or if it keeps dying."""
        failure = self.options.folder / FAILURE
        if failure.exists():
            raise AnycostError(failure.read_text() or f"the disk of {failure.parent} is full")
        self._failures += 1
        if self._failures >= TRIES:
            raise ServerDiedError(
                f"the server died {self._failures} times without finishing a round; see "
                f"{self.options.log}"
            )


def _content(path: Path) -> bytes | None:
    """A file as it is now; nothing if it was just removed."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def check_port(host: str, port: int) -> None:
    """Fail clearly if nothing can listen there."""
    if not 0 < port < 65536:
        raise ConfigError([f"--port: given {port}, must be 1 to 65535"])
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
        came_up = file.read() == lock_owner(run_id)
        return not came_up and time.monotonic() - began < START_S


def _await_release(folder: Path) -> None:
    """Wait until the server app has released the run directory."""
    until = time.monotonic() + STOP_S
    path = folder / LOCK
    while path.exists() and time.monotonic() < until:
        with open(path, "a+", opener=open_nofollow) as file:
            if try_lock(file):
                return
        time.sleep(POLL_S)
