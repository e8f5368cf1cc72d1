"""Trackers receive the rounds of a run, and nothing is imported unless it is asked for."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from anycostfl.errors import ConfigError, MissingExtraError
from anycostfl.metrics import ACCURACY
from anycostfl.records.journal import parse_record
from anycostfl.report.trackers import flat, tracking, values_of
from command_line import Call
from small_runs import small_overrides


def options(folder: Path) -> list[str]:
    return [f"--set={change}" for change in small_overrides(folder, "run.rounds=2")]


def test_values_are_those_of_the_journal(call: Call, tmp_path: Path) -> None:
    assert call("run", "demo", "--out", "run", *options(tmp_path))[0] == 0
    lines = (tmp_path / "run/rounds.jsonl").read_bytes().splitlines()
    records = [parse_record(line) for line in lines]
    values = values_of(records, ACCURACY.info)
    assert values["metric/accuracy"] == records[-1].metric
    assert values["cost/bytes_up"] == sum(r.bytes_up for r in records)
    assert values["cost/energy_j"] == pytest.approx(sum(r.energy_j for r in records))
    statuses = [value for name, value in values.items() if name.startswith("devices/")]
    assert sum(statuses) == len(records[-1].devices)


def test_a_run_is_tracked_by_tensorboard(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    code, _, told = call("run", "demo", "--out", "r", "--track", "tensorboard", *options(tmp_path))
    assert code == 0, told
    events = EventAccumulator(str(tmp_path / "r/tensorboard")).Reload()
    assert [event.step for event in events.Scalars("metric/accuracy")] == [1, 2]


def test_mlflow_keeps_rounds_and_configuration_in_the_run_directory(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    with tracking(["mlflow"], tmp_path, {"run": {"method": "fedavg"}}) as sinks:
        for step in (1, 2):
            sinks[0](step, {"metric/accuracy": step / 4})
    [written] = tmp_path.glob("mlruns/*/*/metrics/metric/accuracy")
    assert [line.split()[1:] for line in written.read_text().splitlines()] == [
        ["0.25", "1"],
        ["0.5", "2"],
    ]
    [method] = tmp_path.glob("mlruns/*/*/params/run.method")
    assert method.read_text() == "fedavg"


def test_wandb_is_offline_unless_asked_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    with tracking(["wandb"], tmp_path, {}) as sinks:
        sinks[0](1, {"metric/accuracy": 0.5})
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_prometheus_reads_the_newest_round(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tracking([], tmp_path, {}, metrics=str(port)) as sinks:
        sinks[0](3, {"metric/accuracy": 0.25, "devices/ok": 2.0})
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    assert "anycostfl_rounds 3.0" in page
    assert "anycostfl_metric_accuracy 0.25" in page
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")


@pytest.mark.parametrize("address", ["x", "0", "70000", "localhost:"])
def test_an_address_that_is_none_is_refused(tmp_path: Path, address: str) -> None:
    pytest.importorskip("prometheus_client")
    with (
        pytest.raises(ConfigError, match="must be PORT or HOST:PORT"),
        tracking([], tmp_path, {}, metrics=address),
    ):
        pass


def test_an_unknown_or_missing_tracker_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="given neptune, must be tensorboard, mlflow, wandb"):
        tracking(["neptune"], tmp_path, {}).__enter__()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"anycostfl\[wandb\]"):
        tracking(["wandb"], tmp_path, {}).__enter__()


def test_nothing_is_imported_unless_asked_for() -> None:
    program = (
        "import sys; import anycostfl.cli.run, anycostfl.cli.serve\n"
        "found = {'tensorboard', 'mlflow', 'wandb', 'prometheus_client'} & set(sys.modules)\n"
        "sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_nested_table_is_flat() -> None:
    assert flat({"a": {"b": 1, "c": None}, "d": "x"}) == {"a.b": 1, "d": "x"}
