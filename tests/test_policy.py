"""A device does what its owner allows and nothing else, whatever the server asks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anycostfl.codec import Upload
from anycostfl.config import load_preset
from anycostfl.errors import ConfigError
from anycostfl.experiment import build_experiment, load_data, resolve
from anycostfl.flower.device import Device, Setup, open_device
from anycostfl.flower.policy import Policy, PolicyError, check_cost
from anycostfl.planning.cost import Devices, make_devices
from anycostfl.planning.draw import draw_cohort
from anycostfl.wire import messages
from small_runs import small_config

BOARD = make_devices(
    samples=100, flops_per_cycle=4.0, energy_coefficient=1e-27, frequency_min_hz=5e8,
    frequency_max_hz=2e9, rate_bps=1e6, power_w=0.5, latency_s=1.0, energy_j=0.5,
)  # fmt: skip
WORKLOAD = load_preset("demo").workload


def work(seconds: float, clock: float) -> float:
    """The share of the full model that takes so long at a clock."""
    cycles = WORKLOAD.epochs * 100 * WORKLOAD.flops_per_sample / 4.0
    return seconds * clock / cycles


def test_the_cost_of_a_task_by_hand() -> None:
    check_cost(BOARD, WORKLOAD, work(0.5, 5e8), 1e5)
    # At 2 GHz it is done within the second, but takes ε·f²·C = 1e-27 · 4e18 · 1.8e9 = 7.2 J.
    with pytest.raises(PolicyError, match=r"takes .* J at the least"):
        check_cost(BOARD, WORKLOAD, work(0.9, 2e9), 1e5)
    with pytest.raises(PolicyError, match=r"takes 54 s at the least; .* allows 1 s"):
        check_cost(BOARD, WORKLOAD, work(53.9, 2e9), 1e5)
    with pytest.raises(PolicyError, match=r"takes .* s at the least"):  # the upload alone
        check_cost(BOARD, WORKLOAD, work(0.1, 2e9), 2e6)


@pytest.mark.parametrize("seed", range(5))
def test_what_the_planner_affords_is_never_refused_and_twice_as_much_is(seed: int) -> None:
    config = load_preset("demo", ["fleet.devices=40", "fleet.cohort=40"])
    devices = draw_cohort(config.fleet, seed=seed, round_index=seed).devices
    plan = config.plan(devices)
    assert plan.feasible.any()
    refused = []
    for i in np.flatnonzero(plan.feasible).tolist():
        one: Devices = devices.take(slice(i, i + 1))
        bits = plan.alpha[i] * plan.beta[i] * config.workload.size_bits
        check_cost(one, config.workload, float(plan.alpha[i]), bits)
        try:
            check_cost(one, config.workload, 4 * float(plan.alpha[i]), 4 * bits)
        except PolicyError:
            refused.append(i)
    assert len(refused) > 0.9 * plan.feasible.sum()


def device(folder: Path, **changes: Any) -> tuple[Device, messages.TrainTask]:
    """A device with the budgets of a small board, and a task of the full model."""
    config = resolve(small_config(folder))
    experiment = build_experiment(config, load_data(config))
    info = messages.ExperimentInfo.of(experiment)
    data = str(folder / "stripes.npz")
    setup = Setup(1, "raspberry-pi-4", 1e8, 10.0, 50.0, data=data, split=True)
    plan = experiment.net.plan(1.0)
    task = messages.TrainTask(
        info=messages.RoundInfo(info, 0),
        device=1,
        alpha=1.0,
        widths=dict(plan.widths),
        upload=Upload(0.1, 1, bytes(32)),
        seed=5,
        learning_rate=0.1,
        weights=messages.pack_weights(experiment.net, experiment.initial_weights, plan),
        moved={},
    )
    return open_device(replace(setup, **changes), info), task


def test_a_device_refuses_a_task_beyond_its_owners_budgets(tmp_path: Path) -> None:
    rich, task = device(tmp_path)
    assert rich.perform(task, {}, None).payload
    for budget in ({"latency_s": 1e-3}, {"energy_j": 1e-6}):
        poor, task = device(tmp_path, **budget)
        with pytest.raises(PolicyError, match="the owner of this device allows"):
            poor.perform(task, {}, None)


def test_a_device_takes_part_only_in_what_its_owner_allows(tmp_path: Path) -> None:
    device(tmp_path, methods="stc, anycostfl", max_epochs=5, min_batch=8)
    with pytest.raises(PolicyError, match="method anycostfl, allowed stc"):
        device(tmp_path, methods="stc")
    with pytest.raises(PolicyError, match=r"batches of .*, allowed from 1000"):
        device(tmp_path, min_batch=1000)
    with pytest.raises(PolicyError, match="9 epochs, allowed 5; batches of 1, allowed from 2"):
        Policy("", 5, 2).check("fedavg", 9, 1)
    with pytest.raises(ConfigError, match="max_epochs: given -1"):
        Policy(max_epochs=-1)
