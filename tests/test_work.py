"""Partial and further local work: what is trained, what it costs, and that budgets are kept."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from anycostfl import methods
from anycostfl.config import load_preset
from anycostfl.data.samples import Samples
from anycostfl.device import Training, epoch_parts, share_done, steps_of, train
from anycostfl.evaluation.compare import over_budget
from anycostfl.planning import cost
from anycostfl.planning.afford import LEAST_SAMPLES, affordable_cycles, strategies_of
from anycostfl.planning.cost import Workload, make_devices
from anycostfl.planning.draw import draw_cohort
from anycostfl.planning.strategy import Limits
from anycostfl.records.round import DeviceRecord, Status
from anycostfl.rounds import charge
from anycostfl.simulate import simulate
from anycostfl.tasks import Task, no_data
from small_runs import small_config

PAPERS_ABLATION = {"anycostfl/without-ems", "anycostfl/without-fgc"}  # break budgets on purpose
EVERY = [
    name
    for method in methods.names()
    for name in (method, *methods.variants(method))
    if name not in PAPERS_ABLATION
]
TRAINING = Training(learning_rate=0.1, batch=4)


def samples(count: int) -> Samples:
    random = torch.Generator().manual_seed(0)
    return Samples(torch.randn(count, 3, generator=random), torch.arange(count) % 2)


def update(count: int, *, epochs: int, work: float) -> torch.Tensor:
    torch.manual_seed(1)
    module = nn.Linear(3, 2)
    found = train(
        module, samples(count), Task(load=no_data), TRAINING, seed=3, epochs=epochs, work=work
    )
    return found["weight"]


# --- what is trained ------------------------------------------------------------------------------


@given(count=st.integers(1, 500), epochs=st.integers(1, 4), work=st.floats(0.001, 4.0))
def test_as_many_samples_as_the_work_says(count: int, epochs: int, work: float) -> None:
    parts = epoch_parts(count, epochs, work)
    wanted = max(min(2, count), math.floor(work * epochs * count + 1e-9))
    assert all(0 < part <= count for part in parts)
    assert wanted - 1 <= sum(parts) <= wanted  # one sample alone is no epoch
    assert share_done(count, epochs, work) == sum(parts) / (epochs * count)


@given(count=st.integers(1, 500), epochs=st.integers(1, 4))
def test_all_the_work_is_the_configured_epochs(count: int, epochs: int) -> None:
    assert epoch_parts(count, epochs, 1.0) == [count] * epochs
    assert share_done(count, epochs, 1.0) == 1.0


def test_steps_are_counted_as_they_are_done() -> None:
    assert steps_of(samples=10, batch=4, epochs=1, work=1.0) == 3
    assert steps_of(samples=9, batch=4, epochs=1, work=1.0) == 2  # the last sample joins
    assert steps_of(samples=10, batch=4, epochs=2, work=0.75) == 3 + 1  # 4, 4, 2; 5
    assert steps_of(samples=10, batch=4, epochs=1, work=0.01) == 1


def test_further_work_goes_on_as_further_epochs_do() -> None:
    assert torch.equal(update(10, epochs=1, work=2.0), update(10, epochs=2, work=1.0))


def test_partial_work_is_the_beginning_of_the_whole() -> None:
    """Eight of twelve samples, in the order in which all twelve are taken."""
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))[:8]
    torch.manual_seed(1)
    module, data = nn.Linear(3, 2), samples(12)
    before = module.weight.detach().clone()
    for batch in torch.split(order, 4):
        loss = nn.functional.cross_entropy(module(data.inputs[batch]), data.targets[batch])
        step = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(module.parameters(), step, strict=True):
                weight.sub_(0.1 * gradient)
    assert torch.allclose(update(12, epochs=1, work=8 / 12), before - module.weight.detach())


# --- what it costs --------------------------------------------------------------------------------

DEVICE = make_devices(
    samples=100,
    flops_per_cycle=10.0,
    energy_coefficient=1e-26,
    frequency_min_hz=1e8,
    frequency_max_hz=2e9,
    rate_bps=1e6,
    power_w=0.1,
    latency_s=1.0,
    energy_j=0.5,
)
LOAD = Workload(flops_per_sample=2e7, size_bits=1e6)


def test_work_is_charged_as_computed() -> None:
    record = DeviceRecord(0, Status.OK, rate_bps=1e6, frequency_hz=1e9, flops_ratio=0.5)
    whole, part = (charge(replace(record, work=w), DEVICE, 0, LOAD) for w in (1.0, 0.25))
    assert part.compute_s == pytest.approx(whole.compute_s / 4)
    assert part.compute_j == pytest.approx(whole.compute_j / 4)
    assert whole.compute_s == pytest.approx(0.5 * 100 * 2e7 / 10 / 1e9)


@settings(max_examples=60)
@given(
    latency_s=st.floats(0.05, 3.0),
    energy_j=st.floats(0.005, 3.0),
    upload=st.floats(0.001, 0.05),
    overhead=st.floats(0.0, 0.3),
)
def test_nothing_more_is_affordable_at_any_clock(
    latency_s: float, energy_j: float, upload: float, overhead: float
) -> None:
    device = replace(
        DEVICE,
        latency_s=np.array([latency_s]),
        energy_j=np.array([energy_j]),
        overhead=np.array([overhead]),
    )
    share = affordable_cycles(device, LOAD, np.array([upload]))
    sending = upload * LOAD.size_bits / 1e6
    clocks = np.geomspace(1e8, 2e9, 4001)
    by_time = (latency_s - sending) * clocks
    by_energy = (energy_j - 0.1 * sending) / (1e-26 * clocks**2)
    best = max(0.0, float(np.minimum(by_time, by_energy).max())) / (100 * 2e7 / 10)
    assert share[0] == pytest.approx(best, rel=2e-3)
    assert share[0] >= best * (1 - 1e-8)

    planned = strategies_of(
        device, LOAD, Limits(), alpha=np.array([0.5]), upload=np.array([upload]), most_work=3.0
    )
    if not planned.feasible[0]:
        assert share[0] / (0.5 + overhead) * 100 < LEAST_SAMPLES
        return
    assert planned.latency_s[0] <= latency_s * (1 + 1e-6)
    assert planned.energy_j[0] <= energy_j * (1 + 1e-6)
    assert planned.work[0] == pytest.approx(min(3.0, share[0] / (0.5 + overhead)))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("preset", ["demo", "bench-har", "cifar10-iid"])
def test_strict_plans_keep_every_budget(name: str, preset: str) -> None:
    for factor in (0.2, 1.0, 5.0):
        config = load_preset(preset, ["run.budgets=strict"])
        method, limits = config.method_of(name), config.limits_of(name)
        devices = draw_cohort(config.fleet, seed=1, round_index=2).devices
        devices = replace(devices, energy_j=factor * devices.energy_j)
        planned = method.plan(devices, config.workload, limits)
        assert np.all(planned.latency_s <= devices.latency_s * (1 + 1e-6))
        assert np.all(planned.energy_j <= devices.energy_j * (1 + 1e-6))
        assert np.all(planned.work[planned.feasible] > 0)
        assert not planned.work[~planned.feasible].any()


@pytest.mark.parametrize("name", ["fedavg", "heterofl", "fjord", "stc", "anycostfl+/tuned"])
def test_strict_runs_keep_every_budget(name: str, tmp_path: Path) -> None:
    """As charged: FLOPs as cut, bytes as encoded."""
    config = small_config(
        tmp_path, f"run.method={name}", "run.budgets=strict", "run.rounds=2", "limits.alpha_min=0.2"
    )
    records = [result.record for result in simulate(config)]
    assert over_budget(records, config) == 0
    done = [d for r in records for d in r.devices if d.status is Status.OK]
    assert done
    if name in ("fedavg", "stc"):
        assert any(d.work < 1 for d in done)


@pytest.mark.parametrize("name", EVERY)
def test_strict_plans_keep_to_memory(name: str) -> None:
    """Half of the devices have room for 0.6 of the full width, one for less than any."""
    config = load_preset("demo", ["run.budgets=strict"])
    devices = draw_cohort(config.fleet, seed=0, round_index=0).devices
    room = np.where(np.arange(len(devices)) % 2, 0.6, 1.0)
    room[0] = 0.1
    devices = replace(devices, memory_bytes=1e8 * room, memory_width_bytes=np.full(len(room), 1e8))
    method = config.method_of(name)
    planned = method.plan(devices, config.workload, config.limits_of(name))
    assert np.all(planned.alpha[planned.feasible] <= room[planned.feasible] + 1e-9)
    assert not planned.feasible[0]
    assert planned.feasible.any()


def test_budgets_of_the_papers_own_leave_work_alone() -> None:
    config = load_preset("demo")
    devices = draw_cohort(config.fleet, seed=0, round_index=0).devices
    for name in ("fedavg", "stc", "heterofl", "anycostfl", "anycostfl+"):
        planned = config.method_of(name).plan(devices, config.workload, config.limits_of(name))
        assert np.all(planned.work[planned.feasible] == 1)


def test_what_is_planned_is_what_is_priced() -> None:
    _, energy = cost.round_cost(
        DEVICE, LOAD, np.ones(1), np.zeros(1), np.full(1, 1e9), work=np.full(1, 0.5)
    )
    assert energy[0] == pytest.approx(0.5 * 1e-26 * 1e18 * 100 * 2e7 / 10)
