"""A run directory survives whatever happens to the process or the disk."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from anycostfl.cli._rounds import free_folder
from anycostfl.files import StorageError
from anycostfl.records import checkpoint
from anycostfl.records.checkpoint import Checkpoint, checkpoints
from anycostfl.records.round import DeviceRecord, RoundRecord, Status
from anycostfl.records.run import COPY, JOURNAL, RunWriter, open_run, read_run
from drills.common import Trial, undisturbed


def record(number: int) -> RoundRecord:
    device = DeviceRecord(3, Status.OK, samples=20, rate_bps=1e6, binds=("energy",))
    return RoundRecord(number, 0.1 * number, (device,))


def write_some(folder: Path, rounds: int) -> RunWriter:
    writer = RunWriter.create(folder, "summary = 'x'\n")
    for number in range(rounds):
        writer.append(record(number))
        writer.checkpoint(point(number + 1))
    return writer


def point(rounds: int) -> Checkpoint:
    """Every kind of state, each with values of its own."""
    states = {
        "model": {"w": torch.full((50,), float(rounds - 1))},
        "velocity": {"w": torch.full((50,), 3.0)},
        "public": {"w": torch.full((50,), rounds - 0.5)},
        "moved": {"w": torch.arange(50)},
        "memory/7": {"w": torch.ones(2), "a/b": torch.zeros(1)},
        "memory/12": {"w": torch.full((2,), 12.0)},
    }
    return Checkpoint(rounds, states)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    write_some(tmp_path / "run", 3)
    saved = read_run(tmp_path / "run")
    assert saved.records == tuple(record(number) for number in range(3))
    assert saved.checkpoint is not None
    assert saved.checkpoint.rounds == 3
    written, found = point(3).states, saved.checkpoint.states
    assert found.keys() == written.keys()
    for kind, state in written.items():
        assert found[kind].keys() == state.keys()
        assert all(torch.equal(found[kind][name], tensor) for name, tensor in state.items())
    assert saved.checkpoint.memories().keys() == {7, 12}
    assert saved.checkpoint["nothing"] == {}
    assert saved.remarks == ()


def test_nothing_is_written_through_a_symlink(tmp_path: Path) -> None:
    for name in ("rounds.jsonl.damaged", "lock", "timing.jsonl"):
        folder, precious = tmp_path / name / "run", tmp_path / name / "precious"
        write_some(folder, 2)
        precious.write_text("precious")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(precious)
        with (folder / "rounds.jsonl").open("a") as journal:
            journal.write("not a round\n")
        with suppress(StorageError):
            _, writer = open_run(folder)
            writer.append(record(2))
        assert precious.read_text() == "precious"


@pytest.mark.parametrize("name", ["rounds.jsonl", "rounds.copy.jsonl", "lock"])
def test_special_files_are_refused_without_blocking(tmp_path: Path, name: str) -> None:
    write_some(tmp_path / "run", 2)
    (tmp_path / "run" / name).unlink()
    os.mkfifo(tmp_path / "run" / name)
    with pytest.raises(StorageError, match="is not a file"):
        open_run(tmp_path / "run")


def test_of_two_processes_that_begin_in_one_folder_only_one_succeeds(tmp_path: Path) -> None:
    for attempt in range(20):
        folder, begun, both = tmp_path / str(attempt), list[str](), threading.Barrier(2)

        def begin(
            config: str, folder: Path = folder, begun: list[str] = begun, both: Any = both
        ) -> None:
            both.wait()
            with suppress(StorageError):
                RunWriter.create(folder, config)
                begun.append(config)

        threads = [threading.Thread(target=begin, args=(f"run = {n}",)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [read_run(folder).config] == begun


def test_free_folder_never_returns_the_same_folder_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [free_folder("demo").name for _ in range(3)] == ["demo-1", "demo-2", "demo-3"]
    shutil.rmtree("runs")
    Path("runs").symlink_to("nowhere")
    with pytest.raises(StorageError, match="cannot write to runs"):
        free_folder("demo")


def test_a_round_that_could_not_be_read_back_is_not_journalled(tmp_path: Path) -> None:
    writer = write_some(tmp_path / "run", 1)
    (device,) = record(1).devices
    with pytest.raises(StorageError, match="round 1 cannot be journalled: samples is"):
        writer.append(replace(record(1), devices=(replace(device, samples=10**19),)))
    writer.append(record(1))
    assert read_run(tmp_path / "run").records == (record(0), record(1))


def test_only_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    write_some(tmp_path / "run", 5)
    names = [path.name for path in checkpoints(tmp_path / "run")]
    assert names == ["checkpoint-5.safetensors", "checkpoint-4.safetensors"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path: Path, damage: str) -> None:
    write_some(tmp_path / "run", 3)
    newest = checkpoints(tmp_path / "run")[0]
    content = newest.read_bytes()
    newest.write_bytes({
        "truncate": content[:-9],
        "flip": content[:-9] + bytes([content[-9] ^ 4]) + content[-8:],
        "empty": b"",
    }[damage])  # fmt: skip
    saved, _ = open_run(tmp_path / "run")
    assert saved.checkpoint is not None
    assert saved.checkpoint.rounds == 2
    assert len(saved.records) == 2
    assert "damaged" in saved.remarks[0]


@pytest.mark.parametrize("damage", ["truncate", "garbage", "shuffle", "empty", "gone"])
def test_a_damaged_journal_is_read_from_its_copy(tmp_path: Path, damage: str) -> None:
    write_some(tmp_path / "run", 4)
    journal = tmp_path / "run" / JOURNAL
    content = journal.read_bytes()
    lines = content.splitlines(keepends=True)
    journal.write_bytes({
        "truncate": content[:-30],
        "garbage": content[:50] + b"\xff" + content[51:],
        "shuffle": b"".join((lines[1], lines[0], *lines[2:])),
        "empty": b"",
        "gone": b"",
    }[damage])  # fmt: skip
    if damage == "gone":
        journal.unlink()
    saved, _ = open_run(tmp_path / "run")
    assert saved.records == tuple(record(number) for number in range(4))
    assert saved.checkpoint is not None
    assert saved.checkpoint.rounds == 4
    assert "rounds.copy.jsonl was used" in saved.remarks[0]
    assert journal.read_bytes() == content
    assert read_run(tmp_path / "run").remarks == ()


def test_unreadable_lines_are_set_aside(tmp_path: Path) -> None:
    write_some(tmp_path / "run", 4)
    for name in (JOURNAL, COPY):
        path = tmp_path / "run" / name
        path.write_bytes(path.read_bytes().replace(b'"round": 2', b'"later": 2'))
    content = (tmp_path / "run" / JOURNAL).read_bytes()
    saved, _ = open_run(tmp_path / "run")
    assert len(saved.records) < 4
    assert (tmp_path / "run" / "rounds.jsonl.damaged").read_bytes() == content


def test_a_damaged_checkpoint_is_not_one_of_the_two_that_are_kept(tmp_path: Path) -> None:
    write_some(tmp_path / "run", 3)
    newest = checkpoints(tmp_path / "run")[0]
    newest.write_bytes(b"nothing")
    _, writer = open_run(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint-3.damaged").read_bytes() == b"nothing"
    writer.append(record(2))
    writer.append(record(3))
    writer.checkpoint(point(4))
    assert [path.name for path in checkpoints(tmp_path / "run")] == [
        "checkpoint-4.safetensors",
        "checkpoint-2.safetensors",
    ]


def test_a_journal_damaged_in_both_copies_is_read_up_to_the_damage(tmp_path: Path) -> None:
    write_some(tmp_path / "run", 3)
    for name in (JOURNAL, COPY):
        journal = tmp_path / "run" / name
        journal.write_bytes(journal.read_bytes()[:-30])
    saved, _ = open_run(tmp_path / "run")
    assert [r.round for r in saved.records] == [0, 1]
    assert saved.checkpoint is not None
    assert saved.checkpoint.rounds == 2
    assert "line 3" in saved.remarks[0]


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    write_some(tmp_path / "run", 1)
    with pytest.raises(StorageError, match="--resume"):
        RunWriter.create(tmp_path / "run", "")
    with pytest.raises(StorageError, match="holds no run"):
        open_run(tmp_path / "nothing")


def test_a_full_disk_leaves_the_last_checkpoint_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = write_some(tmp_path / "run", 2)

    def full(_tensors: object, path: Path, _about: object) -> None:
        path.write_bytes(b"half a checkpoint")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(StorageError, match=r"No space left.*last checkpoint is intact.*--resume"):
        writer.checkpoint(point(3))
    saved = read_run(tmp_path / "run")
    assert saved.checkpoint is not None
    assert saved.checkpoint.rounds == 2
    assert not list((tmp_path / "run").glob("*.part"))


# --- kill -9 (`test_drills` kills at random moments) ----------------------------------------------


@pytest.mark.parametrize("moment", ["before saving", "half written", "before renaming"])
def test_a_kill_during_a_checkpoint_changes_nothing(tmp_path: Path, moment: str) -> None:
    expected, _ = undisturbed(tmp_path / "undisturbed")

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def sabotage() -> None:
        saved = 0

        def save(tensors: dict[str, torch.Tensor], path: Path, about: dict[str, str]) -> None:
            nonlocal saved
            saved += 1
            if saved == 3 and moment == "before saving":
                die()
            save_file(tensors, path, about)
            if saved == 3 and moment == "half written":
                os.truncate(path, 1000)
            if saved == 3:
                die()

        setattr(checkpoint, "save_file", save)  # noqa: B010 - as monkeypatch does, in a child

    trial = Trial(tmp_path)
    assert os.waitstatus_to_exitcode(os.waitpid(trial.start(sabotage), 0)[1]) == -signal.SIGKILL
    saved = read_run(trial.home)
    assert saved.checkpoint is not None
    assert (saved.checkpoint.rounds, len(saved.records), saved.remarks) == (2, 3, ())
    assert trial.finish() == 0
    assert trial.outcome() == expected
