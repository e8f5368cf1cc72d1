"""Keys, the filter in front of the SuperLink, and what a device accepts."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from base64 import b64decode
from contextlib import closing, suppress
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.app import Context, Message, RecordDict

from anycostfl.cli import build_app
from anycostfl.cli._rounds import resume_run
from anycostfl.cli.serve import for_devices
from anycostfl.codec import Upload
from anycostfl.config import Config, load_preset
from anycostfl.errors import AnycostError, ConfigError
from anycostfl.experiment import build_experiment, load_data, resolve
from anycostfl.flower import node
from anycostfl.flower._internal import FleetClient, date_reply, drop_messages, set_task
from anycostfl.flower.device import (
    Device,
    Setup,
    app,
    open_device,
    read_setup,
    recall,
    remember,
)
from anycostfl.flower.fleet import RoundPolicy
from anycostfl.flower.keys import (
    AUTHORITY_DAYS,
    SERVER_DAYS,
    KeyFolder,
    check_expiry,
    make_keys,
    names_of,
    private_key,
    public_key,
    public_pem,
)
from anycostfl.flower.link import ServerOptions, SuperLinkProcess
from anycostfl.flower.messages import (
    ReplyCollector,
    read_state,
    to_envelope,
    to_message,
    to_records,
    write_state,
)
from anycostfl.flower.node import Address, Signature
from anycostfl.flower.superlink import (
    BODY_BYTES,
    CLOSED_VARIABLE,
    OPEN_PATH,
    LocalControl,
    Receive,
    Scope,
    Send,
    is_local,
)
from anycostfl.planning.cost import Devices, make_devices
from anycostfl.processes import PARENT, safe_environment
from anycostfl.runs import begin
from anycostfl.state import tensors_of
from anycostfl.wire.envelope import TENSOR, Blob, Envelope, MessageError, blobs_of
from anycostfl.wire.messages import (
    Capabilities,
    DeviceRejectedError,
    ExperimentInfo,
    Result,
    RoundInfo,
    TrainTask,
    pack_fitted,
    pack_rejection,
    pack_weights,
    read_info,
    read_task,
    unpack_weights,
)
from flower_grid import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    HttpGrid,
    InMemoryObjectStore,
    Run,
    bytes_to_public_key,
    confirm_message_received,
    get_all_nested_objects,
    get_object_tree,
    through_bytes,
    verify_signature,
)
from small_runs import small_config, small_dataset

# --- keys -----------------------------------------------------------------------------------------


def test_a_client_that_trusts_the_authority_reaches_the_server_by_its_names(tmp_path: Path) -> None:
    make_keys(tmp_path, ["board.lan", "10.0.0.7"], [])
    keys = KeyFolder(tmp_path)
    assert names_of(keys.certificate) == ["board.lan", "10.0.0.7", "localhost", "127.0.0.1", "::1"]
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(keys.certificate, keys.certificate_key)
    client = ssl.create_default_context(cafile=keys.authority)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    for name in ("board.lan", "10.0.0.7", "127.0.0.1"):
        assert _handshake(server, client, name) == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(server, client, "elsewhere.lan")
    make_keys(tmp_path / "other", [], [])
    stranger = ssl.create_default_context(cafile=tmp_path / "other/ca.crt")
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(server, stranger, "board.lan")


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> str | None:
    """Both ends in memory, a step each in turn."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    a = client.wrap_bio(down, up, server_hostname=name)
    b = server.wrap_bio(up, down, server_side=True)
    for _ in range(6):
        for end in (a, b):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return a.version()


def test_keys_that_exist_are_kept_and_private_ones_are_private(tmp_path: Path) -> None:
    make_keys(tmp_path, ["10.0.0.7"], ["pi"])
    keys = KeyFolder(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert make_keys(tmp_path, ["10.0.0.7"], ["pi"]) == []
    made = make_keys(tmp_path, ["10.0.0.7"], ["pi", "nano"])
    assert made == [keys.device("nano"), keys.device("nano.pub")]
    assert {p: p.read_bytes() for p in before} == before
    for path in (keys.authority_key, keys.certificate_key, keys.device("pi")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert make_keys(tmp_path, ["10.0.0.8"], []) == [keys.certificate]  # its key stays
    assert keys.certificate_key.read_bytes() == before[keys.certificate_key]
    assert names_of(keys.certificate)[:2] == ["10.0.0.7", "10.0.0.8"]
    assert keys.authority.read_bytes() == before[keys.authority]
    assert list(keys.registered()) == ["nano", "pi"]


@pytest.mark.parametrize(
    "host", ["", "192.168.1.300", "10.0.0.7:9443", "https://board.lan", "my board", "-a.lan"]
)
def test_a_host_must_be_a_name_or_an_address(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="--host: given"):
        make_keys(tmp_path, ["board.lan", host], [])
    assert not (tmp_path / "server.crt").exists()


def test_the_keys_command_says_where_the_server_can_be_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(*arguments: str) -> str:
        build_app()(["keys", "--out", str(tmp_path), *arguments], standalone_mode=False)
        return " ".join("".join(capsys.readouterr()).split())

    assert "only this machine can reach the server" in say("pi")
    assert "restart `anycostfl serve`" in say("--host", "pi4")
    assert "note:" not in say("nano")


def test_lost_files_of_a_key_folder_are_made_again_and_fit(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path)
    make_keys(tmp_path, ["10.0.0.7"], ["pi"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    keys.authority.unlink()
    assert make_keys(tmp_path, ["10.0.0.7"], ["pi"]) == [keys.authority]
    authority = x509.load_pem_x509_certificate(keys.authority.read_bytes())
    server = x509.load_pem_x509_certificate(keys.certificate.read_bytes())
    server.verify_directly_issued_by(authority)

    twin = keys.device("pi").with_name("pi.pub")
    twin.unlink()
    assert make_keys(tmp_path, [], ["pi"]) == [twin]
    kept = [path for path in before if path != keys.authority]
    assert all(path.read_bytes() == before[path] for path in kept)

    keys.certificate_key.unlink()
    assert make_keys(tmp_path, [], []) == [keys.certificate, keys.certificate_key]
    assert "10.0.0.7" in names_of(keys.certificate)
    with pytest.raises(ConfigError, match=r"no \.pub at the end"):
        make_keys(tmp_path, [], ["pi4.pub"])


@pytest.mark.parametrize(
    ("empty", "made"),
    [
        (["ca.key", "ca.crt"], ["ca.crt", "ca.key", "server.crt"]),
        (["server.crt"], ["server.crt"]),
        (["server.key"], ["server.crt", "server.key"]),
        (["devices/pi"], ["devices/pi", "devices/pi.pub"]),
        (["devices/pi.pub"], ["devices/pi.pub"]),
    ],
)
def test_files_that_a_full_disk_left_empty_are_made_again_and_fit(
    tmp_path: Path, empty: list[str], made: list[str]
) -> None:
    keys = KeyFolder(tmp_path)
    make_keys(tmp_path, ["10.0.0.7"], ["pi"])
    for name in empty:
        (tmp_path / name).write_bytes(b"")
    assert make_keys(tmp_path, ["10.0.0.7"], ["pi"]) == [tmp_path / name for name in made]
    authority = x509.load_pem_x509_certificate(keys.authority.read_bytes())
    server = x509.load_pem_x509_certificate(keys.certificate.read_bytes())
    server.verify_directly_issued_by(authority)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(keys.certificate, keys.certificate_key)
    assert private_key(keys.device("pi")).public_key() == load_ssh_public_key(
        keys.registered()["pi"].read_bytes()
    )
    assert make_keys(tmp_path, ["10.0.0.7"], ["pi"]) == []


def test_a_server_certificate_of_a_lost_authority_is_made_anew(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path)
    make_keys(tmp_path, ["10.0.0.7"], [])
    keys.authority.unlink()
    keys.authority_key.unlink()
    made = [keys.authority, keys.authority_key, keys.certificate]
    assert make_keys(tmp_path, [], []) == made
    authority = x509.load_pem_x509_certificate(keys.authority.read_bytes())
    server = x509.load_pem_x509_certificate(keys.certificate.read_bytes())
    server.verify_directly_issued_by(authority)
    assert "10.0.0.7" in names_of(keys.certificate)


@pytest.mark.parametrize("name", ["ca.crt", "ca.key", "server.crt", "server.key"])
def test_a_damaged_file_of_a_key_folder_is_named(tmp_path: Path, name: str) -> None:
    make_keys(tmp_path, ["10.0.0.7"], [])
    (tmp_path / name).write_bytes(b"-----BEGIN")
    with pytest.raises(ConfigError, match=f"{name}: not a "):
        make_keys(tmp_path, ["10.0.0.8"], [])


def test_a_key_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_file: int) -> None:
        assert stat.S_IMODE((tmp_path / "ca.key.part").stat().st_mode) == 0o600
        raise OSError("no space left on device")

    monkeypatch.setattr("anycostfl.files.os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        make_keys(tmp_path, [], [])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_certificate_about_to_expire_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anycostfl.flower.keys.SERVER_DAYS", 20)
    make_keys(tmp_path, ["10.0.0.7"], [])
    monkeypatch.undo()
    assert make_keys(tmp_path, [], []) == [KeyFolder(tmp_path).certificate]
    assert "10.0.0.7" in names_of(KeyFolder(tmp_path).certificate)
    assert make_keys(tmp_path, [], []) == []


def test_certificates_that_end_are_warned_about_and_refused_once_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, real = KeyFolder(tmp_path), datetime.now(UTC)
    make_keys(tmp_path, ["10.0.0.7"], [])
    assert check_expiry(keys) == []

    def in_days(days: int) -> None:
        moved = SimpleNamespace(now=lambda _zone: real + timedelta(days=days))
        monkeypatch.setattr("anycostfl.flower.keys.datetime", moved)

    in_days(SERVER_DAYS - 29)
    (warning,) = check_expiry(keys)
    assert f"{keys.certificate} expires on " in warning
    in_days(SERVER_DAYS + 1)
    with pytest.raises(ConfigError, match=r"server\.crt: expired on .* Renew it with"):
        check_expiry(keys)
    with pytest.raises(ConfigError, match="expired on"):
        build_app()(["serve", "--keys", str(tmp_path)], standalone_mode=False)
    in_days(AUTHORITY_DAYS + 1)
    assert len(check_expiry(keys, strict=False)) == 2


def test_the_authoritys_key_may_have_a_passphrase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*arguments: str) -> None:
        build_app()(["keys", "--out", str(tmp_path), *arguments], standalone_mode=False)

    make("--host", "10.0.0.7", "pi")
    monkeypatch.setenv("ANYCOSTFL_PASSPHRASE", "correct horse battery")
    make("--passphrase")
    key = KeyFolder(tmp_path).authority_key
    assert b"ENCRYPTED" in key.read_bytes()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    make("nano")  # devices need no authority
    with pytest.raises(ConfigError, match="give its passphrase with --passphrase"):
        make("--host", "10.0.0.8")
    monkeypatch.setenv("ANYCOSTFL_PASSPHRASE", "another passphrase")
    with pytest.raises(ConfigError, match="this is not its passphrase"):
        make("--host", "10.0.0.8", "--passphrase")
    monkeypatch.setenv("ANYCOSTFL_PASSPHRASE", "correct horse battery")
    make("--host", "10.0.0.8", "--passphrase")
    assert "10.0.0.8" in names_of(KeyFolder(tmp_path).certificate)
    monkeypatch.setenv("ANYCOSTFL_PASSPHRASE", "short")
    with pytest.raises(ConfigError, match="at least 12"):
        make("--passphrase")


def test_leaked_keys_are_replaced(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path)
    make_keys(tmp_path, ["10.0.0.7"], ["a", "b"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def make(*arguments: str) -> set[str]:
        build_app()(["keys", "--out", str(tmp_path), *arguments], standalone_mode=False)
        found = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        changed = {path.name for path, _ in before.items() ^ found.items()}
        before.clear()
        before.update(found)
        return changed

    assert make("--renew", "a") == {"a", "a.pub"}
    assert make("--revoke", "b") == {"b", "b.pub"}
    assert list(keys.registered()) == ["a"]
    assert make("--renew-server") == {"server.key", "server.crt"}
    assert "10.0.0.7" in names_of(keys.certificate)
    assert make("--renew-authority") == {"ca.crt", "ca.key", "server.key", "server.crt"}
    assert "10.0.0.7" in names_of(keys.certificate)
    with pytest.raises(ConfigError, match="no key of b"):
        make("--revoke", "b")


def test_a_certificate_that_has_expired_is_said_to_have() -> None:
    def refuse() -> None:
        raise httpx.ConnectError("[SSL] certificate verify failed: certificate has expired")

    with pytest.raises(node.RefusedError, match="is not valid today"):
        node.patiently(Address("server:1", None, None), refuse)


def test_the_folder_of_keys_is_followed_whatever_is_done_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Control:
        """Flower's: a key is let in once."""

        def __init__(self) -> None:
            self.known: list[bytes] = []

        def register(self, _name: str, path: Path) -> int:
            key = public_key(path)
            if key in self.known:
                raise ConfigError([f"{path} is refused: it was registered before"])
            self.known.append(key)
            return len(self.known)

        def unregister(self, node_id: int) -> None:
            out.append(node_id)

    out: list[int] = []
    make_keys(tmp_path / "keys", [], ["a", "b"])
    make_keys(tmp_path / "others", [], ["a"])
    (tmp_path / "flower").mkdir()
    devices = tmp_path / "keys" / "devices"
    options = ServerOptions(tmp_path, "127.0.0.1", 1, KeyFolder(tmp_path / "keys"), RoundPolicy())
    link = SuperLinkProcess(options)
    link._control = cast("Any", Control())

    link.register()
    assert link._registered == {"a": 1, "b": 2}
    (devices / "a.pub").write_bytes((tmp_path / "others" / "devices" / "a.pub").read_bytes())
    link.register()  # a stolen key that was replaced is out at once
    assert link._registered == {"a": 3, "b": 2}
    assert out == [1]
    (devices / "new.pub").write_bytes(b"ecdsa-sha2-nistp384 half a k")
    (devices / "empty.pub").touch()
    (devices / "b.pub").rename(devices / "c.pub")
    link.register()
    assert link._registered == {"a": 3}
    assert out == [1, 2]
    assert "new.pub: not a public key" in caplog.text
    assert "empty.pub: not a public key" in caplog.text
    assert "c.pub is refused: it was registered before" in caplog.text


def test_a_reply_that_cannot_be_read_takes_no_other_with_it() -> None:
    class Grid:
        """As Flower's: every reply that was asked for, or an exception."""

        def pull_messages(self, ids: list[str]) -> list[object]:
            if "corrupt" in ids:
                raise ValueError("garbage")
            return [SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=i)) for i in ids]

    replies = ReplyCollector(cast("Any", Grid()))
    names = {"corrupt", *(f"honest-{i}" for i in range(39))}
    replies.watch(sorted(names), 5.0)
    came = dict(filter(None, (replies.take(5.0) for _ in names)))
    assert came.keys() == names
    corrupt = came.pop("corrupt")
    assert isinstance(corrupt, MessageError)
    assert str(corrupt) == "ValueError: garbage"
    assert all(cast("Any", m).metadata.reply_to_message_id == name for name, m in came.items())


def test_a_task_that_was_never_fetched_leaves_nothing_in_the_superlink() -> None:
    store = InMemoryObjectStore()

    class Client:
        """As Flower's, straight to its object store."""

        def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802 - Flower's name
            asked = SimpleNamespace(object_store=store)
            confirm_message_received(request, cast("Any", asked), cast("Any", None))

    set_task(run_id=1, node_id=1, task_id=1)
    grid = HttpGrid(token="token")  # noqa: S106 - nobody asks for it
    grid.set_run(Run.create_empty(1))
    grid._client = cast("Any", Client())
    weights = {"w": torch.zeros(1000)}
    lost, other = (
        to_message(Envelope({}, {key: blobs_of(weights)}), 5, "train", 0, None) for key in "ab"
    )
    for message in (lost, other):
        store.preregister(1, get_object_tree(message))
        for name, part in get_all_nested_objects(message).items():
            store.put(name, part.deflate())
    drop_messages(grid, [lost.object_id])
    assert set(store.store) == set(get_all_nested_objects(other))
    drop_messages(grid, [lost.object_id, other.object_id])
    assert len(store) == 0


def test_a_reply_that_is_slow_to_arrive_holds_up_no_other() -> None:
    arrived = threading.Event()

    class Grid:
        """As Flower's: it waits until all parts of a reply are there."""

        def pull_messages(self, ids: list[str]) -> list[str]:
            return ids if ids != ["slow"] or arrived.wait(30.0) else []

    replies = ReplyCollector(cast("Any", Grid()))
    names = {"slow", *(f"quick-{i}" for i in range(50))}
    replies.watch(sorted(names), 20.0)
    assert {cast("Any", replies.take(10.0))[0] for _ in range(50)} == names - {"slow"}
    arrived.set()
    assert cast("Any", replies.take(10.0)) == ("slow", "slow")


def test_the_server_may_call_itself_by_its_own_address() -> None:
    client = ("192.168.1.10", 1234)
    assert is_local(client, ("192.168.1.10", 9092))
    assert not is_local(client, ("192.168.1.11", 9092))
    assert not is_local(client, ("unix socket", None))


@pytest.mark.parametrize(
    ("host", "reached"),
    [("0.0.0.0", "127.0.0.1:9443"), ("::", "[::1]:9443"), ("10.0.0.7", "10.0.0.7:9443")],  # noqa: S104
)
def test_a_server_that_listens_everywhere_is_reached_where_it_listens(
    tmp_path: Path, host: str, reached: str
) -> None:
    assert ServerOptions(tmp_path, host, 9443, None, RoundPolicy()).address == reached


def test_public_and_private_keys_belong_together(tmp_path: Path) -> None:
    make_keys(tmp_path, [], ["pi"])
    keys = KeyFolder(tmp_path)
    mine = private_key(keys.device("pi")).public_key()
    assert public_key(keys.registered()["pi"]) == public_pem(mine)
    for wrong in (lambda: make_keys(tmp_path, [], ["../pi"]), lambda: private_key(keys.authority)):
        with pytest.raises(ConfigError):
            wrong()


# --- the filter -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "caller", "allowed"),
    [
        ("/v1/fleet/pull-messages", "192.168.1.9", True),
        ("/health", "192.168.1.9", True),
        ("/v1/control/start-run", "192.168.1.9", False),
        ("/v1/control/register-node", "fe80::1", False),
        ("/v1/runtime/acquire-task", "10.0.0.1", False),
        ("/docs", "10.0.0.1", False),
        ("/v1/fleet/../control/start-run", "127.0.0.1", True),
        ("/v1/control/start-run", "127.0.0.1", True),
        ("/v1/control/start-run", "::1", True),
        ("/v1/control/start-run", "::ffff:127.0.0.1", True),
        ("/v1/control/start-run", "::ffff:10.0.0.1", False),
        ("/v1/control/start-run", "not an address", False),
    ],
)
def test_control_is_for_this_machine_only(path: str, caller: str, *, allowed: bool) -> None:
    scope: dict[str, Any] = {"type": "http", "path": path, "client": (caller, 1234)}
    reached: list[str] = []
    answers: list[Any] = []

    async def behind(scope: Scope, _receive: Receive, _send: Send) -> None:
        reached.append(scope["path"])

    async def send(message: Any) -> None:
        answers.append(message)

    async def receive() -> Any:
        assert allowed, "nothing of a stranger's request is read"
        return {"type": "http.request"}

    asyncio.run(LocalControl(behind)({**scope, "method": "POST"}, receive, send))
    assert reached == ([path] if allowed else [])
    assert allowed or answers[0]["status"] == 403


def test_devices_wait_until_all_keys_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLOSED_VARIABLE, "1")
    reached: list[str] = []

    async def behind(scope: Scope, _receive: Receive, _send: Send) -> None:
        reached.append(scope["path"])

    async def ask(control: LocalControl, path: str, caller: str) -> int:
        answers: list[Any] = []

        async def send(message: Any) -> None:
            answers.append(message)

        async def receive() -> Any:
            return {"type": "http.request"}

        scope = {"type": "http", "path": path, "client": (caller, 1), "method": "POST"}
        await control(scope, receive, send)
        return int(answers[0]["status"]) if answers else 200

    async def all_of() -> list[int]:
        control, device = LocalControl(behind), "192.168.1.9"
        return [
            await ask(control, "/v1/fleet/activate-node", device),
            await ask(control, OPEN_PATH, device),  # a stranger cannot open it
            await ask(control, "/v1/fleet/activate-node", device),
            await ask(control, "/v1/control/register-node", "127.0.0.1"),
            await ask(control, OPEN_PATH, "127.0.0.1"),
            await ask(control, "/v1/fleet/activate-node", device),
        ]

    assert asyncio.run(all_of()) == [503, 403, 503, 200, 200, 200]
    assert reached == ["/v1/control/register-node", "/v1/fleet/activate-node"]


@pytest.mark.parametrize(("parts", "read"), [(6, True), (7, False), (7000, False)])
def test_a_request_longer_than_a_part_of_a_message_is_not_read(parts: int, *, read: bool) -> None:
    came: list[bytes] = []
    answers: list[Any] = []
    taken = 0

    async def behind(_scope: Scope, receive: Receive, _send: Send) -> None:
        came.append((await receive())["body"])

    async def send(message: Any) -> None:
        answers.append(message)

    async def receive() -> Any:
        nonlocal taken
        taken += 1
        return {"type": "http.request", "body": bytes(1 << 20), "more_body": taken < parts}

    scope = {"type": "http", "path": "/v1/fleet/push-object", "client": ("203.0.113.9", 5555)}
    asyncio.run(LocalControl(behind)({**scope, "method": "POST"}, receive, send))
    assert [len(body) for body in came] == ([6 << 20] if read else [])
    assert taken == min(parts, 7)
    assert read or answers[0]["status"] == 413


def test_a_long_result_is_sent_in_parts_that_the_filter_reads() -> None:
    set_task(run_id=1, node_id=1, task_id=1)
    resources = make_devices(**{item.name: 1.0 for item in fields(Devices)})
    result = Result(bytes(30 << 20), "", 1.0, Capabilities(0, 0, 0.0, resources))
    parts = get_all_nested_objects(to_message(result.pack(), 5, "train", 0, None)).values()
    assert max(len(part.deflate()) for part in parts) < BODY_BYTES - (1 << 19)


def test_a_superlink_whose_parent_died_while_it_came_up_ends(tmp_path: Path) -> None:
    ours = safe_environment(tmp_path)
    assert ours[PARENT] == str(os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-P", "-m", "anycostfl.flower.superlink", "--insecure"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    env = {**ours, PARENT: str(os.getppid())}  # as if this process had been another, now dead
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        process.wait(90)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# --- devices --------------------------------------------------------------------------------------


def told(config: Config) -> ExperimentInfo:
    """What devices are told of an experiment by a server that holds its test data."""
    return ExperimentInfo.of(build_experiment(resolve(config), load_data(config)))


def device_of(setup: Setup, info: ExperimentInfo) -> Device:
    return open_device(read_setup(setup.node_config()), info)


def test_a_setup_survives_flowers_node_configuration() -> None:
    setup = Setup(
        device=3, profile="jetson-nano", rate_bps=1e6, latency_s=2.0, energy_j=0.5,
        data="mine.npz", split=True, threads=4, server_files=True,
    )  # fmt: skip
    assert read_setup(setup.node_config()) == setup
    assert read_setup(Setup(0).node_config()) == Setup(0)
    simulated = read_setup({"partition-id": 7, "num-partitions": 9})
    assert simulated == Setup(device=7, server_files=True)
    with pytest.raises(ConfigError, match="device: missing"):
        read_setup({})


def test_a_device_has_the_capabilities_that_its_owner_says(tmp_path: Path) -> None:
    info = told(small_config(tmp_path))
    own = str(tmp_path / "stripes.npz")
    setup = Setup(1, "raspberry-pi-5", 2e6, 0.0, 0.5, data=own, split=True)
    known = device_of(setup, info).capabilities(4, {})
    assert (known.device, known.round, known.distance_m) == (1, 4, 0.0)
    assert known.resources.samples.tolist() == [20]
    assert known.resources.frequency_max_hz.tolist() == [2.4e9]
    assert known.resources.rate_bps.tolist() == [2e6]
    assert known.resources.energy_j.tolist() == [0.5]
    assert known.resources.latency_s.tolist() == [info.fleet.latency_s]
    all_of_it = replace(setup, split=False, latency_s=3.0)
    known = device_of(all_of_it, info).capabilities(4, {})
    assert known.resources.samples.tolist() == [240]
    assert known.resources.latency_s.tolist() == [3.0]


def test_the_measured_uplink_is_used_unless_the_owner_gives_another(tmp_path: Path) -> None:
    info = told(small_config(tmp_path))
    text = resources.files("anycostfl").joinpath("profiles", "raspberry-pi-5.toml").read_text()
    profile = tmp_path / "mine.toml"
    profile.write_text(f"rate_bps = 3e6\n{text}")
    for given, used in ((0.0, 3e6), (2e6, 2e6)):
        setup = Setup(1, str(profile), given, 0.0, 0.5, data=str(tmp_path / "stripes.npz"))
        assert device_of(setup, info).capabilities(0, {}).resources.rate_bps.tolist() == [used]
    about = ["join", "localhost:1", "--device", "0", "--insecure", "--believe", "--profile"]
    with pytest.raises(ConfigError) as measured:
        build_app()([*about, str(profile)], standalone_mode=False)
    assert measured.value.problems == ("--energy-j: needed with --believe",)
    with pytest.raises(ConfigError, match="--rate-bps: needed with --believe"):
        build_app()([*about, "raspberry-pi-5"], standalone_mode=False)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--believe"], "--believe: needs --profile"),
        (["--confidence", "1"], "--confidence: given 1, must be from 0.5 to below 1"),
        (["--memory-bytes", "-1"], "--memory-bytes: given -1, must be >= 0"),
        (["--patience-s", "inf"], "--patience-s: given inf, must be >= 0"),
        (["--profile", "raspberry-pi-5", "--rate-bps", "2e7", "--energy-j", "nan"], "given nan"),
        (["--data", "nowhere.npz"], "--data: there is no file nowhere.npz"),
    ],
)
def test_options_of_join_that_are_ignored_or_impossible_are_refused(
    options: list[str], problem: str
) -> None:
    about = ["join", "localhost:1", "--device", "0", "--insecure"]
    with pytest.raises(ConfigError, match=problem):
        build_app()([*about, *options], standalone_mode=False)


def test_a_device_trains_on_few_samples_of_its_own_prepared_as_everybodys(tmp_path: Path) -> None:
    info = told(small_config(tmp_path))
    mean, std = (info.prepared_by()[name] for name in ("mean", "std"))
    own = tmp_path / "mine.npz"
    dark = np.full((7, 28, 28), 51, np.uint8)  # fewer than the fleet has devices, nothing to test
    np.savez(own, train_images=dark, train_labels=np.arange(7))
    for profile in ("", "raspberry-pi-5"):
        setup = Setup(11, profile, 2e6, 0.0, 0.5, data=str(own))
        device = device_of(setup, info)
        assert device.capabilities(0, {}).resources.samples.tolist() == [7]
        assert device.samples.targets.tolist() == list(range(7))
        expected = (np.float32(51) / 255 - mean.numpy()[0]) / std.numpy()[0]
        wanted = torch.full((7, 1, 28, 28), float(expected))
        assert torch.equal(device.samples.inputs, wanted)
    coloured = pack_fitted({"mean": torch.tensor([0.1, 0.2, 0.3]), "std": torch.ones(3)})
    with pytest.raises(ConfigError, match="given 1 channels, must have 3 here"):
        device_of(setup, replace(info, fitted=coloured))


def test_a_device_prepares_the_experiments_own_data_as_the_server_does(tmp_path: Path) -> None:
    config = resolve(small_config(tmp_path))
    info = RoundInfo(told(config), 0)
    assert info.experiment.prepared_by().keys() == {"mean", "std"}
    set_task(run_id=1, node_id=1, task_id=1)
    arrived = through_bytes(to_message(info.pack(), 5, "query", 0, None))
    read = read_info(to_envelope(arrived.content))
    assert read == info
    everything = Setup(0, data=str(small_dataset(tmp_path)))
    here, there = device_of(everything, read.experiment), load_data(config)
    assert torch.equal(here.samples.inputs, there.train.inputs)
    assert torch.equal(here.samples.targets, there.train.targets)


@pytest.mark.parametrize(
    ("mean", "std"), [([0.5], [0.0]), ([0.5], []), ([math.nan], [1.0]), ([0.5], None)]
)
def test_what_normalises_nothing_is_refused(
    tmp_path: Path, mean: list[float], std: list[float] | None
) -> None:
    info = ExperimentInfo.of(build_experiment(resolve(small_config(tmp_path))))
    fitted = {"mean": torch.tensor(mean)} | ({} if std is None else {"std": torch.tensor(std)})
    broken = read_info(RoundInfo(replace(info, fitted=pack_fitted(fitted)), 0).pack())
    own = Setup(0, data=str(small_dataset(tmp_path)))
    with pytest.raises(AnycostError, match=r"what samples are prepared by|one number > 0"):
        device_of(own, broken.experiment)


def test_a_device_says_the_sums_of_its_samples_until_it_knows_what_to_prepare_by(
    tmp_path: Path,
) -> None:
    info = ExperimentInfo.of(build_experiment(resolve(small_config(tmp_path))))
    assert info.fitted == b""
    own = Setup(3, data=str(small_dataset(tmp_path)), split=True)
    device = device_of(own, info)
    sums = device.capabilities(0, {}).sums
    assert sums.keys() == {"count", "sum", "squares"}
    assert sums["count"].tolist() == [20 * 28 * 28]  # of its own part only
    task = TrainTask(
        info=RoundInfo(info, 0), device=3, alpha=1.0, widths={}, upload=Upload(0.1, 0, b""),
        seed=0, learning_rate=0.1, weights=b"", moved={},
    )  # fmt: skip
    with pytest.raises(MessageError, match="does not say what samples are prepared by"):
        device.perform(task, {}, None)
    known = replace(info, fitted=pack_fitted({"mean": torch.zeros(1), "std": torch.ones(1)}))
    assert device_of(own, known).capabilities(0, {}).sums == {}


@pytest.mark.parametrize("evaluate", ["server", "devices"])
def test_a_device_without_test_samples_holds_some_out_only_if_devices_evaluate(
    tmp_path: Path, evaluate: str
) -> None:
    info = told(small_config(tmp_path, f"data.evaluate={evaluate}"))
    own = tmp_path / "mine.npz"
    np.savez(own, inputs=np.zeros((30, 1, 28, 28), np.uint8), targets=np.arange(30) % 10)
    device = device_of(Setup(0, data=str(own)), info)
    sizes = (len(device.samples), len(device.test))
    assert sizes == ((27, 3) if evaluate == "devices" else (30, 0))


def test_a_device_reads_no_file_that_the_server_names(tmp_path: Path) -> None:
    info = told(small_config(tmp_path))
    with pytest.raises(ConfigError, match="--data"):
        device_of(Setup(0), info)
    own = Setup(0, data=str(small_dataset(tmp_path)))
    assert device_of(own, info).capabilities(0, {}).device == 0
    named = replace(info, fleet=replace(info.fleet, profiles=("/etc/secret.toml",)))
    with pytest.raises(ConfigError, match="--profile"):
        device_of(own, named).capabilities(0, {})
    described = replace(own, profile="jetson-nano", rate_bps=1e6, energy_j=1)
    assert device_of(described, named).capabilities(0, {}).device == 0
    with pytest.raises(ConfigError, match="must be 0 to 11"):
        device_of(replace(own, device=12), info)


def test_a_device_remembers_the_last_round_and_the_one_before(tmp_path: Path) -> None:
    state = RecordDict()
    info = ExperimentInfo.of(build_experiment(resolve(small_config(tmp_path))))

    def at(number: int, fingerprint: str = "a") -> RoundInfo:
        return RoundInfo(replace(info, fingerprint=fingerprint), number)

    def value(info: RoundInfo) -> float | None:
        memory = recall(state, info)
        return None if memory is None else float(memory["w"])

    assert value(at(0)) is None
    remember(state, at(0), {"w": torch.tensor(1.0)})
    remember(state, at(3), {"w": torch.tensor(2.0)})
    assert (value(at(4)), value(at(3)), value(at(2))) == (2.0, 1.0, None)
    remember(state, at(3), {"w": torch.tensor(2.5)})  # the round is repeated
    assert (value(at(4)), value(at(3))) == (2.5, 1.0)
    assert value(at(4, "another experiment")) is None


def test_a_device_that_the_server_rejects_ends_and_says_why() -> None:
    set_task(run_id=1, node_id=1, task_id=1)
    context = Context(1, 5, {"device": 0}, RecordDict(), {})
    rejection = to_message(pack_rejection("device 0 is another key's"), 5, "query", 0, None)
    with pytest.raises(DeviceRejectedError, match="rejects this device: device 0 is another"):
        node.answer(app, rejection, context)


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    net = build_experiment(resolve(small_config(tmp_path))).net
    state = tensors_of(net.module)
    plan, wider = net.plan(0.3), net.plan(0.6)
    packed = pack_weights(net, state, plan)
    unpacked = unpack_weights(net, plan, packed)
    for name, part in net.take(state, plan).items():
        assert torch.equal(unpacked[name], part)
    with pytest.raises(MessageError, match="the same model"):
        unpack_weights(net, wider, packed)


def test_tensors_of_every_type_survive_flowers_records() -> None:
    state = {
        "a": torch.randn(3, 2),
        "b": torch.arange(5),
        "c": torch.randn(4).to(torch.bfloat16),
        "d": torch.tensor(1.5),
        "e": torch.zeros(0, 3),
    }
    records = RecordDict()
    write_state(records, "s", state)
    back = read_state(records, "s")
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor)
        assert back[name].dtype == tensor.dtype
    records.array_records["s"]["a"].shape = (3, 3)
    with pytest.raises(MessageError, match="bytes"):
        read_state(records, "s")
    write_state(records, "s", {})
    assert read_state(records, "s") == {}
    info = RoundInfo(ExperimentInfo.of(build_experiment(load_preset("demo"))), 0)
    with pytest.raises(MessageError, match="without task"):
        read_task(to_envelope(to_records(info.pack())))


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve"], "Make it with `anycostfl keys"),
        (["serve", "--resume", "nowhere", "--insecure"], "holds no run"),
        (
            ["serve", "--insecure", "--min-replies", "11"],
            "--min-replies: given 11, must be 1 to 10",
        ),
        (["serve", "--insecure", "--wait-for", "41"], "--wait-for: given 41, must be 0"),
        (["join", "localhost:1", "--device", "0"], "--key: needed"),
        (["join", "localhost:1", "--device", "0", "--insecure", "--profile", "pi"], "no device"),
        (["run", "--engine", "spark"], "must be own or flower"),
    ],
)
def test_mistakes_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AnycostError, match=re.escape(message)):
        build_app()(arguments, standalone_mode=False)
    assert not list(tmp_path.iterdir())


def test_a_simulated_run_is_saved_after_every_round_once_it_is_served(
    tmp_path: Path,
) -> None:
    begin(tmp_path / "run", small_config(tmp_path, "run.checkpoint_every=5"))
    config = for_devices(resume_run(tmp_path / "run", None, {}, simulated=False).config)
    assert (config.run.checkpoint_every, config.training.precision) == (1, "fp32")


# --- wrong clocks ---------------------------------------------------------------------------------


class StrictServer:
    """Takes what is signed with a time near its own, as Flower's does."""

    def __init__(self, ahead: timedelta) -> None:
        self.ahead, self.asked = ahead, 0

    def __call__(self, context: Any) -> httpx.Response:
        self.asked += 1
        headers, now = context.request.headers, datetime.now(UTC) + self.ahead
        when = headers[TIMESTAMP_HEADER]
        key = bytes_to_public_key(b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER]))
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER])
        good = abs(now - datetime.fromisoformat(when)) < timedelta(seconds=5)
        good = good and verify_signature(key, when.encode(), signature)
        return httpx.Response(200 if good else 401, headers={"date": format_datetime(now)})


def test_a_device_with_a_wrong_clock_uses_the_servers() -> None:
    signature = Signature(ec.generate_private_key(ec.SECP384R1()))
    server = StrictServer(timedelta(days=-20_000))

    def ask() -> int:
        request = SimpleNamespace(request=httpx.Request("POST", "http://server"))
        return signature.intercept(request, server).status_code

    assert [ask(), ask(), ask()] == [200] * 3
    assert server.asked == 4  # one refusal, and then it knows
    server.ahead = timedelta(hours=7)
    assert [ask(), ask()] == [200] * 2
    assert server.asked == 7


def test_a_device_signs_no_time_far_in_the_future() -> None:
    signature = Signature(ec.generate_private_key(ec.SECP384R1()))
    server, latest = StrictServer(timedelta(days=3650)), datetime.now(UTC)

    def oracle(context: Any) -> httpx.Response:
        nonlocal latest
        latest = max(latest, datetime.fromisoformat(context.request.headers[TIMESTAMP_HEADER]))
        return server(context)

    request = SimpleNamespace(request=httpx.Request("POST", "http://server"))
    for days in (3650, 2):
        server.ahead = timedelta(days=days)
        assert signature.intercept(request, oracle).status_code == 401
    assert latest < datetime.now(UTC) + timedelta(minutes=1)
    server.ahead = timedelta(hours=20)
    assert signature.intercept(request, oracle).status_code == 200


def test_two_threads_that_are_refused_at_once_both_sign_again() -> None:
    signature = Signature(ec.generate_private_key(ec.SECP384R1()))
    server = StrictServer(timedelta(hours=3))
    nested: list[Any] = []

    def busy(context: Any) -> httpx.Response:
        answer = server(context)
        if not nested:  # meanwhile the heartbeat is refused, too, and learns the time
            other = SimpleNamespace(request=httpx.Request("POST", "http://server"))
            nested.append(other)
            assert signature.intercept(other, server).status_code == 200
        return answer

    request = SimpleNamespace(request=httpx.Request("POST", "http://server"))
    assert signature.intercept(request, busy).status_code == 200


def test_a_server_whose_date_header_is_stale_is_asked_again() -> None:
    signature = Signature(ec.generate_private_key(ec.SECP384R1()))
    server = StrictServer(timedelta())

    def stale(context: Any) -> httpx.Response:
        answer = server(context)
        if server.asked == 1:  # uvicorn writes the time of day down once a second
            answer.headers["date"] = format_datetime(datetime.now(UTC))
        return answer

    server.ahead = timedelta(minutes=-7)
    request = SimpleNamespace(request=httpx.Request("POST", "http://server"))
    assert signature.intercept(request, stale).status_code == 200
    assert server.asked == 3


def test_a_stranger_is_refused_whatever_the_time_and_gives_up() -> None:
    signature, asked = Signature(ec.generate_private_key(ec.SECP384R1())), 0

    def refuse(_context: Any) -> httpx.Response:
        nonlocal asked
        asked += 1
        return httpx.Response(401, headers={"date": format_datetime(datetime.now(UTC))})

    request = SimpleNamespace(request=httpx.Request("POST", "http://server"))
    assert signature.intercept(request, refuse).status_code == 401
    assert asked == 2  # once more, as the time in the first answer may have been an old one


def test_a_reply_expires_with_its_message_whatever_clock_the_device_has() -> None:
    set_task(run_id=1, node_id=1, task_id=1)
    question = Message(RecordDict(), 5, "train", ttl=100.0)
    reply = Message(RecordDict(), reply_to=question)
    question.metadata.__dict__["_created_at"] = 2e9
    date_reply(reply, question, 30.0)
    assert (reply.metadata.created_at, reply.metadata.ttl) == (2e9 + 30.0, 70.0)


@pytest.mark.parametrize("shape", [(0, -1, 1), (-1, -4), (5,)])
def test_arrays_of_impossible_shapes_are_refused(shape: tuple[int, ...]) -> None:
    blob = Blob(TENSOR, bytes(0 if 0 in shape else 4), "uint8", shape)
    records = to_records(Envelope({}, {"moved": {"conv": blob}}))
    with pytest.raises(MessageError, match="an array of shape"):
        read_state(records, "moved")


def test_a_connection_that_breaks_in_the_handshake_is_tried_again(
    tmp_path: Path,
) -> None:
    make_keys(tmp_path, ["127.0.0.1"], ["pi"])
    folder = KeyFolder(tmp_path)
    key = private_key(folder.device("pi"))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def slam() -> None:
            with suppress(OSError):
                while True:
                    listener.accept()[0].close()

        threading.Thread(target=slam, daemon=True).start()
        server = f"127.0.0.1:{listener.getsockname()[1]}"
        address = Address(server, folder.authority, folder.device("pi"), patience_s=1.0)
        client = node.open_client(address, key)
        with closing(client), pytest.raises(node.UnreachableError):
            node.enter(address, client, public_pem(key.public_key()))


def test_a_device_that_waited_long_for_its_server_outlasts_the_first_refusals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server answers before it knows the keys, and on a busy machine it comes up late."""
    clock, answers = [0.0], iter(["away"] * 10 + ["refused"] * 3)
    fake = SimpleNamespace(
        monotonic=lambda: clock[0], sleep=lambda s: clock.__setitem__(0, clock[0] + s)
    )
    monkeypatch.setattr("anycostfl.flower.node.time", fake)
    said: list[str] = []
    monkeypatch.setattr(node, "log", lambda _level, text, *_: said.append(text))
    request = httpx.Request("POST", "http://server")

    class Server:
        def activate(self, _key: bytes, _heartbeat_s: float) -> int:
            return int(node.patiently(address, self._answer))

        def _answer(self) -> int:
            match next(answers, "welcome"):
                case "away":
                    raise httpx.ConnectError("nobody there")
                case "refused":
                    response = httpx.Response(412, request=request)
                    raise httpx.HTTPStatusError("no", request=request, response=response)
            return 7

    address = Address("server:1", None, Path("key"))
    server = cast(FleetClient, Server())
    assert node.enter(address, server, b"key") == 7
    assert clock[0] > node.REFUSED_S
    assert sum("cannot be reached" in text for text in said) == 1  # not once for every try
    answers = iter(["refused"] * 1000)
    with pytest.raises(node.RefusedError, match="refuses this device"):
        node.enter(address, server, b"key")


def test_a_device_asks_less_often_when_idle_or_when_the_server_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(node, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    pace = node.Pace()

    def pauses(count: int, took_s: float) -> list[float]:
        found = []
        for _ in range(count):
            found.append(pace.rest(took_s))
            clock[0] += found[-1] + took_s
        return found

    pace.hurry()
    soon = pauses(8, 0.005)
    assert soon[0] == node.POLL_MIN_S
    assert soon[-1] == node.POLL_MAX_S
    assert pauses(200, 0.005)[-1] == node.POLL_IDLE_S
    pace.hurry()
    assert pauses(1, 0.3)[0] == pytest.approx(6.0)
    assert pauses(1, 30.0)[0] == node.POLL_IDLE_S
