"""A run directory survives whatever happens to the process or the disk."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from anycostfl import records
from anycostfl.cli._rounds import free_folder
from anycostfl.cli.run import run
from anycostfl.files import StorageError
from anycostfl.records.checkpoint import Checkpoint, checkpoints
from anycostfl.records.round import DeviceRecord, RoundRecord
from anycostfl.records.run import RunWriter, open_run, read_run
from small_runs import small_overrides

ROUNDS = 8


def record(number: int) -> RoundRecord:
    device = DeviceRecord(3, "ok", 20, 100.0, 1e6, 0.1, binds=("energy",))
    return RoundRecord(number, 0.1 * number, (device,))


def write_some(folder: Path, rounds: int) -> RunWriter:
    writer = RunWriter.create(folder, "summary = 'x'\n")
    for number in range(rounds):
        writer.append(record(number))
        state = {"w": torch.full((50,), float(number))}
        memories, velocity = {7: {"w": torch.ones(2)}}, {"w": torch.full((50,), 3.0)}
        public = {"w": torch.full((50,), number + 0.5)}
        writer.checkpoint(Checkpoint(number + 1, state, memories, velocity, public))
    return writer


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_some(tmp_path / "run", 3)
    saved = read_run(tmp_path / "run")
    assert saved.records == tuple(record(number) for number in range(3))
    assert saved.checkpoint is not None
    assert saved.checkpoint.rounds == 3
    assert torch.equal(saved.checkpoint.state["w"], torch.full((50,), 2.0))
    assert torch.equal(saved.checkpoint.memories[7]["w"], torch.ones(2))
    assert torch.equal(saved.checkpoint.velocity["w"], torch.full((50,), 3.0))
    assert saved.remarks == ()


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
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
def test_what_is_not_a_file_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    write_some(tmp_path / "run", 2)
    (tmp_path / "run" / name).unlink()
    os.mkfifo(tmp_path / "run" / name)
    with pytest.raises(StorageError, match="is not a file"):
        open_run(tmp_path / "run")


def test_of_two_that_begin_in_one_folder_at_once_one_does(tmp_path: Path) -> None:
    for turn in range(20):
        folder, begun, both = tmp_path / str(turn), list[str](), threading.Barrier(2)

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


def test_a_free_folder_is_free_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [free_folder("demo").name for _ in range(3)] == ["demo-1", "demo-2", "demo-3"]
    shutil.rmtree("runs")
    Path("runs").symlink_to("nowhere")
    with pytest.raises(StorageError, match="cannot write to runs"):
        free_folder("demo")


def test_a_round_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    writer = write_some(tmp_path / "run", 1)
    (device,) = record(1).devices
    with pytest.raises(StorageError, match="round 1 cannot be written down: samples is"):
        writer.append(replace(record(1), devices=(replace(device, samples=10**19),)))
    writer.append(record(1))
    assert read_run(tmp_path / "run").records == (record(0), record(1))


def test_only_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    write_some(tmp_path / "run", 5)
    names = [path.name for path in checkpoints(tmp_path / "run")]
    assert names == ["checkpoint-5.safetensors", "checkpoint-4.safetensors"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, damage: str
) -> None:
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
    journal = tmp_path / "run" / records.JOURNAL
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


def test_lines_that_cannot_be_read_are_kept_aside(tmp_path: Path) -> None:
    write_some(tmp_path / "run", 4)
    for name in (records.JOURNAL, records.COPY):
        path = tmp_path / "run" / name
        path.write_bytes(path.read_bytes().replace(b'"round": 2', b'"later": 2'))
    content = (tmp_path / "run" / records.JOURNAL).read_bytes()
    saved, _ = open_run(tmp_path / "run")
    assert len(saved.records) < 4
    assert (tmp_path / "run" / "rounds.jsonl.damaged").read_bytes() == content


def test_a_damaged_checkpoint_does_not_count_as_one_of_the_two(tmp_path: Path) -> None:
    write_some(tmp_path / "run", 3)
    newest = checkpoints(tmp_path / "run")[0]
    newest.write_bytes(b"nothing")
    _, writer = open_run(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint-3.damaged").read_bytes() == b"nothing"
    writer.append(record(2))
    writer.append(record(3))
    writer.checkpoint(Checkpoint(4, {"w": torch.ones(2)}))
    assert [path.name for path in checkpoints(tmp_path / "run")] == [
        "checkpoint-4.safetensors",
        "checkpoint-2.safetensors",
    ]


def test_a_journal_damaged_in_both_copies_is_read_up_to_the_damage(tmp_path: Path) -> None:
    write_some(tmp_path / "run", 3)
    for name in (records.JOURNAL, records.COPY):
        journal = tmp_path / "run" / name
        journal.write_bytes(journal.read_bytes()[:-30])
    saved, _ = open_run(tmp_path / "run")
    assert [r.round for r in saved.records] == [0, 1]
    assert saved.checkpoint is not None
    assert saved.checkpoint.rounds == 2
    assert "line 3" in saved.remarks[0]


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path: Path) -> None:
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

    monkeypatch.setattr(records, "save_file", full)
    with pytest.raises(StorageError, match=r"No space left.*last checkpoint is intact.*--resume"):
        writer.checkpoint(Checkpoint(3, {"w": torch.ones(50)}))
    saved = read_run(tmp_path / "run")
    assert saved.checkpoint is not None
    assert saved.checkpoint.rounds == 2
    assert not list((tmp_path / "run").glob("*.part"))


# --- kill -9 --------------------------------------------------------------------------------------


def start(folder: Path, overrides: list[str], workers: int, sabotage: Callable[[], None]) -> int:
    """Run or go on in a forked process; returns its id."""
    child = os.fork()
    if child:
        return child
    try:
        # A fork server that another test began is no child of this process: it needs its own.
        forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]
        sabotage()
        if (folder / records.CONFIG).exists():
            run(resume=folder, workers=workers, json=True)
        else:
            run("demo", overrides, folder, None, workers, json=True)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def contents(folder: Path) -> tuple[bytes, bytes]:
    final = folder / f"checkpoint-{ROUNDS}.safetensors"
    return (folder / records.JOURNAL).read_bytes(), final.read_bytes()


def uninterrupted(folder: Path, overrides: list[str]) -> tuple[bytes, bytes]:
    os.waitpid(start(folder, overrides, 1, lambda: None), 0)
    return contents(folder)


def kill_again_and_again(folder: Path, workers: int, longest: float, times: int) -> None:
    """Kill runs at random moments; whenever one gets to its end, it is the same end."""
    overrides = small_overrides(folder, f"run.rounds={ROUNDS}", "run.checkpoint_every=1")
    expected = uninterrupted(folder / "whole", overrides)
    moments, killed, ended, home = random.Random(workers), 0, 0, folder / "killed"
    while killed < times or not ended or home.exists():
        child = start(home, overrides, workers, lambda: None)
        if killed < times:
            time.sleep(moments.uniform(0.0, longest))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            assert contents(home) == expected
            ended += 1
            shutil.rmtree(home)


def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 1, 1.2, 20)


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_with_two_workers_change_nothing(tmp_path: Path, times: int) -> None:
    kill_again_and_again(tmp_path, 2, 4.0, times)


def test_killed_during_a_checkpoint(tmp_path: Path) -> None:
    overrides = small_overrides(tmp_path, f"run.rounds={ROUNDS}")
    expected = uninterrupted(tmp_path / "whole", overrides)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def sabotage(moment: str) -> None:
        saved = 0

        def save(tensors: dict[str, torch.Tensor], path: Path, about: dict[str, str]) -> None:
            nonlocal saved
            saved += 1
            if saved == 3 and moment == "between journal and save":
                die()
            save_file(tensors, path, about)
            if saved == 3 and moment == "half written":
                os.truncate(path, 1000)
                die()
            if saved == 3:
                die()

        setattr(records, "save_file", save)  # noqa: B010 - as monkeypatch does, in a child

    for moment in ("before rename", "half written", "between journal and save"):
        home = tmp_path / moment
        _, status = os.waitpid(start(home, overrides, 1, partial(sabotage, moment)), 0)
        assert os.WIFSIGNALED(status)
        os.waitpid(start(home, overrides, 1, lambda: None), 0)
        assert contents(home) == expected, moment
