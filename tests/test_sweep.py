"""Fig. 4 on a fleet of twelve: ablation, heterogeneity, widths."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anycostfl import methods
from anycostfl.cli import build_app
from anycostfl.cli.sweep import KINDS
from anycostfl.errors import ConfigError
from anycostfl.evaluation import sweep
from anycostfl.evaluation.compare import Series
from anycostfl.evaluation.sweep import WIDTHS, spread_over, widths
from anycostfl.fleets.attackers import ATTACKS
from anycostfl.planning.draw import draw_cohort
from small_runs import small_config, small_overrides


def call(tmp_path: Path, *words: str) -> dict[str, object]:
    arguments = ["sweep", *words, "--out", str(tmp_path / "all"), "--workers", "1", "--json"]
    for item in small_overrides(tmp_path, "run.rounds=3", "run.target_accuracy=0.05"):
        arguments += ["--set", item]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_ablation_charges_what_the_missing_part_saved(tmp_path: Path) -> None:
    found = call(tmp_path, "ablation", "demo")["ablation"]
    assert isinstance(found, dict)
    assert list(found) == ["anycostfl", *methods.variants("anycostfl")]
    # All reach 5 % in the first round, so one round's costs stand side by side.
    whole = found["anycostfl"]
    assert found["anycostfl/without-ems"]["energy_kj"] > whole["energy_kj"]
    assert found["anycostfl/without-fgc"]["latency_min"] > 3 * whole["latency_min"]
    assert found["anycostfl/without-fgc"]["gigabytes"] > 10 * whole["gigabytes"]
    assert found["anycostfl/without-aio"]["gigabytes"] == pytest.approx(whole["gigabytes"])
    assert (tmp_path / "all" / "ablation.png").stat().st_size > 5_000
    header, first, *_ = csv.reader((tmp_path / "all" / "ablation.csv").read_text().splitlines())
    assert (header[0], first[0], first[1]) == ("method", "anycostfl", "True")
    assert dict(zip(header[2:], map(float, first[2:]), strict=True)) == {
        key: value for key, value in whole.items() if key != "reached"
    }
    words = "ablation", "demo", "--target", "1", "--rounds", "1"  # which nobody reaches
    in_vain = call(tmp_path, *words)["ablation"]
    assert isinstance(in_vain, dict)
    assert not in_vain["anycostfl"]["reached"]
    table = (tmp_path / "all" / "ablation.md").read_text()
    assert "| > 1 |" in table
    assert ">" not in (tmp_path / "all" / "ablation.csv").read_text()
    assert (tmp_path / "all" / "ablation.png").stat().st_size > 5_000  # bars all the same


def test_heterogeneity_trains_only_methods_that_plan_otherwise(tmp_path: Path) -> None:
    words = ("compute", "demo", "--methods", "anycostfl,stc", "--values", "0,3e-27")
    found = call(tmp_path, *words)["compute"]
    assert isinstance(found, dict)
    assert [point[0] for point in found["stc"]] == [0, 3e-27]
    assert found["stc"][0][1]["energy_kj"] != found["stc"][1][1]["energy_kj"]
    trained = sorted(path.name for path in (tmp_path / "all").iterdir() if path.is_dir())
    assert "stc-lr0.05-seed0" in trained
    assert not [name for name in trained if name.startswith("stc-lr0.05-seed0-")]
    assert "anycostfl-lr0.05-seed0-compute3e-27" in trained
    shown = call(tmp_path, *words, "--target", "1", "--show")["compute"]
    assert isinstance(shown, dict)
    assert shown["stc"] == [[x, {**costs, "reached": False}] for x, costs in found["stc"]]


def test_an_impossible_spread_is_refused_before_any_round(tmp_path: Path) -> None:
    arguments = ["sweep", "compute", "demo", "--values", "0,5e-27", "--out", str(tmp_path / "all")]
    result = CliRunner().invoke(build_app(), arguments)
    assert "energy_coefficient_std: given 5e-27" in str(result.exception)
    result = CliRunner().invoke(
        build_app(), [*arguments, "--set", 'fleet.profiles=["jetson-nano"]', "--values", "0,1e-27"]
    )
    assert "given beside profiles" in str(result.exception)
    assert not (tmp_path / "all").exists() or not [*(tmp_path / "all").glob("*/rounds.jsonl")]


def test_nothing_is_shown_before_anything_was_run(tmp_path: Path) -> None:
    for kind in KINDS:
        arguments = ["sweep", kind, "demo", "--show", "--out", str(tmp_path)]
        result = CliRunner().invoke(build_app(), arguments)
        assert "holds no run of this" in str(result.exception)


def test_spreads_change_the_fleet(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    near = draw_cohort(spread_over(config, "radio", 0.0).fleet, seed=0, round_index=0)
    assert near.distance_m == pytest.approx(400.0)
    equal = draw_cohort(spread_over(config, "compute", 0.0).fleet, seed=0, round_index=0)
    assert equal.devices.energy_coefficient == pytest.approx(7.5e-27, abs=0)


def test_widths_of_every_method(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.rounds=1")
    series = Series(tmp_path / "all", 1, lambda *_: None)
    found = widths(series, config, ["anycostfl", "heterofl"]).document["widths"]
    assert isinstance(found, dict)
    assert found.pop("alpha") == list(WIDTHS)
    assert list(found) == ["anycostfl", "heterofl"]
    assert all(len(values) == len(WIDTHS) for values in found.values())
    reached = [value for values in found.values() for value in values]
    assert all(value is not None and 0 <= value <= 1 for value in reached)


def test_widths_that_a_model_does_not_have_stay_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "WIDTHS", (1e-6, 1.0))
    found = call(tmp_path, "widths", "demo", "--rounds", "1", "--methods", "anycostfl")["widths"]
    assert isinstance(found, dict)
    narrow, whole = found["anycostfl"]
    assert narrow is None
    assert 0 <= whole <= 1


def test_an_unknown_kind_is_named() -> None:
    result = CliRunner().invoke(build_app(), ["sweep", "ablations", "demo"])
    assert isinstance(result.exception, ConfigError)
    assert "ablation, compute, radio, widths, attacks" in str(result.exception)


def test_attacks_with_and_without_a_defence(tmp_path: Path) -> None:
    found = call(tmp_path, "attacks", "demo", "--rounds", "2")["attacks"]
    assert isinstance(found, dict)
    assert list(found) == ["none", *ATTACKS]
    assert all(list(row) == ["open", "defended"] for row in found.values())
    assert len({tuple(row.values()) for row in found.values()}) > 1
    folder = tmp_path / "all"
    header, clean, *rest = (folder / "attacks.csv").read_text().splitlines()
    assert header == "attack,open,defended"
    assert clean == f"none,{found['none']['open']},{found['none']['defended']}"
    assert len(rest) == len(ATTACKS)
    assert (folder / "attacks.md").read_text().count("\n") == 3 + len(ATTACKS)
