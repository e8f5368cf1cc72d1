"""Devices over Flower that learn what their rounds cost, and plan for themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import Message

from anycostfl.config import Config
from anycostfl.experiment import resolve
from anycostfl.flower.device import Setup, open_device
from anycostfl.flower.fleet import NotEnoughDevicesError, RoundPolicy
from anycostfl.flower.server import serve_rounds
from anycostfl.loop import RoundResult
from anycostfl.records.budgets import budget_uses
from anycostfl.records.round import DeviceRecord
from flower_grid import LocalGrid, Tamper, honest
from small_runs import small_config

PATIENT = RoundPolicy(deadline_s=60.0, patience_s=60.0)


def config_of(folder: Path, *more: str) -> Config:
    two = ("fleet.devices=2", "fleet.cohort=2", "run.rounds=3", "run.method=anycostfl")
    return resolve(small_config(folder, *two, *more))


def run(
    config: Config, setups: list[Setup], tamper: Tamper = honest, policy: RoundPolicy = PATIENT
) -> list[RoundResult]:
    open_device.cache_clear()  # every run is that of processes that have just begun
    grid = LocalGrid(len(setups), tamper)
    for context, setup in zip(grid.contexts.values(), setups, strict=True):
        context.node_config |= setup.node_config()
    return list(serve_rounds(config, grid, policy))


def of(results: list[RoundResult], device: int) -> list[DeviceRecord]:
    return [d for r in results for d in r.record.devices if d.device == device]


def setups(folder: Path) -> list[Setup]:
    """One device with room, and one that has no time for anything."""
    common = Setup(0, latency_s=60.0, memory_bytes=1e11, server_files=True)
    return [
        replace(common, state=str(folder / "pi4.costs.json")),
        replace(common, device=1, latency_s=1e-4),
    ]


def test_devices_begin_with_the_narrowest_grow_and_keep_their_budgets_to_themselves(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    results = run(config, setups(tmp_path))
    records = of(results, 0)
    least = config.limits.alpha_min
    assert records[0].alpha == pytest.approx(least, rel=0.2)
    assert records[-1].alpha > 1.5 * records[0].alpha  # a round takes a fraction of a minute
    for record in records:
        assert record.measured is not None
        assert record.measured.train_s is not None
        assert record.measured.train_s > 0
        assert record.measured.memory_used is not None
        assert record.measured.download_s is None  # nobody here times transfers
        assert (record.budget_s, record.budget_j) == (0.0, 0.0)
    assert {use.budget for use in budget_uses([r.record for r in results])} >= {"memory"}


def test_a_device_without_time_does_one_step_and_says_so(tmp_path: Path) -> None:
    """The first round is tried, ends after its first step, and counts as little as that."""
    results = run(config_of(tmp_path, "training.batch=4"), setups(tmp_path))
    first, *later = of(results, 1)
    assert 0 < first.done < 0.5
    assert first.explained == "ok"
    assert later[0].explained == "infeasible: latency"
    full = of(results, 0)[0]
    assert full.done == 1.0


def test_what_was_learnt_survives_a_restart(tmp_path: Path) -> None:
    config, own = config_of(tmp_path), setups(tmp_path)
    first = of(run(config, own), 0)
    assert json.loads(Path(own[0].state).read_text())["workloads"]
    again = of(run(config, own), 0)
    assert again[0].alpha > 0.8 * first[-1].alpha > 1.2 * first[0].alpha
    Path(own[0].state).write_text("damaged")
    anew = of(run(config, own), 0)
    assert anew[0].alpha == pytest.approx(first[0].alpha)


def test_methods_that_plan_for_the_cohort_are_told_the_budgets(tmp_path: Path) -> None:
    results = run(config_of(tmp_path, "run.method=heterofl"), setups(tmp_path))
    assert [record.budget_s for record in of(results, 0)] == 3 * [60.0]


def test_an_offer_outside_the_limits_is_no_offer(tmp_path: Path) -> None:
    def greedy(_device: int, _sent: Message, reply: Message) -> Message:
        if reply.has_content() and (offer := reply.content.config_records.get("offer")):
            offer["beta"] = 0.9
        return reply

    with pytest.raises(NotEnoughDevicesError, match="an offer outside the limits: beta: offered"):
        run(config_of(tmp_path), setups(tmp_path), greedy, replace(PATIENT, patience_s=2.0))
