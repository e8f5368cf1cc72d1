"""The planner is exact: against brute force, by properties, and against the paper's closed form."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anycostfl.config import load_preset
from anycostfl.errors import ConfigError, InfeasibleBudgetError
from anycostfl.planning import cost
from anycostfl.planning.cost import MEASURED, Devices, Workload, make_devices
from anycostfl.planning.draw import draw_cohort
from anycostfl.planning.planner import (
    _positive_root,
    closed_form,
    needed_budgets,
    plan_strategies,
    require_feasible,
)
from anycostfl.planning.strategy import Binds, Limits, Reason, Strategies
from planner_oracle import polish, random_devices, search

ROOT = Path(__file__).parents[1]
CNN = Workload(flops_per_sample=72_384_512, size_bits=53_227_840)
VGG9 = Workload(flops_per_sample=810_448_896, size_bits=111_728_960)
PAPER = Limits(alpha_min=0.25, beta_min=0.001, beta_max=1 / 15)
CASES = [
    (CNN, PAPER),
    (VGG9, PAPER),
    (CNN, Limits(alpha_min=0.01, beta_min=0.0, beta_max=1.0)),
    (VGG9, Limits(alpha_min=0.5, beta_min=0.02, beta_max=0.05)),
    (Workload(5e5, 1e6), Limits(alpha_min=0.1, beta_min=1e-4, beta_max=0.3)),
    (Workload(1e10, 4e9, epochs=5), Limits(alpha_min=0.05, beta_min=1e-5, beta_max=0.1)),
    (CNN, Limits(alpha_min=1.0, beta_min=0.01, beta_max=0.01)),
]


def one_device(**changes: npt.ArrayLike) -> Devices:
    """The mean device of the Fashion-MNIST preset at 370 m."""
    values: dict[str, npt.ArrayLike] = {
        "samples": 1000.0,
        "flops_per_cycle": 33.36,
        "energy_coefficient": 7.5e-27,
        "frequency_min_hz": 1e8,
        "frequency_max_hz": 2e9,
        "rate_bps": 7.5e5,
        "power_w": 0.1,
        "latency_s": 5.0,
        "energy_j": 3.0,
    }
    return make_devices(**{**values, **changes})


def assert_within_every_constraint(
    s: Strategies, devices: Devices, workload: Workload, limits: Limits
) -> None:
    on = s.feasible
    latency, energy = cost.round_cost(
        devices, workload, s.alpha, s.beta, np.where(on, s.frequency_hz, 1.0)
    )
    assert np.all(latency[on] <= devices.latency_s[on] * (1 + 1e-9))
    assert np.all(energy[on] <= devices.energy_j[on] * (1 + 1e-9))
    peak = devices.memory_fixed_bytes + s.alpha * devices.memory_width_bytes
    assert np.all(peak[on] <= devices.memory_bytes[on] * (1 + 1e-9))
    for value, low, high in (
        (s.alpha, limits.alpha_min, 1.0),
        (s.beta, limits.beta_min, limits.beta_max),
        (s.frequency_hz, devices.frequency_min_hz, devices.frequency_max_hz),
    ):
        assert np.all(value[on] >= (low * np.ones(len(s)) * (1 - 1e-9))[on])
        assert np.all(value[on] <= (high * np.ones(len(s)) * (1 + 1e-9))[on])


@pytest.mark.parametrize("case", range(len(CASES)))
def test_no_worse_than_brute_force_and_infeasible_exactly_where_it_is(case: int) -> None:
    workload, limits = CASES[case]
    devices = random_devices(np.random.default_rng(case), 4000)  # 28,000 over all cases
    exact, found = plan_strategies(devices, workload, limits), search(devices, workload, limits)
    assert np.array_equal(exact.feasible, found.feasible)
    assert 0.05 < found.feasible.mean() < 0.999
    assert np.all(exact.gain >= found.gain * (1 - 1e-6))
    # the search itself comes this close, so the comparison means something
    assert np.all(found.gain >= exact.gain * (1 - 1e-5))
    assert_within_every_constraint(exact, devices, workload, limits)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_no_worse_than_brute_force_with_overhead(case: int) -> None:
    workload, limits = CASES[case]
    devices = random_devices(np.random.default_rng(50 + case), 1000, overhead=0.5)
    exact, found = plan_strategies(devices, workload, limits), search(devices, workload, limits)
    assert np.array_equal(exact.feasible, found.feasible)
    assert np.all(exact.gain >= found.gain * (1 - 1e-6))
    assert_within_every_constraint(exact, devices, workload, limits)


@pytest.mark.parametrize("codec", ["kernel", *MEASURED])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_no_worse_than_brute_force_within_memory(case: int, codec: str) -> None:
    workload, limits = CASES[case]
    curve = MEASURED[codec].quality if codec in MEASURED else np.asarray
    overhead = 0.3 * (case % 2)
    devices = random_devices(np.random.default_rng(20 + case), 500, overhead=overhead, memory=True)
    exact = plan_strategies(devices, workload, replace(limits, codec=codec))
    found = search(devices, workload, limits, curve)
    assert np.array_equal(exact.feasible, found.feasible)
    assert np.all(exact.gain >= found.gain * (1 - 1e-6))
    assert_within_every_constraint(exact, devices, workload, limits)


@pytest.mark.parametrize("codec", MEASURED)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_no_worse_than_brute_force_with_a_measured_codec(case: int, codec: str) -> None:
    workload, limits = CASES[case]
    curve = MEASURED[codec]
    devices = random_devices(np.random.default_rng(70 + case), 500, overhead=0.2 * (case % 2))
    exact = plan_strategies(devices, workload, replace(limits, codec=codec))
    found = search(devices, workload, limits, curve.quality)
    assert np.array_equal(exact.feasible, found.feasible)
    assert np.all(exact.gain >= found.gain * (1 - 1e-6))
    assert_within_every_constraint(exact, devices, workload, limits)
    on = exact.feasible
    np.testing.assert_allclose(exact.gain[on], exact.alpha[on] ** 4 * curve.quality(exact.beta[on]))


def test_memory_is_a_reason_and_binds() -> None:
    peaks = {"memory_fixed_bytes": 4e8, "memory_width_bytes": 1e9}
    rich = {"latency_s": 1e3, "energy_j": 1e3}
    tight = one_device(memory_bytes=[9e8, 6e8, 1.5e9], **peaks, **rich)
    plan = plan_strategies(tight, CNN, PAPER)
    np.testing.assert_allclose(plan.alpha, [0.5, 0.0, 1.0])
    assert plan.reason[1] == Reason.MEMORY
    assert str(Reason.MEMORY) == "memory"
    assert [bool(flags & Binds.MEMORY) for flags in plan.binds.tolist()] == [True, False, False]
    assert needed_budgets(plan, tight, 1) == "650 MB of memory"


def test_a_better_codec_sends_less_and_computes_more() -> None:
    plain = plan_strategies(one_device(), CNN, PAPER)[0]
    better = plan_strategies(one_device(), CNN, replace(PAPER, codec="lowrank"))[0]
    assert better.alpha > 1.1 * plain.alpha
    assert better.alpha * better.beta < 0.5 * plain.alpha * plain.beta


@pytest.mark.parametrize("overhead", [0.0, 0.3])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_equals_the_true_optimum_to_nine_digits(case: int, overhead: float) -> None:
    workload, limits = CASES[case]
    devices = random_devices(np.random.default_rng(100 + case), 1500, overhead=overhead)
    exact, true = plan_strategies(devices, workload, limits), polish(devices, workload, limits)
    np.testing.assert_allclose(exact.gain, true, rtol=1e-9, atol=0)


def test_all_constraints_hold_and_every_one_binds_somewhere() -> None:
    devices = random_devices(np.random.default_rng(99), 200_000, memory=True)
    seen = 0
    for workload, limits in CASES:
        exact = plan_strategies(devices, workload, limits)
        assert_within_every_constraint(exact, devices, workload, limits)
        seen |= int(np.bitwise_or.reduce(exact.binds))
    assert seen == sum(Binds)


def test_equals_the_corrected_closed_form_where_no_cap_binds() -> None:
    devices = random_devices(np.random.default_rng(5), 300_000)
    exact, paper = plan_strategies(devices, CNN, PAPER), closed_form(devices, CNN, PAPER)
    budgets = Binds.LATENCY | Binds.ENERGY
    free = exact.feasible & (exact.binds == budgets)
    assert free.sum() > 3000
    assert np.all(paper.feasible[free])
    for name in ("alpha", "beta", "frequency_hz", "gain"):
        np.testing.assert_allclose(
            getattr(exact, name)[free], getattr(paper, name)[free], rtol=1e-9, atol=0
        )


def test_no_worse_than_brute_force_where_quantities_coincide() -> None:
    """One clock only, and E = P·T exactly: the corners where the formulas could divide by zero."""
    devices = random_devices(np.random.default_rng(12), 1000)
    values = {name: getattr(devices, name) for name in Devices.__slots__}
    one_clock = {**values, "frequency_max_hz": values["frequency_min_hz"]}
    balanced = {**values, "energy_j": values["power_w"] * values["latency_s"]}
    natural = np.cbrt(values["power_w"] / values["energy_coefficient"])
    both = {**balanced, "frequency_min_hz": natural, "frequency_max_hz": natural}
    for changed in (one_clock, balanced, both):
        same = make_devices(**changed)
        exact, found = plan_strategies(same, CNN, PAPER), search(same, CNN, PAPER)
        assert np.array_equal(exact.feasible, found.feasible)
        assert np.all(exact.gain >= found.gain * (1 - 1e-6))
        assert_within_every_constraint(exact, same, CNN, PAPER)


def test_clipped_closed_form_is_feasible_and_never_better() -> None:
    devices = random_devices(np.random.default_rng(6), 100_000)
    exact = plan_strategies(devices, CNN, PAPER)
    clipped = closed_form(devices, CNN, PAPER, clipped=True)
    assert_within_every_constraint(clipped, devices, CNN, PAPER)
    assert not np.any(clipped.feasible & ~exact.feasible)
    assert np.all(clipped.gain <= exact.gain * (1 + 1e-9))


def test_printed_closed_form_leaves_the_box_for_a_model_half_as_heavy() -> None:
    light = Workload(CNN.flops_per_sample / 2, CNN.size_bits)
    devices = one_device()
    assert closed_form(devices, light, PAPER).alpha[0] > 1.0
    assert plan_strategies(devices, light, PAPER).alpha[0] == 1.0


budget = st.floats(0.05, 500.0)


@settings(max_examples=200)
@given(
    latency=budget,
    energy=budget,
    more_latency=st.floats(1.0, 10.0),
    more_energy=st.floats(1.0, 10.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_more_budget_never_lowers_the_gain(
    latency: float, energy: float, more_latency: float, more_energy: float, seed: int
) -> None:
    columns = random_devices(np.random.default_rng(seed), 64)
    values = {name: getattr(columns, name) for name in Devices.__slots__}
    poor = make_devices(**{**values, "latency_s": latency, "energy_j": energy})
    rich = make_devices(
        **{**values, "latency_s": latency * more_latency, "energy_j": energy * more_energy}
    )
    before, after = (plan_strategies(devices, CNN, PAPER) for devices in (poor, rich))
    assert np.all(after.feasible >= before.feasible)
    assert np.all(after.gain >= before.gain * (1 - 1e-12))


def test_hand_computed_optimum_when_the_energy_budget_equals_full_power_for_the_whole_round() -> (
    None
):
    # E = P·T makes e = 1, so φ = 3/4, f = (P/ε)^(1/3) and α = φ·T·f/C, all by hand.
    devices = one_device(
        samples=1.0,
        flops_per_cycle=1.0,
        energy_coefficient=1e-27,
        power_w=1.0,
        latency_s=4.0,
        energy_j=4.0,
        rate_bps=1e6,
    )
    workload = Workload(flops_per_sample=6e9, size_bits=1e8)
    s = plan_strategies(devices, workload, Limits(0.1, 0.0, 1.0))[0]
    assert s.frequency_hz == pytest.approx(1e9, rel=1e-12)
    assert s.alpha == pytest.approx(0.5, rel=1e-12)  # 3 s × 1e9 Hz / 6e9 cycles
    assert s.beta == pytest.approx(0.02, rel=1e-12)  # 1 s × 1e6 bit/s / (0.5 × 1e8 bit)
    assert s.gain == pytest.approx(0.5**4 * 0.02, rel=1e-12)
    assert [s.latency_s, s.energy_j] == pytest.approx([4.0, 4.0])


def test_slack_is_reported_and_the_slowest_clock_in_time_is_taken() -> None:
    devices = one_device(latency_s=50.0, energy_j=100.0, rate_bps=1e7)
    s = plan_strategies(devices, CNN, PAPER)
    assert (s.alpha[0], s.beta[0]) == (1.0, PAPER.beta_max)
    assert s.frequency_hz[0] == devices.frequency_min_hz[0]
    assert s.latency_slack_s[0] == pytest.approx(50.0 - s.latency_s[0])
    assert s.energy_slack_j[0] == pytest.approx(100.0 - s.energy_j[0])
    assert Binds(int(s.binds[0])) == Binds.ALPHA_MAX | Binds.BETA_MAX | Binds.FREQUENCY_MIN


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"latency_s": 0.2}, Reason.LATENCY),
        ({"energy_j": 0.01}, Reason.ENERGY),
        ({"latency_s": 1.0, "energy_j": 0.5}, Reason.BOTH),
        ({"rate_bps": 100.0}, Reason.RADIO),
    ],
)
def test_infeasible_device_sits_out_with_its_reason(
    changes: dict[str, float], reason: Reason
) -> None:
    devices = one_device(**changes)
    s = plan_strategies(devices, CNN, PAPER)
    assert not s.feasible[0]
    assert s.reason[0] == reason
    assert (s.alpha[0], s.gain[0], s.energy_j[0], s.binds[0]) == (0.0, 0.0, 0.0, 0)
    costly = plan_strategies(one_device(**changes, overhead=0.1), CNN, PAPER)
    assert (costly.energy_j[0], costly.latency_s[0]) == (0.0, 0.0)  # nobody computes
    with pytest.raises(InfeasibleBudgetError, match=str(reason)):
        require_feasible(s, devices)


def test_least_budgets_are_enough_and_no_less_is() -> None:
    devices = random_devices(np.random.default_rng(11), 50_000)
    values = {name: getattr(devices, name) for name in Devices.__slots__}
    s = plan_strategies(devices, CNN, PAPER)
    smallest = np.full(len(s), PAPER.alpha_min), np.full(len(s), PAPER.beta_min)
    latency_floor, _ = cost.round_cost(devices, CNN, *smallest, devices.frequency_max_hz)
    _, energy_floor = cost.round_cost(devices, CNN, *smallest, devices.frequency_min_hz)
    np.testing.assert_allclose(s.latency_floor_s, latency_floor, rtol=1e-12)
    np.testing.assert_allclose(s.energy_floor_j, energy_floor, rtol=1e-12)
    by_time = {**values, "energy_j": np.maximum(devices.energy_j, energy_floor * (1 + 1e-9))}
    by_joule = {**values, "latency_s": np.maximum(devices.latency_s, latency_floor * (1 + 1e-9))}

    def takes_part(factor: float) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        time = make_devices(**{**by_time, "latency_s": s.least_latency_s * factor})
        joule = make_devices(**{**by_joule, "energy_j": s.least_energy_j * factor})
        plans = (plan_strategies(changed, CNN, PAPER) for changed in (time, joule))
        first, second = (plan.feasible for plan in plans)
        return first, second

    assert all(enough.all() for enough in takes_part(1 + 1e-8))
    too_slow, too_hungry = takes_part(1 - 1e-6)
    # at the floor itself the other budget was raised a little, which may buy back the difference
    assert not np.any(too_slow[devices.energy_j > energy_floor])
    assert not np.any(too_hungry[devices.latency_s > latency_floor])


@pytest.mark.parametrize("limits", [PAPER, replace(PAPER, codec="lowrank")])
@pytest.mark.parametrize("overhead", [0.0, 0.1])
def test_the_least_budgets_themselves_are_enough(limits: Limits, overhead: float) -> None:
    devices = random_devices(np.random.default_rng(12), 3000, overhead=overhead)
    values = {name: getattr(devices, name) for name in Devices.__slots__}
    s = plan_strategies(devices, CNN, limits)
    rich = {**values, "energy_j": np.maximum(devices.energy_j, s.energy_floor_j)}
    slow = {**values, "latency_s": np.maximum(devices.latency_s, s.latency_floor_s)}
    for enough in (
        {**rich, "latency_s": s.least_latency_s},
        {**slow, "energy_j": s.least_energy_j},
    ):
        changed = make_devices(**enough)
        planned = plan_strategies(changed, CNN, limits)
        assert planned.feasible.all()
        assert_within_every_constraint(planned, changed, CNN, limits)


@pytest.mark.parametrize("limits", [PAPER, replace(PAPER, codec="lowrank")])
@pytest.mark.parametrize("overhead", [0.0, 0.1])
@pytest.mark.filterwarnings("error")
def test_endless_budgets_are_budgets(limits: Limits, overhead: float) -> None:
    devices = random_devices(np.random.default_rng(13), 1000, overhead=overhead)
    values = {name: getattr(devices, name) for name in Devices.__slots__}
    large = {"latency_s": 1e30, "energy_j": 1e30}
    for name in (("latency_s",), ("energy_j",), ("latency_s", "energy_j")):
        endless = make_devices(**{**values, **{n: np.full(1000, 1e308) for n in name}})
        enough = make_devices(**{**values, **{n: np.full(1000, large[n]) for n in name}})
        endless_plan, plan = (plan_strategies(d, CNN, limits) for d in (endless, enough))
        assert plan.feasible.any()
        np.testing.assert_array_equal(endless_plan.gain, plan.gain)
        np.testing.assert_array_equal(endless_plan.frequency_hz, plan.frequency_hz)


def test_needed_budgets_are_told_as_pairs_that_suffice() -> None:
    devices = random_devices(np.random.default_rng(5), 3000)
    s = plan_strategies(devices, CNN, PAPER)
    out = np.flatnonzero(~s.feasible)[:300]
    assert len(out) == 300
    values = {name: getattr(devices, name)[out] for name in Devices.__slots__}
    words = [needed_budgets(s, devices, int(i)).removesuffix(" J").split(" J, or ") for i in out]
    for pair in (0, -1):
        told = np.array([[float(x) for x in parts[pair].split(" s with ")] for parts in words])
        raised = make_devices(**{**values, "latency_s": told[:, 0], "energy_j": told[:, 1]})
        assert plan_strategies(raised, CNN, PAPER).feasible.all()


def test_one_pair_of_budgets_is_told_once() -> None:
    clock = {"frequency_min_hz": 1e9, "frequency_max_hz": 1e9}  # nothing to trade
    device = one_device(**clock, rate_bps=1e12, latency_s=1e-3, energy_j=1e-3)
    assert ", or " not in needed_budgets(plan_strategies(device, CNN, PAPER), device, 0)


def test_devices_of_different_lengths_are_named() -> None:
    with pytest.raises(ConfigError, match=r"samples \(3,\), rate_bps \(2,\)"):
        one_device(samples=[1, 2, 3], rate_bps=[1e6, 1e6])
    with pytest.raises(ConfigError, match=r"samples \(1, 2\)"):
        one_device(samples=[[1, 2]])


def test_published_means_are_what_the_planner_plans() -> None:
    """The table "A codec that was measured" of docs/planner.md."""
    table = (ROOT / "docs/planner.md").read_text()
    row = r"^\| ([\w-]*) ?\| (the paper's|kernel\+|lowrank) \| ([\d.]+) \| 1/(\d+) \| ([\d.]+) \|"
    rows, preset = re.findall(row, table, re.MULTILINE), ""
    assert len(rows) == 6
    for name, gain, *figures in rows:
        preset = name or preset
        codec = "kernel" if gain == "the paper's" else gain
        config = load_preset(preset, [f"compression.codec={codec}"])
        limits = config.limits_of("anycostfl")
        cohorts = (draw_cohort(config.fleet, seed=0, round_index=i).devices for i in range(50))
        plans = [plan_strategies(devices, config.workload, limits) for devices in cohorts]
        alpha, beta = (np.concatenate([getattr(p, n) for p in plans]) for n in ("alpha", "beta"))
        means = f"{alpha.mean():.3f}", f"{1 / beta.mean():.0f}", f"{(alpha * beta).mean():.4f}"
        assert means == tuple(figures), (preset, codec)


def test_nobody_to_plan_for() -> None:
    nobody = one_device().take(np.array([], dtype=np.intp))
    assert len(plan_strategies(nobody, CNN, PAPER)) == 0


def test_a_tiny_overhead_changes_next_to_nothing() -> None:
    rng = np.random.default_rng(7)
    devices = random_devices(rng, 5000)
    values = {name: getattr(devices, name) for name in Devices.__slots__}
    tiny = make_devices(**{**values, "overhead": 1e-12})
    plain, searched = plan_strategies(devices, CNN, PAPER), plan_strategies(tiny, CNN, PAPER)
    assert np.mean(plain.feasible != searched.feasible) < 1e-3
    both = plain.feasible & searched.feasible
    np.testing.assert_allclose(searched.gain[both], plain.gain[both], rtol=1e-8)


def test_result_does_not_depend_on_the_other_devices() -> None:
    devices = random_devices(np.random.default_rng(8), 20_001)
    together = plan_strategies(devices, CNN, PAPER)
    alone = plan_strategies(devices.take(slice(19_000, 19_007)), CNN, PAPER)
    assert np.array_equal(together.gain[19_000:19_007], alone.gain)


@settings(max_examples=300)
@given(
    linear=st.floats(-1e30, 1e30, allow_subnormal=False),
    constant=st.floats(1e-20, 1e40),
)
def test_positive_root_solves_its_cubic(linear: float, constant: float) -> None:
    x = _positive_root(np.array([linear]), np.array([constant]))[0]
    assert x > 0
    assert abs(x**3 + linear * x - constant) <= 1e-13 * (x**3 + abs(linear) * x + constant)
