"""Simulated fleets: reproducible draws, the stated distributions, the paper's table."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from anycostfl import config
from anycostfl.errors import ConfigError, UnknownNameError
from anycostfl.planning import draw, planner

SPEC = config.load_preset("fmnist-iid").fleet
ROUNDS = 400

# s per round, J per round, mean α, upload / S: the paper's result table divided by its rounds
TABLE = {
    "fmnist-iid": (5.01, 45.1, 0.75, 130e3 / 6.654e6),
    "fmnist-noniid": (5.00, 45.0, 0.75, 131e3 / 6.654e6),
    "cifar10-iid": (9.99, 89.9, 0.69, 354e3 / 13.966e6),
    "cifar10-noniid": (10.01, 90.1, 0.69, 355e3 / 13.966e6),
}


@pytest.mark.parametrize("preset", sorted(TABLE))
def test_preset_reproduces_the_papers_table(preset: str) -> None:
    settings = config.load_preset(preset)
    plans = []
    for index in range(ROUNDS):
        cohort = draw.draw_cohort(settings.fleet, seed=0, round_index=index)
        limits = settings.limits_of("anycostfl")
        plans.append(planner.plan_strategies(cohort.devices, settings.workload, limits))
    seconds, joules, alpha, share = TABLE[preset]
    assert all(len(plan) == 15 and plan.feasible.all() for plan in plans)
    assert np.mean([plan.latency_s.max() for plan in plans]) == pytest.approx(seconds, rel=0.005)
    assert np.mean([plan.energy_j.sum() for plan in plans]) == pytest.approx(joules, rel=0.02)
    assert np.mean([plan.alpha for plan in plans]) == pytest.approx(alpha, abs=0.01)
    assert np.mean([plan.alpha * plan.beta for plan in plans]) == pytest.approx(share, rel=0.25)


def test_same_seed_and_round_give_the_same_cohort_whatever_came_before() -> None:
    first = draw.draw_cohort(SPEC, seed=3, round_index=7)
    draw.draw_cohort(SPEC, seed=3, round_index=6)
    again = draw.draw_cohort(SPEC, seed=3, round_index=7)
    assert np.array_equal(first.index, again.index)
    assert np.array_equal(first.devices.rate_bps, again.devices.rate_bps)
    other = draw.draw_cohort(SPEC, seed=4, round_index=7)
    assert not np.array_equal(first.devices.energy_j, other.devices.energy_j)


def test_a_devices_draw_does_not_depend_on_the_cohort_or_the_size_of_the_fleet() -> None:
    everyone = draw.draw_cohort(replace(SPEC, cohort=60), seed=1, round_index=2)
    few = draw.draw_cohort(replace(SPEC, cohort=5), seed=1, round_index=2)
    bigger = draw.draw_cohort(replace(SPEC, devices=500, cohort=500), seed=1, round_index=2)
    assert np.array_equal(everyone.distance_m[few.index], few.distance_m)
    for name in ("energy_j", "energy_coefficient"):
        drawn = getattr(everyone.devices, name)
        assert np.array_equal(drawn[few.index], getattr(few.devices, name))
        assert np.array_equal(drawn, getattr(bigger.devices, name)[:60])


def test_hardware_stays_and_positions_move() -> None:
    whole = replace(SPEC, cohort=60)
    one, two = (draw.draw_cohort(whole, seed=0, round_index=i) for i in (0, 1))
    assert np.array_equal(one.devices.energy_coefficient, two.devices.energy_coefficient)
    assert not np.array_equal(one.distance_m, two.distance_m)
    assert not np.array_equal(one.devices.energy_j, two.devices.energy_j)


def test_positions_fill_the_disk_evenly_and_budgets_their_range() -> None:
    large = replace(SPEC, devices=200_000, cohort=200_000)
    cohort = draw.draw_cohort(large, seed=0, round_index=0)
    inside = (cohort.distance_m < 275.0).mean()
    assert inside == pytest.approx(0.25, abs=0.01)  # a quarter of the area
    assert cohort.distance_m.max() <= 550.0
    energy = cohort.devices.energy_j
    assert (energy.min(), energy.max()) == (
        pytest.approx(1.5, abs=0.01),
        pytest.approx(4.5, abs=0.01),
    )
    assert energy.mean() == pytest.approx(3.0, rel=0.01)


def test_shared_bandwidth_is_divided_by_the_cohort() -> None:
    own = replace(SPEC, bandwidth_shared=False)
    alone = draw.channel_rate_bps(own, 300.0, 0.1, sharers=15)
    split = draw.channel_rate_bps(replace(SPEC, bandwidth_hz=15e6), 300.0, 0.1, sharers=15)
    assert split == pytest.approx(float(alone))
    assert draw.channel_rate_bps(SPEC, 300.0, 0.1, sharers=15) < alone


@pytest.mark.parametrize("std", [0.0, 1e-27, 4e-27])
def test_coefficient_spread_keeps_its_mean(std: float) -> None:
    spec = replace(SPEC, devices=100_000, energy_coefficient_std=std)
    drawn = draw.draw_hardware(spec, seed=0, profiles={})["energy_coefficient"]
    assert drawn.mean() == pytest.approx(7.5e-27, rel=0.01, abs=0)  # abs is 1e-12 otherwise
    assert drawn.std() == pytest.approx(std, rel=0.02, abs=1e-33)


@pytest.mark.parametrize("std", [0.0, 50.0, 150.0])
def test_distance_spread_keeps_its_mean(std: float) -> None:
    spec = replace(SPEC, devices=100_000, distance_mean_m=400.0, distance_std_m=std)
    drawn = draw.draw_distance_m(spec, seed=0, round_index=0)
    assert drawn.mean() == pytest.approx(400.0, rel=0.01)
    assert drawn.std() == pytest.approx(std, rel=0.02, abs=1e-9)


def test_too_much_spread_is_refused() -> None:
    with pytest.raises(ConfigError, match="energy_coefficient_std"):
        replace(SPEC, energy_coefficient_std=5e-27)
    with pytest.raises(ConfigError, match="beside a mean"):
        replace(SPEC, distance_std_m=5.0)


def test_unequal_samples_keep_the_total() -> None:
    counts = draw.draw_samples(replace(SPEC, samples_concentration=0.5), seed=0)
    assert counts.sum() == pytest.approx(60_000, rel=0.001)
    assert counts.std() == pytest.approx(436, rel=0.35)  # by hand from Var of Beta(0.5, 29.5)
    given = draw.draw_cohort(replace(SPEC, cohort=60), seed=0, round_index=0, samples=counts)
    assert np.array_equal(given.devices.samples, counts)


def test_fleet_of_real_devices_takes_them_in_turn() -> None:
    names = ("jetson-nano", "raspberry-pi-4")
    profiles = {name: config.load_profile(name) for name in names}
    spec = replace(SPEC, profiles=names)
    drawn = draw.draw_hardware(spec, seed=0, profiles=profiles)
    assert drawn["frequency_max_hz"][:3] == pytest.approx([9.216e8, 1.5e9, 9.216e8])
    with pytest.raises(UnknownNameError, match="'raspberry-pi-4'; there are jetson-nano"):
        draw.draw_hardware(spec, seed=0, profiles={"jetson-nano": profiles["jetson-nano"]})


def test_a_placed_device_has_the_cells_radio() -> None:
    device = draw.place_device(
        config.load_profile("jetson-nano"), SPEC, distance_m=300.0, latency_s=10.0, energy_j=6.0
    )
    assert device.rate_bps[0] == pytest.approx(
        float(draw.channel_rate_bps(SPEC, 300.0, 0.1, sharers=15))
    )
    assert device.samples[0] == SPEC.samples


def test_ten_thousand_devices_are_cheap() -> None:
    spec = replace(SPEC, devices=10_000, cohort=1_000)
    assert len(draw.draw_cohort(spec, seed=0, round_index=0).devices) == 1_000


def test_some_are_drawn_only_where_the_others_do_not_suffice() -> None:
    spec = config.load_preset("demo", ["fleet.devices=10", "fleet.cohort=4"]).fleet
    draws = partial(draw.choose, spec, seed=0, round_index=3)
    usual = draws(range(10)).tolist()
    last = set(usual[:2])
    assert not last & set(draws(range(10), last=last).tolist())
    five = {*usual, min(set(range(10)) - set(usual))}
    assert len(last & set(draws(five, last=last).tolist())) == 1
    assert draws(usual, last=last).tolist() == usual
    assert draws(range(10), last=range(10)).tolist() == usual
