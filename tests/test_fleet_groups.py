"""Groups of devices with their own hardware and budgets, and devices that come and go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anycostfl.config import load_preset, load_profile, parse_config, profiles_of, to_toml
from anycostfl.errors import ConfigError
from anycostfl.planning.draw import Group, draw_fleet, present
from anycostfl.simulate import simulate
from small_runs import small_config

PRESET = """
base = "demo"
[fleet]
devices = 6
cohort = 4
day_rounds = 8
[[fleet.group]]
count = 2
profile = "raspberry-pi-4"
latency_s = 3.0
[[fleet.group]]
count = 4
energy_min_j = 2.0
energy_max_j = 2.5
available_share = 0.25
"""


def grouped(folder: Path) -> Path:
    (folder / "groups.toml").write_text(PRESET)
    return folder / "groups.toml"


def test_each_group_has_its_hardware_and_budgets(tmp_path: Path) -> None:
    config = load_preset(str(grouped(tmp_path)))
    fleet, demo = config.fleet, load_preset("demo", ["fleet.devices=6", "fleet.cohort=4"]).fleet
    drawn = draw_fleet(fleet, seed=0, round_index=3, profiles=profiles_of(fleet)).devices
    plain = draw_fleet(demo, seed=0, round_index=3).devices
    pi = load_profile("raspberry-pi-4")
    assert drawn.flops_per_cycle.tolist() == [pi.flops_per_cycle] * 2 + [demo.flops_per_cycle] * 4
    assert drawn.energy_coefficient[:2].tolist() == [pi.energy_coefficient] * 2
    assert np.array_equal(drawn.energy_coefficient[2:], plain.energy_coefficient[2:])
    assert drawn.latency_s.tolist() == [3.0] * 2 + [demo.latency_s] * 4
    assert np.array_equal(drawn.energy_j[:2], plain.energy_j[:2])
    share = (plain.energy_j[2:] - demo.energy_min_j) / (demo.energy_max_j - demo.energy_min_j)
    assert np.allclose(drawn.energy_j[2:], 2.0 + 0.5 * share)


def test_groups_read_back_as_they_were_written(tmp_path: Path) -> None:
    config = load_preset(str(grouped(tmp_path)))
    assert config.fleet.group[1] == Group(
        4, energy_min_j=2.0, energy_max_j=2.5, available_share=0.25
    )
    assert parse_config(to_toml(config), "again") == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("count = 2|count = 3", r"group: given 7 devices in all, must be fleet.devices \(6\)"),
        ("count = 2|count = 0", r"fleet.group\[0\].count: given 0"),
        ("latency_s = 3.0|latency = 3.0", r"fleet.group\[0\].latency: unknown key"),
        ("energy_max_j = 2.5|energy_max_j = 1.0", "group 1: energy_min_j = 2 is above"),
        ("day_rounds = 8|profiles = ['jetson-nano']", "profiles: given beside group"),
        ('"raspberry-pi-4"|"raspberry"', "no device profile 'raspberry'"),
    ],
)
def test_mistakes_in_groups_are_named(tmp_path: Path, change: str, words: str) -> None:
    path, (old, new) = grouped(tmp_path), change.split("|")
    path.write_text(PRESET.replace(old, new))
    with pytest.raises((ConfigError, LookupError, Exception), match=words):
        profiles_of(load_preset(str(path)).fleet)


@given(
    day=st.integers(1, 40),
    share=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_a_device_is_there_for_its_share_of_every_day(day: int, share: float, seed: int) -> None:
    spec = replace(load_preset("demo").fleet, day_rounds=day, available_share=share)
    rounds = [present(spec, seed=seed, round_index=t) for t in range(2 * day)]
    assert all(rounds)
    assert rounds[:day] == rounds[day:]
    if share == 1.0:
        assert all(len(there) == spec.devices for there in rounds)
    met = np.array([sum(i in there for there in rounds[:day]) for i in range(spec.devices)])
    alone = sum(len(there) == 1 for there in rounds[:day])  # who stood in where nobody was there
    assert (met >= np.floor(day * share)).all()
    assert met.sum() <= spec.devices * np.ceil(day * share + 1e-9) + alone


def test_a_run_draws_from_those_who_are_there(tmp_path: Path) -> None:
    config = small_config(tmp_path, "fleet.day_rounds=4", "fleet.available_share=0.5")
    seed = config.run.seed
    for result in simulate(config):
        there = present(config.fleet, seed=seed, round_index=result.record.round)
        assert {device.device for device in result.record.devices} <= there
