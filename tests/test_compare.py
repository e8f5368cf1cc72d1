"""Comparisons: what is done is not repeated, costs by hand, replays on another fleet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anycostfl import methods
from anycostfl.cli import build_app
from anycostfl.config import preset_names
from anycostfl.errors import AnycostError
from anycostfl.evaluation.compare import (
    Case,
    CompareError,
    Cost,
    Series,
    Spent,
    as_cells,
    cost_of,
    cost_to,
    lasted,
    make_case,
    make_row,
    over_budget,
    papers_rows,
    reached,
    recost,
    score,
    to_csv,
    to_curves,
    to_markdown,
)
from anycostfl.files import InUseError, exclusive_lock
from anycostfl.records.round import DeviceRecord, Records, RoundRecord, Status, total
from anycostfl.records.run import read_journal
from small_runs import small_config, small_overrides


def make_rounds(*accuracies: float | None) -> list[RoundRecord]:
    """Two devices a round: 3 s and 5 s, 1 J and 2 J, 10 and 20 bytes, half and all the FLOPs."""
    one = DeviceRecord(0, Status.OK, samples=100, budget_j=9.0, flops_ratio=0.5, bytes_up=10)
    two = replace(one, device=1, flops_ratio=1.0, bytes_up=20, compute_s=5.0, upload_j=2.0)
    devices = (replace(one, compute_s=3.0, compute_j=1.0), two)
    return [RoundRecord(i, accuracy, devices) for i, accuracy in enumerate(accuracies)]


def test_costs_by_hand(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config = replace(config, workload=replace(config.workload, flops_per_sample=1e9))
    records = make_rounds(0.1, None, 0.7, 0.6)
    assert cost_of(total(records), config) == pytest.approx(Cost(4, 12e-3, 20 / 60, 0.6, 120e-9))
    assert cost_to(records, config, 0.7) == Spent(cost_of(total(records[:3]), config), reached=True)
    assert cost_to(records, config, 0.71) == Spent(cost_of(total(records), config), reached=False)
    assert reached(0.7)(records)
    assert not reached(0.71)(records)
    assert score(make_rounds(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8), 8) == pytest.approx(0.7)


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
    row = make_row("stc", [(config, [poor]), (late, [poor])], 0.8)
    assert row.over == 0.75  # one of two, both of two
    assert as_cells([row], "")[0][8] == "75"


def test_a_row_is_the_mean_over_seeds(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    runs = [(config, make_rounds(0.5, 0.9)), (config, make_rounds(0.5, 0.6, 0.5, 0.8))]
    row = make_row("anycostfl", runs, 0.8)
    assert (row.reached, row.cost.rounds, row.seeds) == (True, 3, 2)
    assert row.best == pytest.approx(0.85)
    assert row.spread == pytest.approx(0.0707, abs=1e-3)
    short = make_row("stc", runs, 0.85)  # one seed gets there after 2 rounds, one not in 4
    assert not short.reached
    assert short.cost == row.cost  # to be read as "more than"
    cells = as_cells([row, short], "fmnist-iid")
    assert [line[0] for line in cells] == ["anycostfl", "  paper", "stc", "  paper"]
    assert cells[0][3] == "3 (1.00×)"
    assert cells[2][3:5] == ["> 3", "> 0.009"]
    unknown = replace(row, reached=False)
    assert as_cells([unknown, make_row("stc", runs, 0.8)], "")[1][3] == "3"  # no ratio to it
    assert cells[3][3] == "305 (1.70×)"
    far = replace(row, label="fedavg", cost=replace(row.cost, rounds=36))
    assert as_cells([row, far], "")[1][3] == "36 (12.0×)"
    assert to_markdown(("a", "b"), [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
    assert to_csv([row]).splitlines()[1].startswith("anycostfl,0.05,2,4,True,3.0,")


def test_curves_by_hand(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.seed=7", "training.learning_rate=0.1")
    config = replace(config, workload=replace(config.workload, flops_per_sample=1e9))
    lines = to_curves({"stc": [(config, make_rounds(0.1, None, 0.7))]}).splitlines()
    assert lines == [
        "method,rate,seed,round,accuracy,energy_kj,latency_min,tflops,gigabytes",
        "stc,0.1,7,1,0.1,0.003,0.0833333,0.15,3e-08",
        "stc,0.1,7,3,0.7,0.009,0.25,0.45,9e-08",
    ]


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
    assert list(series.advance(case, lasted(2))) == first  # played no round
    assert seen == [1, 2]
    whole = series.advance(case, lasted(4))  # goes on, residuals and all
    assert seen == [1, 2, 3, 4]
    other = Series(tmp_path / "at once", 1, nobody).advance(case, lasted(4))
    assert whole == other
    again = Series(series.folder, 1, nobody, play=False)
    assert list(again.advance(case, lasted(99))) == whole
    assert again.advance(make_case(config, "qsgd", 0.05, 1), lasted(1)) == ()


def test_a_run_continues_only_with_the_settings_it_began_with(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    series = Series(tmp_path / "all", 1, nobody)
    series.advance(make_case(config, "anycostfl", 0.05, 0), lasted(1))
    changed = replace(config, training=replace(config.training, batch=7))
    with pytest.raises(CompareError, match="other settings"):
        series.advance(make_case(changed, "anycostfl", 0.05, 0), lasted(2))
    with pytest.raises(CompareError, match="other settings"):  # though it is enough
        series.advance(make_case(changed, "anycostfl", 0.05, 0), lasted(1))
    longer = replace(config, run=replace(config.run, rounds=9, target_accuracy=0.3))
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
    assert series.advance(case, lasted(1)) == tuple(first)
    own.write_text(text + "two = 2\n")
    with pytest.raises(AnycostError, match=r"another methods/own_average\.py"):
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

    assert rounds("once", 2)[1].accuracy is not None
    assert rounds("once", 4) == rounds("at once", 4)
    assert [r.accuracy is None for r in rounds("once", 4)] == [True, True, False, False]


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
        assert now.accuracy == was.accuracy
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
