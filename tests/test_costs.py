"""What a device learns about its costs: it survives a restart, and damage; offers are checked."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anycostfl import methods
from anycostfl.flower import costs as kept
from anycostfl.flower.costs import Costs, DamagedCostsError, Pending, from_text, plan_own, to_text
from anycostfl.planning import estimator
from anycostfl.planning.cost import UNLIMITED, Devices, Workload, make_devices
from anycostfl.planning.estimator import Peaks, Terms
from anycostfl.planning.planner import plan_strategies, with_offers
from anycostfl.planning.strategy import Limits, Offer, Reason

LIMITS = Limits(alpha_min=0.25, beta_min=0.001, beta_max=1 / 15)
TERMS = Terms(Workload(7e7, 5e7), kept.smallest_share(LIMITS))
CONFIDENCE = 0.95


def device(**changes: float) -> Devices:
    values = {
        "samples": 200.0, "flops_per_cycle": 10.0, "energy_coefficient": 1e-28,
        "frequency_min_hz": 1e9, "frequency_max_hz": 1e9, "rate_bps": 5e6, "power_w": 0.1,
        "latency_s": 6.0, "energy_j": UNLIMITED,
    }  # fmt: skip
    return make_devices(**{**values, **changes})


def learnt(rounds: int) -> Costs:
    """After some rounds of a device that takes 1.4 s + 4 s·α; the last upload is not over."""
    known = device()
    costs = Costs(estimator.unknown(known.latency_s, TERMS.smallest, CONFIDENCE))
    for number in range(rounds + 1):
        costs = costs.completed(0.4, CONFIDENCE)
        _, plan = plan_own(costs, known, TERMS, (methods.load("anycostfl"), LIMITS), CONFIDENCE)
        alpha, share = float(plan.alpha[0]), float(plan.alpha[0] * plan.beta[0])
        took = 0.9 + 4.0 * alpha
        pending = Pending(number, alpha, share, 0.1, took, math.nan, took + 0.1)
        peaks = costs.peaks.after(alpha, 4e8, 4e8 + 1e8 * alpha)
        costs = replace(costs, pending=pending, peaks=peaks, finish_s=0.1)
    return costs


def test_a_device_grows_into_its_budget_from_nothing() -> None:
    """α_min first; after eight noiseless rounds the budget is used but for a small margin."""
    first, last = learnt(0), learnt(8)
    assert first.pending is not None
    assert last.pending is not None
    assert first.pending.alpha == pytest.approx(0.25, rel=0.1)
    total = last.pending.until_upload_s + 0.4
    assert 0.8 * 6.0 < total <= 6.0


@pytest.mark.parametrize("rounds", [0, 1, 5])
def test_costs_come_back_from_text_as_they_were(rounds: int) -> None:
    before = learnt(rounds)
    after = from_text(to_text(before))
    assert to_text(after) == to_text(before)
    how = (methods.load("anycostfl"), LIMITS)
    plans = [plan_own(one, device(), TERMS, how, CONFIDENCE)[1] for one in (before, after)]
    assert plans[0].alpha == plans[1].alpha
    assert plans[0].beta == plans[1].beta


def test_a_file_keeps_the_latest_workloads(tmp_path: Path) -> None:
    path, costs = tmp_path / "pi4.costs.json", learnt(1)
    for number in range(kept.MOST_WORKLOADS + 3):
        kept.save_costs(path, f"workload {number}", replace(costs, idle=number))
    assert kept.load_costs(path, "workload 0") is None
    latest = kept.load_costs(path, f"workload {kept.MOST_WORKLOADS + 2}")
    assert latest is not None
    assert latest.idle == kept.MOST_WORKLOADS + 2
    assert path.stat().st_size < kept.LARGEST_FILE
    assert kept.load_costs(tmp_path / "none.json", "workload") is None


@given(st.data())
def test_damaged_costs_are_refused_and_never_half_read(data: st.DataObject) -> None:
    table = json.loads(to_text(learnt(1)))
    name = data.draw(st.sampled_from(["compute", "download", "upload", "joules"]))
    part = data.draw(st.sampled_from(["levels", "weights", "variance", "noise", "offsets", "at"]))
    value: object = data.draw(st.sampled_from([None, "x", [], [1e30], [-1.0], [[1.0]], {}]))
    table["estimate"][name][part] = value
    with pytest.raises(DamagedCostsError):
        from_text(json.dumps(table))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema": 9}', b"\xff" * 99])
def test_a_damaged_file_is_told_and_written_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with pytest.raises(DamagedCostsError, match="cannot be read"):
        kept.load_costs(path, "key")
    kept.save_costs(path, "key", learnt(0))
    assert kept.load_costs(path, "key") is not None


def test_a_device_that_sits_out_tries_again_after_1_2_4_and_8_rounds() -> None:
    costs, tries = learnt(3), []
    poor = device(latency_s=1.2)  # a round of α_min takes 2.4 s
    how = (methods.load("anycostfl"), LIMITS)
    for number in range(20):
        _, plan = plan_own(costs, poor, TERMS, how, CONFIDENCE)
        if plan.feasible[0]:
            tries.append(number)
        # A try that fails teaches nothing new here, so it counts as one more round out.
        costs = replace(costs.sat_out(number, feasible=False), peaks=Peaks())
    assert tries == [1, 2, 4, 8, 16]


def test_memory_caps_what_a_device_plans() -> None:
    how = (methods.load("anycostfl"), LIMITS)
    costs = learnt(6)
    rich = device(latency_s=60.0)
    tight = device(latency_s=60.0, memory_bytes=4.6e8)
    assert plan_own(costs, rich, TERMS, how, CONFIDENCE)[1].alpha == pytest.approx(1.0)
    _, plan = plan_own(costs, tight, TERMS, how, CONFIDENCE)
    assert 0.4 < float(plan.alpha[0]) <= 0.6
    _, none = plan_own(costs, device(memory_bytes=4.1e8), TERMS, how, CONFIDENCE)
    assert none.reason[0] == Reason.MEMORY


# --- offers ---------------------------------------------------------------------------------------


def test_an_offer_says_nothing_of_budgets_and_stands_in_the_plan() -> None:
    several = make_devices(
        **{name: getattr(device(), name) for name in Devices.__slots__[:7]},
        latency_s=[3.0, 6.0, 9.0],
        energy_j=UNLIMITED,
    )
    planned = plan_strategies(several, TERMS.workload, LIMITS)
    alone = plan_strategies(several.take(slice(2, 3)), TERMS.workload, LIMITS)
    shown = kept.without_budgets(several)
    assert np.all(shown.latency_s == UNLIMITED)
    offers = {2: Offer.of(alone), 0: Offer(0.0, 0.0, 0.0, 0, int(Reason.MEMORY))}
    merged = with_offers(planned, shown, TERMS.workload, LIMITS, offers)
    assert merged.alpha.tolist() == [0.0, planned.alpha[1], planned.alpha[2]]
    assert merged.beta.tolist() == [0.0, planned.beta[1], planned.beta[2]]
    assert merged.binds[2] == planned.binds[2]
    assert merged.feasible.tolist() == [False, True, True]
    assert merged.reason.tolist() == [Reason.MEMORY, 0, 0]
    np.testing.assert_allclose(merged.gain[1:], planned.gain[1:])


@pytest.mark.parametrize(
    ("offer", "problem"),
    [
        (Offer(0.5, 0.02, 1e9, 1, 0), ""),
        (Offer(0.25, 1 / 15, 1e9, 1, 0), ""),
        (Offer(0.0, 0.0, 0.0, 0, 5), ""),
        (Offer(0.2, 0.02, 1e9, 0, 0), "alpha: offered 0.2, must be 0.25 to 1"),
        (Offer(0.5, 0.1, 1e9, 0, 0), "beta: offered 0.1, must be 0.001 to 0.0666667"),
        (Offer(0.5, 0.02, 0.0, 0, 0), "frequency_hz: offered 0"),
        (Offer(0.5, 0.02, 1e9, 0, 2), "an offer that says both"),
    ],
)
def test_offers_outside_the_limits_are_told(offer: Offer, problem: str) -> None:
    found = offer.problem(LIMITS)
    assert found.startswith(problem) if problem else not found
