"""Files and answers of strangers: bounded, never followed, never shown raw."""

from __future__ import annotations

import io
import json
import os
import socket
import threading
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from anycostfl.cli import _console
from anycostfl.config import to_toml
from anycostfl.data.files import read_npz
from anycostfl.errors import ConfigError
from anycostfl.files import InUseError, StorageError
from anycostfl.flower import _internal, node
from anycostfl.flower._internal import TransferError
from anycostfl.records.checkpoint import checkpoints, read_checkpoint, write_checkpoint
from anycostfl.records.journal import LONGEST_LINE
from anycostfl.records.run import CONFIG, COPY, JOURNAL, RunWriter, open_run, read_journal
from anycostfl.report.figures import draw_curves
from anycostfl.runs import resume
from small_runs import small_config
from test_records import point, write_some

# --- links ----------------------------------------------------------------------------------------


def test_a_figure_replaces_a_link_and_leaves_what_it_points_to(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    precious, curves = tmp_path / "precious", tmp_path / "curves.png"
    precious.write_text("precious")
    curves.symlink_to(precious)
    draw_curves({}, small_config(tmp_path).metric, curves)
    assert precious.read_text() == "precious"
    assert curves.read_bytes().startswith(b"\x89PNG")
    assert not curves.is_symlink()


def test_checkpoints_are_neither_written_nor_read_through_links(tmp_path: Path) -> None:
    write_some(tmp_path / "run", 2)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "run" / "checkpoint-3.part").symlink_to(precious)
    write_checkpoint(tmp_path / "run", point(3))
    assert precious.read_text() == "precious"
    newest = checkpoints(tmp_path / "run")[0]
    assert read_checkpoint(newest).rounds == 3
    newest.rename(tmp_path / "elsewhere")
    newest.symlink_to(tmp_path / "elsewhere")
    assert newest not in checkpoints(tmp_path / "run")


# --- sizes ----------------------------------------------------------------------------------------


@contextmanager
def at_most(most: int) -> Iterator[None]:
    """Fail if Python allocates more."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < most


def test_a_sparse_journal_of_gigabytes_is_damage_and_takes_little_memory(tmp_path: Path) -> None:
    folder = write_some(tmp_path / "run", 2).folder
    for name in (JOURNAL, COPY):
        os.truncate(folder / name, 4 << 30)
    with at_most(4 * LONGEST_LINE):
        records, remarks = read_journal(folder)
    assert len(records) == 2
    assert "damaged from line 3 on" in remarks[0]


def test_a_journal_of_empty_lines_is_read_no_further_than_the_first(tmp_path: Path) -> None:
    folder = write_some(tmp_path / "run", 1).folder
    for name in (JOURNAL, COPY):
        with (folder / name).open("ab") as file:
            file.write(b"\n" * (32 << 20))
    with at_most(1 << 20):
        assert len(read_journal(folder)[0]) == 1


def test_a_configuration_of_gigabytes_is_refused(tmp_path: Path) -> None:
    folder = write_some(tmp_path / "run", 1).folder
    os.truncate(folder / CONFIG, 4 << 30)
    with at_most(8 << 20), pytest.raises(StorageError, match="which no run writes"):
        open_run(folder)


def test_a_checkpoint_larger_than_memory_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_some(tmp_path / "run", 2).folder
    monkeypatch.setattr("anycostfl.records.checkpoint.memory_bytes", lambda: 100)
    saved, _ = open_run(folder)
    assert saved.checkpoint is None
    assert "fit into memory" in saved.remarks[0]


def test_an_array_that_claims_terabytes_is_refused(tmp_path: Path) -> None:
    header, path = io.BytesIO(), tmp_path / "mine.npz"
    about = {"descr": "<f4", "fortran_order": False, "shape": (1 << 46,)}
    np.lib.format.write_array_header_1_0(header, about)
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("train_inputs.npy", header.getvalue())
    with pytest.raises(ConfigError, match=r"not an \.npz file"):
        read_npz(path, ["train_inputs"])


# --- two processes --------------------------------------------------------------------------------


def test_of_two_processes_that_resume_a_run_one_extends_it(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    folder = RunWriter.create(tmp_path / "run", to_toml(config)).folder
    one, other = resume(folder), resume(folder)
    longer, longest = (
        to_toml(replace(config, run=replace(config.run, rounds=rounds))) for rounds in (50, 90)
    )
    one.writer.reconfigure(longer)
    with one.writer.exclusive(), pytest.raises(InUseError, match="working on"):
        other.writer.reconfigure(longest)
    assert (folder / CONFIG).read_text() == longer


# --- terminals and programs -----------------------------------------------------------------------

STEERS = "a\x1b[2Jb\x9b31mc\u202ed\x07"


@pytest.mark.parametrize(
    "show",
    [
        _console.say,
        _console.note,
        lambda text: _console.fail(ConfigError([text])),
        lambda text: _console.print_table(text, (text, ">n"), [(text, 1)]),
    ],
)
def test_control_characters_do_not_reach_the_terminal(
    show: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    show(STEERS)
    shown = "".join(capsys.readouterr())
    assert "\ufffd[2Jb\ufffd31mc\ufffdd\ufffd" in shown
    assert not set("\x1b\x9b\u202e\x07") & set(shown)


def test_numbers_that_json_lacks_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    _console.emit_json({"loss": float("nan"), "all": [float("inf"), {"x": 1.5}]})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "all": [None, {"x": 1.5}]}


# --- answers of a server --------------------------------------------------------------------------

ENDLESS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PACKED = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"
AWAY = b"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.1:1/elsewhere\r\nContent-Length: 0\r\n\r\n"
CHUNK = b"100000\r\n" + bytes(1 << 20) + b"\r\n"


@contextmanager
def server(begin: bytes, *, endless: bool) -> Iterator[node.Address]:
    """A server that answers every request alike."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while listener.fileno() >= 0:  # until it is closed
                with suppress(OSError), listener.accept()[0] as line:
                    line.recv(1 << 16)
                    line.sendall(begin)
                    while endless:
                        line.sendall(CHUNK)

        thread = threading.Thread(target=serve)
        thread.start()
        yield node.Address(f"127.0.0.1:{listener.getsockname()[1]}", None, None, 0.1)
        listener.shutdown(socket.SHUT_RDWR)  # what accepts is woken
    thread.join()


@pytest.mark.parametrize(
    ("begin", "limit", "error", "told"),
    [
        (ENDLESS, "ANSWER_BYTES", node.UnreachableError, "an answer of more than"),
        (ENDLESS, "MESSAGE_BYTES", TransferError, "it has more than"),
        (PACKED, "", node.UnreachableError, "packs its answer"),
        (AWAY, "", httpx.HTTPStatusError, "307"),
    ],
    ids=["endless", "long", "packed", "redirected"],
)
def test_a_device_takes_no_endless_packed_or_redirected_answer(
    monkeypatch: pytest.MonkeyPatch,
    begin: bytes,
    limit: str,
    error: type[Exception],
    told: str,
) -> None:
    if limit:
        monkeypatch.setattr(_internal, limit, 4 << 20)
    with server(begin, endless=begin == ENDLESS) as address:
        client = node.open_client(address, ec.generate_private_key(ec.SECP384R1()))
        with closing(client), at_most(16 << 20), pytest.raises(error, match=told):
            client.activate(b"key", 10.0)
