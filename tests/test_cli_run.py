"""`anycostfl run` and `anycostfl data` as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from small_runs import small_overrides

PROGRAM = str(Path(sys.executable).with_name("anycostfl"))


def sets(folder: Path, *more: str) -> list[str]:
    return [part for item in small_overrides(folder, *more) for part in ("--set", item)]


def call(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *arguments], capture_output=True, text=True, cwd=cwd, check=False, timeout=300
    )


def test_a_run_ends_with_a_summary_and_a_folder(tmp_path: Path) -> None:
    done = call("run", *sets(tmp_path, "run.rounds=2"), "--workers", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "round    2  accuracy" in done.stdout
    assert "simulated minutes" in done.stdout
    names = {path.name for path in (tmp_path / "runs/demo-1").iterdir()}
    assert names == {
        "config.toml", "environment.json", "rounds.jsonl", "rounds.copy.jsonl", "timing.jsonl",
        "checkpoint-2.safetensors", "curves.png", "report.html", "lock",
    }  # fmt: skip


def test_a_saved_configuration_repeats_the_run(tmp_path: Path) -> None:
    first = call("run", *sets(tmp_path, "run.rounds=2"), "--out", "a", "--json", cwd=tmp_path)
    again = call("run", "a/config.toml", "--out", "b", "--json", "--workers", "1", cwd=tmp_path)
    assert json.loads(first.stdout)["rounds"] == 2
    assert again.returncode == 0, again.stderr
    journals = [(tmp_path / folder / "rounds.jsonl").read_bytes() for folder in "ab"]
    assert journals[0] == journals[1]


@pytest.mark.parametrize(
    ("workers", "sent"), [("1", signal.SIGINT), ("2", signal.SIGINT), ("2", signal.SIGTERM)]
)
def test_ctrl_c_saves_and_leaves_nothing_behind(
    tmp_path: Path, workers: str, sent: signal.Signals
) -> None:
    arguments = ["run", *sets(tmp_path, "run.rounds=500", "run.checkpoint_every=400"), "--out", "x"]
    process = subprocess.Popen(
        [PROGRAM, *arguments, "--workers", workers],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    journal = tmp_path / "x/rounds.jsonl"
    deadline = time.monotonic() + 120
    while not journal.exists() or journal.read_text().count("\n") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    if sent is signal.SIGINT:
        os.killpg(process.pid, sent)  # a terminal tells the whole group
    else:
        process.send_signal(sent)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "anycostfl run --resume x" in output
    rounds = journal.read_text().count("\n")
    assert (tmp_path / f"x/checkpoint-{rounds}.safetensors").exists()
    deadline = time.monotonic() + 10
    while _group_lives(process.pid):  # workers and fork server go with the run
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = call("run", "fmnist-iid", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0
    assert "[fleet]" in done.stdout
    assert not list(tmp_path.iterdir())
    real = call("run", "--dry-run", "--set", 'fleet.profiles=["jetson-nano"]', cwd=tmp_path)
    assert real.returncode == 0, real.stderr


def test_mistakes_end_with_one_message_and_code_two(tmp_path: Path) -> None:
    for arguments, message in (
        (["dmeo"], "did you mean 'demo'"),
        (["demo", "--set", "run.roundz=3"], "did you mean rounds"),
        (["demo", "--set", "run.method=fedsgd"], "there are anycostfl, anycostfl+, fedavg"),
        (["demo", "--set", "data.name=imagenet"], "no dataset"),
        (["demo", "--set", "fleet.cohort=99"], "at most devices"),
        (["--resume", "nowhere"], "holds no run"),
        (["--resume", "nowhere", "--set", "a.b=1"], "takes the run as it is"),
        (["demo", "--resume", "nowhere"], "no preset"),
        (["--workers", "-1"], "0 (one per core)"),
        (["none.toml"], "there is no file none.toml"),
    ):
        done = call("run", *arguments, cwd=tmp_path)
        assert done.returncode == 2, (arguments, done.stderr)
        assert message in " ".join(done.stderr.split()), done.stderr
        assert "Traceback" not in done.stderr


def test_a_start_that_fails_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_text("not a zip")
    bad = ["--set", "data.name=bad.npz", "--out", "x"]
    for arguments in (["run", *bad], ["run", *bad, "--dry-run"], ["compare", "demo", *bad]):
        failed = call(*arguments, cwd=tmp_path)
        assert failed.returncode == 2, failed.stderr
        assert "not an .npz file" in failed.stderr
        assert not list((tmp_path / "x").glob("**/config.toml"))
    small = sets(tmp_path, "run.rounds=1")
    done = call("run", *small, "--out", "x", "--workers", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_finished_run_goes_on_to_more_rounds(tmp_path: Path) -> None:
    one = ["--workers", "1", "--json"]
    call("run", *sets(tmp_path), "--rounds", "2", "--out", "short", *one, cwd=tmp_path)
    fewer = call("run", "--resume", "short", "--rounds", "1", cwd=tmp_path)
    assert fewer.returncode == 2
    assert "allowed 2 or more" in fewer.stderr
    done = call("run", "--resume", "short", "--rounds", "3", *one, cwd=tmp_path)
    assert json.loads(done.stdout)["rounds"] == 3, done.stderr
    call("run", *sets(tmp_path), "--rounds", "3", "--out", "long", *one, cwd=tmp_path)
    for name in ("rounds.jsonl", "config.toml"):
        assert (tmp_path / "short" / name).read_text() == (tmp_path / "long" / name).read_text()


def test_data_shows_who_holds_what(tmp_path: Path) -> None:
    done = call("data", "demo", "--plot", "who.png", "--json", cwd=tmp_path)
    counts = json.loads(done.stdout)["samples_per_class"]
    assert len(counts) == 40
    assert sum(map(sum, counts)) == 8000
    assert (tmp_path / "who.png").stat().st_size > 1000
