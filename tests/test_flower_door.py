"""The one module that uses undocumented Flower, its fallbacks, and what strangers cannot do."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module, resources
from pathlib import Path
from typing import Any, cast

import pytest
from flwr.clientapp import ClientApp

from anycostfl.cli.fleet import free_port
from anycostfl.errors import ConfigError
from anycostfl.files import StorageError
from anycostfl.flower import _internal, link, node, superlink
from anycostfl.flower._internal import ErrorCode, message_bytes, set_task
from anycostfl.flower.device import Setup
from anycostfl.flower.fleet import RoundPolicy
from anycostfl.flower.keys import KeyFolder, make_keys
from anycostfl.flower.link import ServerOptions, SuperLinkProcess, open_superlink
from anycostfl.flower.messages import to_message
from anycostfl.flower.node import Address
from anycostfl.processes import LINE_BYTES, follow_output
from anycostfl.wire.envelope import Envelope, blobs_of
from flower_grid import ErrorCode as FlowersErrorCode
from flower_grid import LocalGrid
from loopback import wait_until

ROOT = Path(__file__).parents[1]
DOCUMENTED = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation")
"""https://flower.ai/docs/framework/ref-api/flwr.html, and `__all__` of the package."""


# --- one module -----------------------------------------------------------------------------------


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of everything that a file imports from Flower."""
    for part in ast.walk(ast.parse(path.read_text())):
        if isinstance(part, ast.Import):
            yield from ((name.name, "") for name in part.names if name.name.startswith("flwr"))
        elif isinstance(part, ast.ImportFrom) and (part.module or "").startswith("flwr"):
            yield from ((part.module or "", name.name) for name in part.names)


def is_documented(module: str, name: str) -> bool:
    if module not in (*DOCUMENTED, "flwr.serverapp.strategy"):
        return False
    return not name or name in sys.modules[module].__all__


@pytest.mark.parametrize(
    ("folders", "exempt"),
    [(["src"], "_internal.py"), (["tests", "fuzz", "drills", "benchmarks"], "flower_grid.py")],
)
def test_only_one_file_imports_what_flower_does_not_document(
    folders: list[str], exempt: str
) -> None:
    import flwr.simulation  # noqa: F401 - lazy

    used = {
        (path.name, module, name)
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for module, name in imported(path)
        if path.name != exempt
    }
    assert used
    assert [entry for entry in used if not is_documented(*entry[1:])] == []


def test_the_installed_version_has_everything() -> None:
    for capability in _internal.NEEDS:
        assert _internal.available(capability, "nothing else is done")


def test_error_codes_are_flowers() -> None:
    assert {code.name: code.value for code in ErrorCode}.items() <= vars(FlowersErrorCode).items()


# --- without it -----------------------------------------------------------------------------------


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Take a capability away, as a version of Flower would that moved a module."""

    def take(capability: str) -> None:
        needs = {**_internal.NEEDS, capability: ("flwr.moved_elsewhere:Thing",)}
        monkeypatch.setattr(_internal, "NEEDS", needs)
        forget()

    def forget() -> None:
        _internal._use.cache_clear()
        _internal.available.cache_clear()

    yield take
    monkeypatch.undo()
    forget()


def test_a_missing_capability_is_reported_once(
    without: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    without("collector")
    for _ in range(3):
        _internal.drop_messages(LocalGrid(1), ["message"])
    said = "does not offer what the collector of anycostfl needs"
    found = {id(record) for record in caplog.records if said in record.getMessage()}
    assert len(found) == 1
    assert "No module named 'flwr.moved_elsewhere'" in caplog.text


def test_without_flowers_own_sizes_the_arrays_are_counted(without: Callable[[str], None]) -> None:
    import torch

    set_task(run_id=1, node_id=1, task_id=1)
    content = Envelope({}, {"w": blobs_of({"w": torch.zeros(1000)})})
    message = to_message(content, 5, "train", 0, None)
    whole = message_bytes(message)
    without("sizes")
    assert message_bytes(message) == 4000 < whole


def test_without_the_client_a_device_is_a_supernode(
    without: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[Any] = []

    class Process:
        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            started.extend([command, env])

        def wait(self, _seconds: float = 0) -> int:
            return 3

        def terminate(self) -> None: ...
        def kill(self) -> None: ...

    without("node")
    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(node, "GIVE_UP_S", 0.0)
    address = Address("board.lan:9443", tmp_path / "ca.crt", tmp_path / "key", 60.0)
    with pytest.raises(node.RefusedError, match="exit code 3"):
        node.join(address, cast(ClientApp, None), Setup(3, "jetson-nano", 1e6, 2.0, 0.5))
    command, env = started
    assert Path(command[0]).name == "flower-supernode"
    assert command[command.index("--node-config") + 1] == (
        'device=3 profile="jetson-nano" rate-bps=1000000.0 latency-s=2.0 energy-j=0.5'
    )
    assert env["PYTHONSAFEPATH"] == "1"
    with pytest.raises(ConfigError, match="Without TLS"):
        node.join(Address("board.lan:9443", None, None), cast(ClientApp, None), Setup(3))


def test_without_the_filter_only_loopback_is_served(without: Callable[[str], None]) -> None:
    superlink.check_host("0.0.0.0")  # noqa: S104 - nothing listens
    without("filter")
    for host in ("127.0.0.1", "::1", "localhost"):
        superlink.check_host(host)
    for host in ("0.0.0.0", "", "::", "192.168.1.10", "board.lan"):  # noqa: S104
        with pytest.raises(ConfigError, match="must be a loopback address"):
            superlink.check_host(host)


def test_no_port_is_opened_that_no_filter_stands_in_front_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grpc = import_module("grpc")
    monkeypatch.setattr(grpc, "server", grpc.server)  # put back at the end
    superlink.forbid_grpc()
    with pytest.raises(RuntimeError, match="no gRPC server is started"):
        grpc.server(None)


# --- a real SuperLink -----------------------------------------------------------------------------


def options(folder: Path, keys: KeyFolder | None = None) -> ServerOptions:
    folder.mkdir(exist_ok=True)
    return ServerOptions(folder, "127.0.0.1", free_port(), keys, RoundPolicy())


def send(port: int, head: bytes, fill: bytes = b"", count: int = 0) -> bytes:
    """Send the beginning of a request and more of it; the answer, as far as it comes."""
    with socket.create_connection(("127.0.0.1", port), 10) as line:
        line.settimeout(20)
        with suppress(OSError):  # the server need not read it all
            line.sendall(head)
            for _ in range(count):
                line.sendall(fill)
        try:
            return line.recv(200)
        except OSError:
            return b""


def test_a_stranger_with_an_endless_header_stops_nobody_and_fills_no_log(tmp_path: Path) -> None:
    serving = options(tmp_path)
    with open_superlink(serving) as running:
        begin = time.monotonic()
        answer = send(serving.port, b"POST /health HTTP/1.1\r\nX: ", b"x" * (1 << 20), 300)
        assert answer == b"" or b" 400 " in answer
        assert running._answers()
        assert time.monotonic() - begin < 30
        for _ in range(3):
            head = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n"
            head += b"Content-Type: \x1b[2J" + b"y" * 60_000 + b"\r\n\r\n"
            send(serving.port, head)
        before = serving.log.stat().st_size
        assert before < 20_000
    log = serving.log.read_text()
    assert "\x1b" not in log
    assert max(map(len, log.splitlines())) <= LINE_BYTES


def test_connections_of_strangers_are_limited_and_idle_ones_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Base:
        """As uvicorn's."""

        connections: set[object] = set()  # noqa: RUF012 - shared, as there
        client, server = ("192.168.1.9", 1), ("192.168.1.10", 2)

        def connection_made(self, transport: Any) -> None:
            self.connections.add(self)
            self.transport, self.cycle, self.loop = transport, None, asyncio.get_running_loop()

    class Transport:
        def __init__(self) -> None:
            self.closed = False

        def abort(self) -> None:
            self.closed = True

        def is_closing(self) -> bool:
            return self.closed

    async def connect(count: int) -> list[bool]:
        kind, transports = superlink.bounded(Base), [Transport() for _ in range(count)]
        for transport in transports:
            kind().connection_made(transport)
        at_once = [transport.closed for transport in transports]
        await asyncio.sleep(0.5)
        assert all(transport.closed for transport in transports)
        return at_once

    monkeypatch.setattr(superlink, "IDLE_S", 0.1)
    monkeypatch.setattr(superlink, "CONNECTIONS", 3)
    assert asyncio.run(connect(5)) == [False] * 3 + [True] * 2


def test_a_stalled_or_greedy_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink, "IDLE_S", 0.1)
    monkeypatch.setattr(superlink, "ALL_BODIES_BYTES", 2 << 20)
    answers: list[int] = []

    async def app(*_: Any) -> None:
        raise AssertionError("nothing of it reaches Flower")

    async def send(message: Any) -> None:
        answers.extend([message["status"]] if "status" in message else [])

    async def run(part: int) -> None:
        async def receive() -> Any:
            await asyncio.sleep(0 if part else 10)
            return {"type": "http.request", "body": bytes(part), "more_body": True}

        control = superlink.LocalControl(app)
        await control({"type": "http", "path": "/v1/fleet/x"}, receive, send)
        assert control._held == 0

    asyncio.run(run(0))
    asyncio.run(run(1 << 20))
    assert answers == [408, 503]


def test_a_superlink_that_hangs_or_dies_is_replaced_and_knows_the_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "HEALTH_S", 0.2)
    monkeypatch.setattr(link, "ANSWER_S", 1.0)
    keys = KeyFolder(tmp_path / "keys")
    make_keys(keys.folder, ["127.0.0.1"], ["pi"])
    serving = options(tmp_path / "run", keys)
    with open_superlink(serving) as running:
        assert running._registered.keys() == {"pi"}
        monkeypatch.setattr(_internal.ControlClient, "start_run", lambda *_: 7)
        for how in (signal.SIGSTOP, signal.SIGKILL):
            first, home = cast(Any, running._process), running._home
            os.killpg(first.pid, how)
            wait_until(lambda: not running.is_healthy(), 30, "it is noticed")
            assert running._start_run()[0] == 7
            assert running.is_healthy()
            assert cast(Any, running._process).pid != first.pid
            assert first.poll() is not None
            assert running._registered.keys() == {"pi"}
            assert not home.exists()
            assert running._home.stat().st_mode & 0o777 == 0o700
    assert not running._home.exists()


def test_a_superlink_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    running = SuperLinkProcess(options(tmp_path))
    for _ in range(link.TRIES - 1):
        running._count_failure()
    with pytest.raises(link.ServerDiedError, match="died 3 times without finishing a round"):
        running._count_failure()


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's
def test_nothing_is_loaded_from_the_working_directory_or_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    evil = f"import pathlib\npathlib.Path({str(tmp_path / 'pwned')!r}).touch()\n"
    for name in ("ipaddress.py", "sitecustomize.py", "httpx.py"):
        (here / name).write_text(evil)
    monkeypatch.chdir(here)
    serving = options(here / "run")
    plant_app(serving.folder / "flower", evil)
    with open_superlink(serving) as running:
        running._control.start_run({"run-dir": str(serving.folder.resolve())})
        # Without a run in it, the server app says so and ends; it has been loaded by then.
        wait_until(
            lambda: (serving.folder / "failure.txt").exists() or (tmp_path / "pwned").exists(),
            60,
            "the server app has run",
        )
    assert not (tmp_path / "pwned").exists()


def plant_app(home: Path, evil: str) -> None:
    """Put another app where Flower would look for ours, had it its home there."""
    flower = _internal._use("control")
    manifest = resources.files("anycostfl.flower").joinpath("app", "pyproject.toml").read_bytes()
    content, _ = flower.build_fab_from_files({"pyproject.toml": manifest})
    digest = hashlib.sha256(content).hexdigest()
    folder = home / "apps" / f"anycostfl.anycostfl-app.0.1.0.{digest[:8]}"
    folder.mkdir(parents=True)
    text = manifest.decode().replace("anycostfl.flower.server:app", "planted:app")
    (folder / "pyproject.toml").write_text(text)
    (folder / "planted.py").write_text(
        evil + "from flwr.serverapp import ServerApp\napp = ServerApp()\n"
    )


def test_a_log_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    serving = options(tmp_path / "run")
    (serving.folder / "flower").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is a link"), open_superlink(serving):
        pass
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_log_is_rotated_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anycostfl.processes.LOG_BYTES", 10_000)
    path = tmp_path / "server.log"
    reading, writing = os.pipe()
    with path.open("ab") as other:  # the server app
        follow_output(os.fdopen(reading, "rb"), path)
        with os.fdopen(writing, "wb") as output:
            for number in range(1000):
                output.write(b"\x1b[91mline\x1b[0m %d \x07%s\n" % (number, b"x" * 5000))
        wait_until(lambda: "line 999 " in path.read_text(), 20, "all is written")
        other.write(b"from the app\n")
    sizes = [path.stat().st_size, path.with_name("server.log.1").stat().st_size]
    assert max(sizes) < 12_000
    lines = path.read_text().splitlines()
    assert lines[-1] == "from the app"
    assert lines[-2].startswith("line 999 \ufffdxxx")
    assert max(map(len, lines)) <= LINE_BYTES


def test_the_documented_program_registers_keys_and_starts_runs(
    tmp_path: Path, without: Callable[[str], None]
) -> None:
    """Against a real SuperLink; `flwr` takes seconds a call."""
    without("control")
    keys = KeyFolder(tmp_path / "keys")
    make_keys(keys.folder, ["127.0.0.1"], ["pi"])
    serving = options(tmp_path / "run", keys)
    with open_superlink(serving) as running:
        assert isinstance(running._control, link.FlwrProgram)
        assert running._registered.keys() == {"pi"}
        assert running._registered["pi"] > 0
        assert running._control.start_run({"run-dir": str(serving.folder.resolve())}) > 0
        wait_until((serving.folder / "failure.txt").exists, 90, "the server app has run")
        running._control.unregister(running._registered["pi"])
