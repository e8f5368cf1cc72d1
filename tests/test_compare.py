"""Comparisons: what is done is not repeated, costs by hand, replays on another fleet."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from anycostfl import methods, tasks
from anycostfl.cli import build_app
from anycostfl.config import Config, preset_names
from anycostfl.errors import AnycostError
from anycostfl.evaluation.compare import (
    COSTS,
    Case,
    CompareError,
    Finding,
    Series,
    Spent,
    as_cells,
    compare_runs,
    cost_of,
    cost_to,
    curves,
    goal_of,
    lasted,
    make_case,
    make_row,
    mean_late,
    over_budget,
    papers_rows,
    reached,
    recost,
    rows_as_numbers,
)
from anycostfl.files import InUseError, exclusive_lock
from anycostfl.metrics import MetricInfo
from anycostfl.records.round import DeviceRecord, Records, RoundRecord, Status, total
from anycostfl.records.run import read_journal
from small_runs import small_config, small_overrides


def make_rounds(*values: float | None) -> list[RoundRecord]:
    """Two devices a round: 3 s and 5 s, 1 J and 2 J, 10 and 20 bytes, half and all the FLOPs."""
    one = DeviceRecord(0, Status.OK, samples=100, budget_j=9.0, flops_ratio=0.5, bytes_up=10)
    two = replace(one, device=1, flops_ratio=1.0, bytes_up=20, compute_s=5.0, upload_j=2.0)
    devices = (replace(one, compute_s=3.0, compute_j=1.0), two)
    return [RoundRecord(i, value, devices) for i, value in enumerate(values)]


ERROR = MetricInfo("mae", "µg/m³", 1.0, higher_is_better=False)


def aiming(config: Config, target: float | None, info: MetricInfo | None = None) -> Config:
    """The configuration with another target, and perhaps another metric."""
    run = replace(config.run, target=target)
    return replace(config, run=run, metric=info or config.metric)


def test_costs_by_hand(tmp_path: Path) -> None:
    config = aiming(small_config(tmp_path), 0.7)
    config = replace(config, workload=replace(config.workload, flops_per_sample=1e9))
    higher = aiming(config, 0.71)
    records = make_rounds(0.1, None, 0.7, 0.6)
    assert cost_of(total(records), config) == pytest.approx(
        dict(zip(COSTS, (4, 12e-3, 20 / 60, 0.6, 120e-9), strict=True))
    )
    assert cost_to(records, config) == Spent(cost_of(total(records[:3]), config), reached=True)
    assert cost_to(records, higher) == Spent(cost_of(total(records), config), reached=False)
    assert reached(config)(records)
    assert not reached(higher)(records)
    assert goal_of(config) == "to 70.00 %"


def test_an_error_is_reached_from_above_and_no_target_never(tmp_path: Path) -> None:
    config = aiming(small_config(tmp_path), 12.0, ERROR)
    records = make_rounds(30.0, None, math.nan, 12.0, 15.0)
    assert not reached(config)(records[:3])
    assert reached(config)(records)
    assert cost_to(records, config) == Spent(cost_of(total(records[:4]), config), reached=True)
    assert goal_of(config) == "to 12 µg/m³"
    endless = aiming(config, None)
    assert not reached(endless)(records)
    assert cost_to(records, endless) == Spent(cost_of(total(records), config), reached=False)
    assert goal_of(endless) == "all rounds"


def test_late_rounds_decide_and_a_run_that_diverged_there_has_none() -> None:
    values = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    assert mean_late(make_rounds(*values), 8) == pytest.approx(0.7)
    assert mean_late(make_rounds(*values[:7], None), 8) == pytest.approx(0.65)
    assert mean_late(make_rounds(*values[:5], None, None, None), 8) is None
    assert mean_late(make_rounds(*values[:7], math.nan), 8) is None
    assert mean_late(make_rounds(*values[:7], math.inf), 8) is None
    assert mean_late(make_rounds(math.nan, *values[1:]), 8) == pytest.approx(0.7)


def test_the_share_of_devices_over_budget_by_hand(tmp_path: Path) -> None:
    config = small_config(tmp_path, "fleet.latency_s=5.0")  # just enough for the slower one
    affordable = make_rounds(0.1, 0.7)
    assert over_budget(affordable, config) == 0.0
    late = replace(config, fleet=replace(config.fleet, latency_s=4.0))
    assert over_budget(affordable, late) == 0.5
    (first, second), idle = affordable[0].devices, DeviceRecord(2, Status.INFEASIBLE)
    poor = RoundRecord(0, None, (replace(first, budget_j=0.9), second, idle))
    assert over_budget([poor, *affordable[1:]], config) == 0.25
    assert over_budget([], config) == 0.0
    row = make_row("stc", [(config, [poor]), (late, [poor])])
    assert row.over == 0.75  # one of two, both of two
    assert as_cells([row], {}, config.metric)[0][8] == "75"
    hurried = replace(poor, devices=(first, replace(second, budget_s=4.0), idle))
    assert over_budget([hurried], config) == 0.5  # a device's own budget counts, where it has one
    patient = replace(poor, devices=(first, replace(second, budget_s=6.0), idle))
    assert over_budget([patient], late) == 0.0


def test_a_row_is_the_mean_over_seeds(tmp_path: Path) -> None:
    config = aiming(small_config(tmp_path), 0.8)
    runs = [(config, make_rounds(0.5, 0.9)), (config, make_rounds(0.5, 0.6, 0.5, 0.8))]
    row, info = make_row("anycostfl", runs), config.metric
    assert (row.reached, row.cost["rounds"], row.seeds) == (True, 3, 2)
    assert row.best == pytest.approx(0.85)
    assert row.spread == pytest.approx(0.0707, abs=1e-3)
    high = [(aiming(config, 0.85), records) for _, records in runs]
    short = make_row("stc", high)  # one seed gets there after 2 rounds, one not in 4
    assert not short.reached
    assert short.cost == row.cost  # to be read as "more than"
    cells = as_cells([row, short], papers_rows("fmnist-iid"), info)
    assert [line[0] for line in cells] == ["anycostfl", "  paper", "stc", "  paper"]
    assert cells[0][3] == "3 (1.00×)"
    assert cells[2][3:5] == ["> 3", "> 0.009"]
    unknown = replace(row, reached=False)
    assert as_cells([unknown, make_row("stc", runs)], {}, info)[1][3] == "3"  # no ratio to it
    assert cells[3][3] == "305 (1.70×)"
    far = replace(row, label="fedavg", cost={**row.cost, "rounds": 36})
    assert as_cells([row, far], {}, info)[1][3] == "36 (12.0×)"
    assert rows_as_numbers([row])[1][:6] == ["anycostfl", 0.05, 2, 4, True, 3.0]
    assert cells[0][-1] == "≥ 85.00 ± 7.07"  # not all rounds were run


def test_a_row_of_errors_has_the_smallest_one_in_their_unit(tmp_path: Path) -> None:
    config = aiming(small_config(tmp_path, "run.rounds=4"), 12.0, ERROR)
    runs = [(config, make_rounds(30.0, 12.0)), (config, make_rounds(30.0, None, 14.0, 11.5))]
    row = make_row("anycostfl", runs)
    assert (row.reached, row.cost["rounds"], row.best) == (True, 3, 11.75)
    assert as_cells([row], {}, ERROR)[0][-1] == "≤ 11.75 ± 0.3536"
    never = make_row("stc", [(config, make_rounds(None, None))])
    assert (never.reached, never.best, never.spread) == (False, None, None)
    assert as_cells([never], {}, ERROR)[0][-1] == "≤ –"
    found = compare_runs({"stc": runs}, config, "")
    assert found.header[-1] == "best µg/m³"
    assert (found.document["metric"], found.document["target"]) == ("mae", 12.0)


def test_a_finding_is_written_as_a_table_as_numbers_and_as_a_figure(tmp_path: Path) -> None:
    drawn: list[Path] = []
    numbers: dict[str, list[list[object]]] = {
        ".csv": [["a", "b"], [1, None]],
        ".more.csv": [["c"], [0.5]],
    }
    Finding(("a", "b"), [["1", "2"]], {}, numbers, drawn.append).write(tmp_path / "found")
    assert (tmp_path / "found.md").read_text() == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
    assert (tmp_path / "found.csv").read_bytes() == b"a,b\r\n1,\r\n"
    assert (tmp_path / "found.more.csv").read_bytes() == b"c\r\n0.5\r\n"
    assert drawn == [tmp_path / "found.png"]


def test_curves_by_hand(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.seed=7", "training.learning_rate=0.1")
    config = replace(config, workload=replace(config.workload, flops_per_sample=1e9))
    lines = curves({"stc": [(config, make_rounds(0.1, None, 0.7))]}, config.metric)
    assert [",".join(map(str, line)) for line in lines] == [
        "method,rate,seed,round,accuracy,energy_kj,latency_min,tflops,gigabytes",
        "stc,0.1,7,1,0.1,0.003,0.0833333,0.15,3e-08",
        "stc,0.1,7,3,0.7,0.009,0.25,0.45,9e-08",
    ]
    assert curves({}, ERROR)[0][4] == "mae"


def test_the_papers_table_is_whole() -> None:
    for preset in preset_names():
        rows = papers_rows(preset)
        assert len(rows) == (6 if preset.endswith("iid") else 0)
        assert all(len(values) == 7 for values in rows.values())


def nobody(_case: Case, _records: Records) -> None:
    """Watches nothing."""


def test_what_is_done_is_not_repeated(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.rounds=4")
    seen: list[int] = []
    series = Series(tmp_path / "all", 1, lambda _case, records: seen.append(len(records)))
    case = make_case(config, "stc", 0.05, 1)
    first = series.advance(case, lasted(2))
    assert seen == [1, 2]
    assert series.advance(case, lasted(2)) == first  # played no round
    assert seen == [1, 2]
    whole = series.advance(case, lasted(4))  # goes on, residuals and all
    assert seen == [1, 2, 3, 4]
    other = Series(tmp_path / "at once", 1, nobody).advance(case, lasted(4))
    assert whole == other
    again = Series(series.folder, 1, nobody, play=False)
    assert again.advance(case, lasted(99)) == whole
    assert again.advance(make_case(config, "qsgd", 0.05, 1), lasted(1)) == []


def test_a_run_continues_only_with_the_settings_it_began_with(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    series = Series(tmp_path / "all", 1, nobody)
    series.advance(make_case(config, "anycostfl", 0.05, 0), lasted(1))
    changed = replace(config, training=replace(config.training, batch=7))
    with pytest.raises(CompareError, match="other settings"):
        series.advance(make_case(changed, "anycostfl", 0.05, 0), lasted(2))
    with pytest.raises(CompareError, match="other settings"):  # though it is enough
        series.advance(make_case(changed, "anycostfl", 0.05, 0), lasted(1))
    longer = replace(config, run=replace(config.run, rounds=9, target=0.3))
    assert len(series.advance(make_case(longer, "anycostfl", 0.05, 0), lasted(2))) == 2


def test_a_run_does_not_continue_with_another_method_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "mine" / "methods" / "own_average.py"
    own.parent.mkdir(parents=True)
    text = "from anycostfl.methods import load\nMETHOD = load('fedavg')\n"
    own.write_text(text)
    monkeypatch.setenv("ANYCOSTFL_PATH", str(tmp_path / "mine"))
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(own.parent)])
    series = Series(tmp_path / "all", 1, nobody)
    case = make_case(small_config(tmp_path), "own_average", 0.05, 0)
    first = series.advance(case, lasted(1))
    assert series.advance(case, lasted(1)) == first
    own.write_text(text + "two = 2\n")
    with pytest.raises(AnycostError, match=r"another methods/own_average\.py"):
        series.advance(case, lasted(1))


def test_a_run_does_not_continue_with_another_task_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, config = tmp_path / "mine" / "tasks" / "own_stripes.py", small_config(tmp_path)
    own.parent.mkdir(parents=True)
    text = f"from anycostfl.tasks import array_task\nTASK = array_task({config.data.name!r})\n"
    own.write_text(text)
    monkeypatch.setenv("ANYCOSTFL_PATH", str(tmp_path / "mine"))
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(own.parent)])
    series = Series(tmp_path / "all", 1, nobody)
    named = replace(config, data=replace(config.data, name="own-stripes"))
    case = make_case(named, "fedavg", 0.05, 0)
    first = series.advance(case, lasted(1))
    assert series.advance(case, lasted(1)) == first
    own.write_text(text + "two = 2\n")
    with pytest.raises(AnycostError, match=r"another tasks/own_stripes\.py"):
        series.advance(case, lasted(1))


def test_the_planned_end_of_a_run_does_not_change_its_rounds(tmp_path: Path) -> None:
    def rounds(folder: str, *more: str) -> Records:
        config = small_config(tmp_path, "run.method=uveqfed", *more)
        return Series(tmp_path / folder, 1, nobody).advance(Case("one", config), lasted(2))

    short = rounds("short", "run.rounds=2")
    assert rounds("long", "run.rounds=9", "run.checkpoint_every=3", "summary=else") == short


def test_an_extended_run_equals_one_that_was_planned_as_long(tmp_path: Path) -> None:
    def rounds(folder: str, count: int) -> Records:
        config = small_config(tmp_path, "run.evaluate_every=3", f"run.rounds={count}")
        return Series(tmp_path / folder, 1, nobody).advance(Case("one", config), lasted(count))

    assert rounds("once", 2)[1].metric is not None
    assert rounds("once", 4) == rounds("at once", 4)
    assert [r.metric is None for r in rounds("once", 4)] == [True, True, False, False]


def test_an_extended_run_forgets_every_metric_of_what_was_its_last_round(tmp_path: Path) -> None:
    path = tmp_path / "windows.npz"
    random = np.random.default_rng(0)
    x, y = random.normal(0, 1, (240, 1, 28, 28)).astype(np.float32), np.arange(240) % 10
    arrays: dict[str, Any] = {"train_inputs": x, "train_targets": y}
    arrays |= {"train_owners": np.arange(240) % 12}
    arrays |= {"test_inputs": x[:60], "test_targets": y[:60], "test_owners": np.arange(60) % 15}
    np.savez(path, **arrays)

    def rounds(folder: str, count: int) -> Records:
        own = (f'data.name="{path}"', "run.evaluate_every=3")
        config = small_config(tmp_path, *own, f"run.rounds={count}")
        return Series(tmp_path / folder, 1, nobody).advance(Case("one", config), lasted(count))

    assert rounds("once", 2)[1].others.keys() == {"accuracy, known owners", "accuracy, new owners"}
    assert rounds("once", 4) == rounds("at once", 4)
    assert [bool(r.others) for r in rounds("once", 4)] == [False, False, True, True]


def test_a_round_with_a_suspended_device_cannot_be_recosted(tmp_path: Path) -> None:
    config = make_case(small_config(tmp_path), "stc", 0.05, 0).config
    records = Series(tmp_path / "all", 1, nobody).advance(Case("stc", config), lasted(1))
    away = replace(records[0].devices[0], status=Status.SUSPENDED, samples=0)
    changed = replace(records[0], devices=(away, *records[0].devices[1:]))
    assert recost([changed], config) is None


def test_the_best_learning_rate_wins(tmp_path: Path) -> None:
    series = Series(tmp_path / "all", 1, nobody, rates=[1e-9, 0.05, 50.0], trial=4)
    config = small_config(tmp_path)
    assert series.best_rate(config, "fedavg") == 0.05
    alone = replace(config, training=replace(config.training, learning_rate=0.7))
    assert Series(tmp_path / "all", 1, nobody).best_rate(alone, "fedavg") == 0.7


def test_poor_learning_rates_are_dropped_early(tmp_path: Path) -> None:
    rates = [1e-9, 2e-9, 0.03, 0.05, 50.0]
    series = Series(tmp_path / "all", 1, nobody, rates=rates, trial=4)
    best = series.best_rate(small_config(tmp_path), "fedavg")
    played = [len(read_journal(series.folder / f"fedavg-lr{r:g}-seed0")[0]) for r in rates]
    assert best in (0.03, 0.05)
    assert sorted((*played[:2], played[4])) == [1, 1, 2]
    assert played[2:4] == [4, 4]


def test_larger_learning_rates_are_tried_while_the_largest_is_the_best(tmp_path: Path) -> None:
    series = Series(tmp_path / "all", 1, nobody, rates=[0.02, 0.04], trial=3)
    config = small_config(tmp_path, "run.evaluate_every=2")
    best = series.best_rate(config, "fedavg")
    assert best > 0.04
    tried = {path.name: len(read_journal(path)[0]) for path in series.folder.iterdir()}
    assert tried[f"fedavg-lr{2 * best:g}-seed0"] == 4  # up to an evaluation
    only = Series(tmp_path / "all", 1, nobody, play=False, rates=[0.02, 0.04], trial=3)
    assert only.best_rate(config, "fedavg") == best


def test_longer_runs_count_up_to_the_rounds_asked_for(tmp_path: Path) -> None:
    long = small_config(tmp_path, "run.rounds=3")
    told: list[int] = []
    series = Series(tmp_path / "all", 1, lambda _, records: told.append(len(records)))
    made = make_case(long, "fedavg", 0.05, 0)
    assert len(series.advance(made, lasted(3))) == 3
    short = make_case(small_config(tmp_path, "run.rounds=2"), "fedavg", 0.05, 0)
    assert len(series.advance(short, lasted(2))) == 2
    assert len(series.advance(short, lambda _: False)) == 2
    assert told == [1, 2, 3]  # nothing was played again


def test_only_one_process_locks_a_folder(tmp_path: Path) -> None:
    with (
        exclusive_lock(tmp_path),
        pytest.raises(InUseError, match=str(os.getpid())),
        exclusive_lock(tmp_path),
    ):
        pass


def test_another_fleet_pays_for_the_same_training(tmp_path: Path) -> None:
    config = make_case(small_config(tmp_path), "stc", 0.05, 0).config
    series = Series(tmp_path / "all", 1, nobody)
    records = series.advance(Case("stc", config), lasted(2))
    same = recost(records, config)
    assert same is not None
    for was, now in zip(records, same, strict=True):
        assert now.energy_j == pytest.approx(was.energy_j)
        assert now.latency_s == pytest.approx(was.latency_s)
    fleet = replace(config.fleet, energy_coefficient_std=1e-27)
    trained = series.advance(Case("stc again", replace(config, fleet=fleet)), lasted(2))
    paid = recost(records, replace(config, fleet=fleet))
    assert paid is not None
    for was, now in zip(trained, paid, strict=True):
        assert now.metric == was.metric
        assert now.energy_j == pytest.approx(was.energy_j)
    planned = series.advance(make_case(config, "anycostfl", 0.05, 0), lasted(2))
    moved = replace(config, fleet=fleet, run=replace(config.run, method="anycostfl"))
    assert recost(planned, moved) is None  # it would have planned otherwise
    suspended = DeviceRecord(99, Status.SUSPENDED)
    more = replace(records[0], devices=(*records[0].devices, suspended))
    assert recost([more], config) is None  # others would have been drawn


def test_a_device_that_is_infeasible_in_both_fleets_pays_nothing(tmp_path: Path) -> None:
    nothing = ("fleet.energy_min_j=1e-9", "fleet.energy_max_j=1e-9")
    config = make_case(small_config(tmp_path, *nothing), "anycostfl", 0.05, 0).config
    records = Series(tmp_path / "all", 1, nobody).advance(Case("poor", config), lasted(1))
    fleet = replace(config.fleet, energy_coefficient_std=1e-27)
    paid = recost(records, replace(config, fleet=fleet))
    assert paid is not None
    assert [d.status for d in paid[0].devices] == [d.status for d in records[0].devices]
    assert {d.status for d in records[0].devices} == {Status.INFEASIBLE}


def test_compare_from_the_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    words = [
        "compare",
        "demo",
        "--methods",
        "anycostfl,stc",
        "--learning-rates",
        "0.01,0.05",
        "--trial",
        "2",
    ]
    words += ["--rounds", "3", "--workers", "1", "--out", str(folder), "--json"]
    for item in small_overrides(tmp_path):
        words += ["--set", item] if not item.startswith("run.rounds") else []
    result = CliRunner().invoke(build_app(), words)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["label"] for row in rows] == ["anycostfl", "stc"]
    assert (folder / "tuned.md").read_text().startswith("| method |")
    assert (folder / "tuned.png").stat().st_size > 10_000
    assert len(list(folder.glob("*-seed0"))) >= 4
    words[words.index("anycostfl,stc")] = "stc"  # the table keeps what is there already
    (folder / "tuned.md").unlink()
    result = CliRunner().invoke(build_app(), [*words, "--show"])
    assert json.loads(result.stdout)["rows"] == rows
    assert not (folder / "tuned.md").exists()  # showing writes nothing
    for bad, message in ((["--methods", "sct"], "stc"), (["--rates", "x"], "numbers")):
        result = CliRunner().invoke(build_app(), ["compare", "demo", *bad])
        assert message in str(result.exception)


def test_compare_continues_in_the_background(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "anycostfl", "compare", "demo", "--methods", "fedavg"]
    words += ["--rounds", "1", "--workers", "1", "--out", str(tmp_path / "all"), "--background"]
    for item in small_overrides(tmp_path):
        words += ["--set", item] if not item.startswith("run.rounds") else []
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
    assert "runs in the background" in done.stderr
    assert not done.stdout
    until = time.monotonic() + 60
    while not (tmp_path / "all" / "results.csv").exists():
        assert time.monotonic() < until, (tmp_path / "all" / "log.txt").read_text()
        time.sleep(0.3)
    again = subprocess.run([*words, "--json"], check=True, capture_output=True, timeout=60)
    told = json.loads(again.stdout)
    assert told["log"] == str(tmp_path / "all" / "log.txt")
    while Path("/proc", str(told["process"])).exists():  # nothing is left to play
        assert time.monotonic() < until + 60
        time.sleep(0.3)
