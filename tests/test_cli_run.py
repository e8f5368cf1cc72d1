"""`anycostfl run` and `anycostfl data` as a user runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from anycostfl.cli._rounds import MISHAPS, in_words
from anycostfl.config import load_preset
from anycostfl.experiment import resolve
from anycostfl.metrics import MetricInfo
from command_line import PROGRAM, Call, program, sets

ACCURACY = MetricInfo()


def test_a_run_leaves_a_folder_whose_configuration_repeats_it(call: Call, tmp_path: Path) -> None:
    done = program("run", *sets(tmp_path, "run.rounds=2"), "--workers", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "round    2  accuracy" in done.stdout
    assert re.search(r"[kM]B up \(1/\d+ of whole models\), [\d.,]+ [kMG]B down", done.stdout)
    names = {path.name for path in (tmp_path / "runs/demo-1").iterdir()}
    assert names == {
        "config.toml", "environment.json", "rounds.jsonl", "rounds.copy.jsonl", "timing.jsonl",
        "checkpoint-2.safetensors", "curves.png", "report.html", "lock",
    }  # fmt: skip
    code, text, complaint = call("run", "runs/demo-1/config.toml", "--out", "b", "--json")
    assert (code, json.loads(text)["rounds"]) == (0, 2), complaint
    journals = [tmp_path / folder / "rounds.jsonl" for folder in ("runs/demo-1", "b")]
    assert journals[0].read_bytes() == journals[1].read_bytes()


def test_the_summary_of_a_run_in_words() -> None:
    summary = {
        "final": 0.8125,
        "best": 0.838,
        "others": {},
        "simulated_minutes": 0.9152,
        "energy_kj": 1234.5,
        "uploaded_mb": 82.26,
        "downloaded_mb": 2239.4,
        "mean_alpha": 0.7184,
        "mean_beta": 0.03304,
        "target": 0.8,
        "rounds_to_target": 35,
        "minutes_to_target": 0.5822,
        "kj_to_target": 174.6,
        **dict.fromkeys(MISHAPS, 0),
        "refused_because": {},
    }
    usual = {
        "accuracy": "81.25 %, at best 83.80 %",
        "cost": "54.9 s simulated, 1.23 MJ",
        "bytes": "82.3 MB up, 2.24 GB down",
        "on average": "α 0.72, β 0.0330",
        "to 80.00 %": "35 rounds, 34.9 s simulated, 175 kJ",
    }
    assert in_words(summary, ACCURACY) == usual
    of_real_devices = in_words(summary, ACCURACY, real=True)
    assert of_real_devices["cost"] == "54.9 s, 1.23 MJ by the profiles"
    unlucky = summary | {
        "final": None,
        "rounds_to_target": None,
        "updates_refused": 3,
        "refused_because": {"digest": 2, "late": 1},
    }
    assert in_words(unlucky, ACCURACY) == {
        **{key: usual[key] for key in ("cost", "bytes", "on average")},
        "to 80.00 %": "not reached",
        "refused": "3",
        "because of": "digest 2, late 1",
    }
    idle = summary | {"mean_alpha": 0.0, "mean_beta": 0.0}  # nobody trained
    assert "on average" not in in_words(idle, ACCURACY)
    endless = in_words(summary | {"target": None, "rounds_to_target": None}, ACCURACY)
    assert endless == {key: text for key, text in usual.items() if key != "to 80.00 %"}


def test_further_metrics_are_told_in_their_own_units() -> None:
    error = MetricInfo("mae", "µg/m³", 1.0, higher_is_better=False)
    others = {"mae, new owners": 21.55, "accuracy": 0.25, "perplexity": 6.4321, "odd": 3.0}
    known = {"final": 18.44, "best": 17.0, "others": others, "target": 20.0, "mean_alpha": 0.0}
    counts = dict.fromkeys((*MISHAPS, "simulated_minutes", "energy_kj", "minutes_to_target"), 0)
    counts |= dict.fromkeys(("uploaded_mb", "downloaded_mb", "kj_to_target"), 0)
    words = in_words({**counts, **known, "rounds_to_target": 3}, error)
    assert {key: words[key] for key in ("mae", *others)} == {
        "mae": "18.44 µg/m³, at best 17 µg/m³",
        "mae, new owners": "21.55 µg/m³",
        "accuracy": "25.00 %",
        "perplexity": "6.432",
        "odd": "3",
    }
    assert words["to 20 µg/m³"].startswith("3 rounds")


@pytest.mark.parametrize(
    ("workers", "sent"),
    [
        pytest.param("1", signal.SIGTERM),
        pytest.param("2", signal.SIGINT),
        pytest.param("1", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("2", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_is_saved_and_leaves_no_process(
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
    while _group_lives(process.pid):  # workers and the fork server end with the run
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_dry_run_writes_nothing(call: Call, tmp_path: Path) -> None:
    code, text, _ = call("run", "fmnist-iid", "--dry-run")
    assert code == 0
    assert "# 300 rounds, with 15 devices each" in text
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine.toml").write_text(text)
    assert load_preset("mine.toml") == resolve(load_preset("fmnist-iid"))
    code, _, complaint = call("run", "--dry-run", "--set", 'fleet.profiles=["jetson-nano"]')
    assert code == 0, complaint


def test_a_failed_start_leaves_no_run_directory(call: Call, tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_text("not a zip")
    bad = ["--set", "data.name=bad.npz", "--out", "x"]
    for arguments in (["run", *bad], ["run", *bad, "--dry-run"], ["compare", "demo", *bad]):
        code, _, complaint = call(*arguments)
        assert code == 2
        assert "not an .npz file (File is not a zip file); numpy.savez" in complaint
        assert not list((tmp_path / "x").glob("**/config.toml"))
    np.savez(tmp_path / "bad.npz", train_inputs=np.array([{}], object))
    code, _, complaint = call("run", *bad)
    assert code == 2
    assert "not an .npz file (it must hold plain numbers); numpy.savez" in complaint
    small = sets(tmp_path, "run.rounds=1")
    code, _, complaint = call("run", *small, "--out", "x", "--workers", "1")
    assert code == 0, complaint


def test_a_finished_run_can_be_extended(call: Call, tmp_path: Path) -> None:
    one = ["--workers", "1", "--json"]
    call("run", *sets(tmp_path), "--rounds", "2", "--out", "short", *one)
    code, _, complaint = call("run", "--resume", "short", "--rounds", "1")
    assert code == 2
    assert "--rounds: given 1, must be >= 2" in complaint
    _, text, complaint = call("run", "--resume", "short", "--rounds", "3", *one)
    assert json.loads(text)["rounds"] == 3, complaint
    call("run", *sets(tmp_path), "--rounds", "3", "--out", "long", *one)
    for name in ("rounds.jsonl", "config.toml"):
        assert (tmp_path / "short" / name).read_text() == (tmp_path / "long" / name).read_text()


def test_data_shows_the_samples_of_every_device(call: Call, tmp_path: Path) -> None:
    _, text, _ = call("data", "demo", "--plot", "who.png", "--json")
    counts = json.loads(text)["samples_per_class"]
    assert len(counts) == 40
    assert sum(map(sum, counts)) == 8000
    assert (tmp_path / "who.png").stat().st_size > 1000
