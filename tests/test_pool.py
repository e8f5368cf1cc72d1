"""Devices on several processes: no process outlives the run, and what fails is explained."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl import Task, models, run
from anycostfl.device import cores
from anycostfl.fleets.pool import SharedMemoryError, WorkerDiedError
from anycostfl.records.round import Status
from anycostfl.records.run import JOURNAL, read_run
from anycostfl.simulate import simulate
from drills.common import Trial
from drills.workers import children, wait_for_workers
from small_runs import OWN_MODEL, small_config, small_overrides


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def running(pids: Iterable[int]) -> list[int]:
    """The processes that still run; one that only waits to be reaped has ended."""

    def runs(pid: int) -> bool:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] != "Z"

    return [pid for pid in pids if runs(pid)]


def test_a_killed_worker_ends_the_run_with_advice_and_leaves_no_process(tmp_path: Path) -> None:
    results = simulate(small_config(tmp_path, "run.rounds=500"), workers=2)
    next(results)
    workers = [process.pid or 0 for process in multiprocessing.active_children()]
    assert running(workers) == workers != []
    os.kill(workers[0], signal.SIGKILL)
    advice = r"a worker process died.*Resume with --resume, perhaps with fewer --workers"
    with pytest.raises(WorkerDiedError, match=advice):
        list(results)
    wait_until(lambda: not running(workers))
    assert multiprocessing.active_children() == []


def test_a_killed_parent_leaves_no_worker(tmp_path: Path) -> None:
    trial = Trial(tmp_path, workers=2, rounds=500)
    parent = trial.start()
    try:
        workers = wait_for_workers(parent)
        helpers = children(parent)  # the fork server and the tracker of shared memory
        wait_until(lambda: (trial.home / JOURNAL).exists() and bool(trial.outcome()[0]))
        assert len(running(workers)) == 2
    finally:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
    wait_until(lambda: not running([*workers, *helpers]), 20.0)
    assert running([*workers, *helpers]) == []


def test_memories_of_devices_hold_no_file_open(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    results = simulate(small_config(tmp_path, "run.method=stc", "run.rounds=3"), workers=2)
    next(results)
    after_one = open_files()
    remembered = len(next(results).state.memories)
    assert remembered > 4  # in one round, four devices take part
    assert open_files() == after_one
    results.close()


def test_where_a_system_cannot_say_which_cores_are_free_all_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == os.cpu_count()


def test_without_room_for_shared_data_nothing_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_tensor: torch.Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    config = small_config(tmp_path, "run.rounds=1")
    with pytest.raises(SharedMemoryError, match=r"docker run --shm-size=1g\), or use --workers 1"):
        simulate(config, workers=2)  # before a run directory is begun
    assert len(list(simulate(config, workers=1))) == 1


def owned_task(**changes: Any) -> Task:
    """Three classes of ten owners, two of whom only test."""
    draw = torch.Generator().manual_seed(0)
    x, owners = torch.randn(1300, 4, generator=draw), torch.arange(1300) % 10
    y = x[:, :3].argmax(1)
    train = owners < 8
    return Task(
        train=((x[train], x[train, :2]), y[train]),
        test=((x, x[:, :2]), y),
        owners=owners[train],
        test_owners=owners,
        metric=("accuracy", "perplexity"),
        **changes,
    )


class Beside(nn.Module):
    """A model of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, None]:
        return self.head(self.hidden(torch.cat([one, other], 1)).relu()), None


def test_a_task_and_a_model_in_memory_give_the_same_on_several_processes() -> None:
    module, training = Beside(), {"learning_rate": 0.1}
    alone, several = (
        run(model=module, task=owned_task(), rounds=2, training=training, workers=workers)
        for workers in (1, 2)
    )
    assert several.records == alone.records
    names = {"perplexity", "accuracy, known owners", "accuracy, new owners"}
    assert several.records[-1].others.keys() == names
    states = alone.model.state_dict(), several.model.state_dict()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_what_python_cannot_send_to_another_process_is_told_before_it_starts() -> None:
    task = owned_task(loss=lambda outputs, targets: F.cross_entropy(outputs[0], targets))
    with pytest.raises(SharedMemoryError, match="a task and a model that Python can pickle"):
        run(model=Beside(), task=task, rounds=1, training={"learning_rate": 0.1}, workers=2)


def command(folder: Path, *changes: str) -> subprocess.CompletedProcess[str]:
    """A run on two processes, with custom methods and models."""
    overrides = small_overrides(folder, "run.rounds=2", *changes)
    return subprocess.run(
        [sys.executable, "-m", "anycostfl", "run", "--workers=2", "--out=a-run", "--json"]
        + [f"--set={change}" for change in overrides],
        cwd=folder,
        env={**os.environ, "ANYCOSTFL_PATH": str(folder / "mine")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_an_error_in_a_worker_is_shown_with_its_place(tmp_path: Path) -> None:
    broken = tmp_path / "mine" / "methods" / "broken.py"
    broken.parent.mkdir(parents=True)
    broken.write_text(
        "from dataclasses import replace\n"
        "from anycostfl.methods import load\n"
        "def encode(update, upload):\n"
        "    return {}['nothing']\n"
        "METHOD = replace(load('fedavg'), encode=encode)\n"
    )
    done = command(tmp_path, "run.method=broken")
    assert done.returncode == 2
    assert "broken.py" in done.stderr
    assert "KeyError: 'nothing'" in done.stderr


def test_tensors_of_any_type_travel_to_workers_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = "(m.bfloat16() for m in (nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)))"
    file = tmp_path / "mine" / "models" / "half_precision.py"
    file.parent.mkdir(parents=True)
    file.write_text(OWN_MODEL.format(layers=layers))
    changes = ("model.name=half_precision", "compression.feedback=true")
    done = command(tmp_path, *changes)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(file.parent)])
    alone = tuple(run(small_config(tmp_path, *changes, "run.rounds=2")))
    assert read_run(tmp_path / "a-run").records == alone
    assert {d.status for record in alone for d in record.devices} == {Status.OK}
