"""Ordinary wrong input ends with one message that says what to do, on every command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import anycostfl
from anycostfl.config import load_preset, to_toml
from command_line import PROGRAM, Call, sets
from flower_grid import console_handler
from small_runs import small_overrides


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data", "--plot", "/dev/null/x.png"], "figure: given /dev/null/x.png"),
        (["data", "--plot", "x.foo"], "figure: given x.foo"),
        (
            ["inspect", "--model", "torch.nn:Linear", "--input", "3"],
            "function() needs no arguments",
        ),
        (["inspect", "--model", "raises:make", "--input", "3"], "KeyError: 'weights'"),
        (["inspect", "--model", "cnn", "--input", "1,28,28"], "brings its own shape"),
        (["serve", "--insecure", "--port", "99999"], "must be 1 to 65535"),
        (["serve", "demo", "--insecure", "--resume", "x"], "without a preset"),
        (["keys", "--out", "/proc/x"], "--out: given /proc/x"),
        (["run", "--resume", "latin1"], "cannot read latin1/config.toml"),
        (["run", "dmeo"], "did you mean 'demo'"),
        (["run", "demo", "--set", "run.roundz=3"], "did you mean rounds"),
        (["run", "--set", "run.method=fedsgd"], "there are anycostfl, anycostfl+, feda"),
        (["run", "--set", "run.method=fedhc", "--set", "run.rounds=0"], "2 problems"),
        (["run", "--set", "run.method=fedhc"], "run.method: no method 'fedhc'; did you mean"),
        (["compare", "demo", "--methods", ", "], "--methods: given ', ', must be all"),
        (["compare", "demo", "--methods", "stc,fedavgg"], "did you mean 'fedavg'?"),
        (
            ["compare", "demo", "--learning-rates", "0.1,0,-1"],
            "--learning-rates: given 0, must be > 0",
        ),
        (["compare", "demo", "--show", "--background"], "--background: not with --show"),
        (["run", "demo", "--set", "data.name=imagenet"], "no task 'imagenet'; there are air"),
        (["run", "demo", "--set", "data.name=spoken-digit"], "did you mean 'spoken-digits'?"),
        (["run", "demo", "--set", "fleet.cohort=99"], "at most devices"),
        (["run", "--resume", "nowhere"], "holds no run"),
        (
            ["run", "--resume", "nowhere", "--set", "run.rounds=9"],
            "without --set; --rounds extends it",
        ),
        (["run", "demo", "--resume", "nowhere"], "without a preset"),
        (["run", "--workers", "-1"], "0 (one per core)"),
        (["run", "none.toml"], "there is no file none.toml"),
        (["inspect", "--model", "resnet19"], "resnet18"),
        (["inspect", "--model", "cnn", "--alpha", "1.5"], "at most 1"),
        (["inspect", "--model", "no.such:thing"], "cannot load"),
        (["inspect", "--model", "cnn", "--rule", "cubic"], "sqrt, fast"),
        (["inspect", "--model", "torch.nn:Flatten", "--input", "3,-1"], "is not a shape"),
        (["plan", "--device", "jetson-nano", "--seed", "4"], "--seed only for a cohort"),
        (["plan", "demo", "--preset", "best"], "--preset best beside demo"),
        (["sweep", "ablation", "demo", "--methods", "stc"], "--methods: only for compute"),
        (["sweep", "widths", "demo", "--values", "1"], "--values: only for compute, radio"),
        (["sweep", "attacks", "demo", "--rates", "0.1"], "--learning-rates: only for ablation"),
        (["sweep", "attacks", "demo", "--target", "0"], "--target: only for ablation"),
        (["sweep", "widths", "demo", "--trial", "3"], "--trial: only with --learning-rates"),
        (["compare", "demo", "--trial", "3"], "--trial: only with --learning-rates"),
        (["compare", "demo", "--set", "run.method=stc"], "--methods names the methods to run"),
        (["sweep", "radio", "demo", "--set", "run.method=stc"], "run.method: only for attacks"),
        (["compare", "demo", "--out", "raises.py"], "cannot write to raises.py"),
        (["compare", "demo", "--out", "raises.py/x", "--background"], "Choose another --out"),
        (["compare", "demo", "--show", "--out", "latin1"], "holds no run of this"),
        (["run", "demo", "--out", "raises.py"], "Choose another --out"),
        (["report", "journal"], "journal/rounds.jsonl is not a file"),
        (["join", "localhost", "--device", "0", "--insecure"], "SERVER: given 'localhost'"),
        (["join", "http://a:1", "--device", "0", "--insecure"], "SERVER: given 'http://a:1'"),
        (["serve", "--insecure", "--set", "attack.kind=scale"], "only simulated devices attack"),
        (["fleet", "--set", "fleet.cohort=6"], "fleet.cohort: given 6, must be <= 4"),
        (["profile", "--out", "no/x.toml"], "--out: there is no folder no"),
        (["compare", "demo", "--rates", "abc", "--background"], "--learning-rates: given 'abc'"),
        (["run", "demo", "--set", "model.name=tiny"], "(for a custom one, set ANYCOSTFL_PATH"),
        (["join", "localhost:1", "--device", "-1", "--insecure"], "--device"),
        (
            ["join", "a:1", "--device", "0", "--insecure", "--profile", "jetson-nano", "--believe"],
            "--energy-j: needed with --believe",
        ),
    ],
)
def test_one_message_and_code_two(call: Call, words: list[str], told: str) -> None:
    Path("raises.py").write_text("def make():\n    raise KeyError('weights')\n")
    Path("latin1").mkdir()
    Path("latin1/config.toml").write_bytes("summary = 'grün'".encode("latin-1"))
    Path("journal/rounds.jsonl").mkdir(parents=True)
    Path("journal/config.toml").write_text(to_toml(load_preset("demo")))
    code, _, message = call(*words)
    assert told in message
    assert code == 2


def test_a_wrong_option_of_serve_leaves_no_folder(call: Call) -> None:
    words = ["serve", "demo", "--insecure", "--port", "19443", "--out", "x"]
    code, _, message = call(*words, "--deadline-s", "-1")
    assert (code, Path("x").exists()) == (2, False)
    assert "--deadline-s: given -1, must be > 0" in message


def test_a_serve_that_cannot_start_leaves_no_folder(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ANYCOSTFL_DATA", raising=False)
    words = ["serve", "cifar10-iid", "--insecure", "--port", "19443", "--set", "data.path=nowhere"]
    code, _, message = call(*words)
    assert (code, Path("runs").exists()) == (2, False)
    assert "is not in nowhere" in message


def test_a_devices_log_without_a_terminal_has_dates_and_no_colours(call: Call) -> None:
    code, _, message = call("join", "127.0.0.1:1", "--device", 0, "--insecure", "--patience-s", 0.1)
    assert code == 2
    assert "127.0.0.1:1 cannot be reached" in message
    assert (console_handler.timestamps, console_handler.colored) == (True, False)


def test_a_trusted_file_that_is_no_certificate_is_named(call: Call) -> None:
    call("keys", "--out", "k", "--host", "localhost", "pi")
    words = ["join", "localhost:1", "--device", "0", "--key", "k/devices/pi"]
    code, _, message = call(*words, "--trust", "k/devices/pi", "--patience-s", "1")
    assert code == 2
    assert "--trust: given k/devices/pi, which holds no certificate" in message


def test_any_path_is_shown_as_it_is_and_nothing_but_a_file_is_replaced(
    call: Call, tmp_path: Path
) -> None:
    folder = "ünï [x] [/y] :smile: " + 30 * "long"
    code, told, _ = call("run", *sets(tmp_path, "run.rounds=1"), "--workers", "1", "--out", folder)
    assert code == 0
    assert f"open {folder}/report.html" in told.replace("\n", "¶")  # and in one line
    os.mkfifo("pipe")
    for words in (["report", folder], ["export", folder, "--format", "elastic"]):
        code, _, message = call(*words, "--out", "pipe")
        assert (code, Path("pipe").is_fifo()) == (2, True)
        assert "is not a file" in message


def test_a_full_disk_behind_stdout_is_one_message() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [PROGRAM, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "No space left" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(call: Call) -> None:
    code, _, message = call("run", "--dry-run", "--set", "training.device=cuda")
    assert code == 2
    assert "given cuda, which this machine lacks" in message


def test_labels_beyond_the_models_outputs_are_refused(call: Call, tmp_path: Path) -> None:
    images, labels = np.zeros((20, 28, 28), np.uint8), np.arange(20)
    np.savez(
        tmp_path / "many.npz",
        train_images=images,
        train_labels=labels,
        test_images=images,
        test_labels=labels,
    )
    words = sets(tmp_path, "data.name=many.npz")
    code, _, message = call("run", *words, "--out", "x")
    assert code == 2
    assert "sample 10 is of class 10, but the model has 10 outputs; must be 0 to 9" in message
    assert not (tmp_path / "x").exists()


def test_a_run_in_which_no_device_took_part_says_why(call: Call, tmp_path: Path) -> None:
    poor = sets(tmp_path, "fleet.energy_min_j=1e-9", "fleet.energy_max_j=2e-9")
    words = ["run", *poor, "--rounds", "2", "--workers", "1", "--out", "x", "--json"]
    code, text, message = call(*words)
    assert code == 0
    assert "of 8 devices drawn, none sent an update that counts" in message
    assert "(8 times) infeasible: radio" in message
    told = json.loads(text)
    assert (told["target"], told["rounds_to_target"]) == (0.8, None)
    reported = json.loads(call("report", "x", "--json")[1])["runs"][0]
    assert reported["refused_because"] == told["refused_because"] == {}


def test_the_version_is_shown(call: Call) -> None:
    assert call("--version")[1].strip() == anycostfl.__version__


def test_every_public_name_is_there() -> None:
    assert all(hasattr(anycostfl, name) for name in anycostfl.__all__)
    assert set(anycostfl.__all__) <= set(dir(anycostfl))
    assert {"run", "load_preset", "Contribution"} <= set(anycostfl.__all__)


def test_a_script_without_a_main_guard_gets_advice(tmp_path: Path) -> None:
    overrides = small_overrides(tmp_path, "run.rounds=1")
    script = tmp_path / "script.py"
    script.write_text(
        f"import anycostfl\n"
        f"list(anycostfl.run(anycostfl.load_preset('demo', {overrides!r}), workers=2))\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=300
    )
    told = [line for line in done.stderr.splitlines() if line.startswith("anycostfl.")]
    assert 'if __name__ == "__main__"' in told[-1]
