"""The server's processes: Flower's SuperLink, and the server app that it runs.

    this process ── superlink (python -P -m anycostfl.flower.superlink)
                       └── superexec ── server app (anycostfl.flower.server)

The server app writes the run directory; this process reads it. If the app or the SuperLink dies or
hangs, it is started again and the run resumes at the last finished round. However this process
ends, the others end with it. A run directory may come from a stranger, so Flower's home, from which
it loads apps, is a new folder elsewhere at every start.
"""

from __future__ import annotations

import json
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
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import tomli_w
from flwr.app import UserConfig

from anycostfl.errors import AnycostError, ConfigError
from anycostfl.files import StorageError, atomic_write, open_nofollow, read_file, try_lock
from anycostfl.flower._internal import ControlClient, available
from anycostfl.flower.fleet import RoundPolicy
from anycostfl.flower.keys import KeyFolder, check_expiry
from anycostfl.flower.numbers import note_nodes
from anycostfl.flower.server import FAILURE, LOCK, LOG, lock_owner, run_config
from anycostfl.flower.superlink import CLOSED_VARIABLE, OPEN_PATH, check_host
from anycostfl.processes import follow_output, program, safe_environment
from anycostfl.records.round import RoundRecord
from anycostfl.records.run import JOURNAL, read_journal

START_S = 120.0  # for the SuperLink, and for the server app, to come up
STOP_S = 10.0  # for them to go down
TRIES = 3  # starts without a finished round in between
POLL_S = 0.2  # between two looks at the run directory
HEALTH_S, ANSWER_S = 5.0, 20.0  # between two health checks; for the SuperLink to answer one
CONNECTION, CALL_S = "anycostfl", 120.0  # the SuperLink in Flower's configuration; a call of `flwr`
LONGEST_FAILURE = 10_000  # bytes of what the server app says
EXPIRY_S = 86_400.0  # between two looks at the certificates
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
    def address(self) -> str:
        """Where this machine reaches its own server."""
        everywhere = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # noqa: S104
        host = everywhere.get(self.host, self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def authority(self) -> Path | None:
        """The certificate to recognise the server by; none without keys."""
        return self.keys.authority if self.keys else None

    @property
    def log(self) -> Path:
        """The output of Flower's processes."""
        return self.folder / LOG

    def superlink_arguments(self) -> list[str]:
        """The command line of Flower's SuperLink."""
        keys = self.keys
        where = ["--host", self.host, "--port", str(self.port)]
        where += ["--disable-runtime-dependency-installation"]
        if keys is None:
            return [*where, "--insecure"]
        where += ["--enable-supernode-auth", "--ssl-ca-certfile", str(keys.authority.resolve())]
        where += ["--ssl-certfile", str(keys.certificate.resolve())]
        return [*where, "--ssl-keyfile", str(keys.certificate_key.resolve())]


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
        self._expiry_s = time.monotonic() + EXPIRY_S  # when certificates are looked at again
        self.restarts = 0  # of the server app, alone or with the SuperLink
        self._failures = 0  # since the last finished round
        self._registered: dict[str, int] = {}
        self._files: dict[str, bytes] = {}  # the public keys as they were last looked at
        trust = options.authority
        self._tls = ssl.create_default_context(cafile=trust) if trust else False
        self._process: subprocess.Popen[bytes] | None = None

    # --- the process ---

    def start(self) -> None:
        """Start it, wait until it answers, and register the keys."""
        reading, writing = os.pipe()
        self._output = follow_output(os.fdopen(reading, "rb"), self.options.log)
        self._home = Path(tempfile.mkdtemp(prefix="anycostfl-"))  # readable by this user only
        self._control = open_control(self.options.address, self.options.authority, self._home)
        module = [sys.executable, "-P", "-m", "anycostfl.flower.superlink"]
        with os.fdopen(writing, "wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [*module, *self.options.superlink_arguments()],
                env=safe_environment(self._home) | ({CLOSED_VARIABLE: "1"} if self._tls else {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._checked, self._missed = time.monotonic(), 0
        self._wait_until_up(self._process)
        self._registered, self._files = {}, {}
        note_nodes(self.options.folder, {} if self.options.keys else None)
        self.register()
        self._answers(OPEN_PATH)

    def stop(self) -> None:
        """Stop it; its own processes end with it."""
        if self._process is None:
            return
        self._control.close()
        politely = [signal.SIGINT, signal.SIGTERM] if self._missed < MISSED else []
        for how in (*politely, signal.SIGKILL):
            if self._process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, how)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_S)
        self._output.join(STOP_S)  # until superexec and the server app have ended, too
        lock, until = self.options.folder / LOCK, time.monotonic() + STOP_S
        while lock.exists() and _last_owner(lock) is None and time.monotonic() < until:
            time.sleep(POLL_S)
        shutil.rmtree(self._home, ignore_errors=True)

    def is_healthy(self) -> bool:
        """Whether it lives and answers; asked now and then."""
        if self._process is None or self._process.poll() is not None:
            return False
        if time.monotonic() - self._checked >= HEALTH_S:
            self._missed = 0 if self._answers() else self._missed + 1
            self._checked = time.monotonic()
        return self._missed < MISSED

    def _answers(self, path: str = "/health") -> bool:
        """Whether it answers a request, with whatever status."""
        url = f"{'https' if self._tls else 'http'}://{self.options.address}{path}"
        try:
            httpx.get(url, verify=self._tls, timeout=ANSWER_S, trust_env=False)
        except httpx.TransportError:
            return False
        return True

    def _wait_until_up(self, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < until:
            if self._answers():
                return
            time.sleep(POLL_S)
        how = "did not come up" if process.poll() is None else "ended at once"
        raise ServerDiedError(f"Flower's SuperLink {how}; see {self.options.log}")

    # --- the devices ---

    def register(self) -> None:
        """Let in the devices whose public keys are in the folder, and only those.

        A key that is replaced loses its place at once. One that cannot be read (it is still being
        copied) or that Flower refuses is skipped until its file changes.
        """
        if self.options.keys is None:
            return
        paths = self.options.keys.registered()
        files = {}
        for name, path in paths.items():
            with suppress(OSError):  # it was just removed
                files[name] = path.read_bytes()
        changed = {name for name, _ in files.items() ^ self._files.items()}
        if not changed:
            return
        for name in changed & self._registered.keys():
            self._control.unregister(self._registered[name])
            del self._registered[name]  # only now: while it fails, it is tried again
        for name in sorted(changed & files.keys()):
            try:
                self._registered[name] = self._control.register(name, paths[name])
            except (ConfigError, OSError) as error:  # half a key, gone again, or refused
                logger.warning("%s", error)
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
            owner = _last_owner(folder / LOCK)  # before the journal: no round is missed
            starts = owner != lock_owner(run_id) and time.monotonic() - began < START_S
            if (now := (folder / JOURNAL).stat().st_size) != size:
                size, (records, _) = now, read_journal(folder)
            yield from records[seen:]
            if len(records) > seen:
                seen, self._failures = len(records), 0
            if (owner is None or starts) and self._look_after():
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
        if self.options.keys and time.monotonic() > self._expiry_s:
            self._expiry_s = time.monotonic() + EXPIRY_S
            for warning in check_expiry(self.options.keys, strict=False):
                logger.warning("%s", warning)
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
            said = read_file(failure, LONGEST_FAILURE).decode(errors="replace")
            raise AnycostError(said or f"the disk of {failure.parent} is full")
        self._failures += 1
        if self._failures >= TRIES:
            raise ServerDiedError(
                f"the server died {self._failures} times without finishing a round; see "
                f"{self.options.log}"
            )


def open_control(address: str, trust: Path | None, home: Path) -> ControlClient | FlwrProgram:
    """The Control interface of the SuperLink at an address; `home` is Flower's folder."""
    if available("control", "the `flwr` program registers devices and starts the run, slowly"):
        return ControlClient(address, trust.read_bytes() if trust else None)
    return FlwrProgram(address, trust, home)


class FlwrProgram:
    """What `ControlClient` does, by Flower's documented program: seconds a call."""

    def __init__(self, address: str, trust: Path | None, home: Path) -> None:
        self._home = home
        how = {"root-certificates": str(trust.resolve())} if trust else {"insecure": True}
        table = {"superlink": {CONNECTION: {"address": address, **how}}}
        atomic_write(home / "config.toml", tomli_w.dumps(table).encode())

    def register(self, name: str, path: Path) -> int:
        """Let in the device with this public key; its node id."""
        try:
            told = self._call("supernode", "register", str(path), CONNECTION, "--name", name)
        except AnycostError as error:
            raise ConfigError([f"{path} is refused: {error}"]) from error
        return int(told["node-id"])

    def unregister(self, node_id: int) -> None:
        """Put a device out."""
        self._call("supernode", "unregister", str(node_id), CONNECTION)

    def start_run(self, config: UserConfig) -> int:
        """Start the server app; Flower's number of the run."""
        table = self._home / "run.toml"
        atomic_write(table, tomli_w.dumps(config).encode())
        with resources.as_file(resources.files("anycostfl.flower").joinpath("app")) as app:
            told = self._call("run", str(app), CONNECTION, "--run-config", str(table))
        return int(told["run-id"])

    def close(self) -> None:
        """There is no connection."""

    def _call(self, *arguments: str) -> dict[str, Any]:
        what = f"`flwr {' '.join(arguments[:2])}`"
        try:
            done = subprocess.run(  # noqa: S603 - Flower's program
                [program("flwr"), *arguments, "--format", "json"],
                env=safe_environment(self._home),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=CALL_S,
                check=False,
            )
            told = dict(json.loads(done.stdout))
        except subprocess.TimeoutExpired as error:
            raise AnycostError(f"{what} did not end within {CALL_S:g} s") from error
        except ValueError:
            told = {}
        if done.returncode or not told.get("success"):
            why = told.get("error-message") or done.stderr.decode(errors="replace")[-500:]
            raise AnycostError(f"{what} failed: {why}")
        return told


def check_port(host: str, port: int) -> None:
    """Fail clearly if nothing can listen there."""
    if not 0 < port < 65536:
        raise ConfigError([f"--port: given {port}, must be 1 to 65535"])
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            problem = f"--host {host} --port {port}: cannot be used ({error.strerror})"
            raise ConfigError([problem]) from error


def _last_owner(lock: Path) -> str | None:
    """What had the lock of a run directory last; nothing while somebody holds it."""
    with open(lock, "a+", opener=open_nofollow) as file:
        if not try_lock(file):
            return None
        file.seek(0)
        return file.read()
