"""The downlink: devices follow the server's model by small steps, and every byte is counted."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anycostfl import ElasticModel
from anycostfl.device import Reply
from anycostfl.errors import ConfigError, PayloadError
from anycostfl.experiment import build_experiment
from anycostfl.records.round import DeviceRecord, RoundRecord, Status
from anycostfl.rounds import close_round, first_state, open_round
from anycostfl.server.downlink import (
    Downlink,
    Ledger,
    Step,
    check_share,
    first_public,
    ledger_of,
    take_step,
)
from anycostfl.server.suspensions import Suspensions
from anycostfl.shrink import Order
from anycostfl.state import State
from small_runs import small_config, small_fleet

RUN = "the fingerprint of a run"


@functools.cache
def net() -> ElasticModel:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(30, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10)
    )
    return ElasticModel(module, torch.randn(2, 30))


def downlink(share: float) -> Downlink:
    return Downlink(net(), share, RUN)


def distance(weights: State, public: State) -> float:
    return sum(float((weights[n] - p).square().sum()) for n, p in public.items())


def moved(weights: State, seed: int) -> dict[str, Tensor]:
    """The server's weights after a round, as updates would move them."""
    random = torch.Generator().manual_seed(seed)
    return {n: w + 0.01 * torch.randn(w.shape, generator=random) for n, w in weights.items()}


def sort(weights: State) -> tuple[dict[str, Tensor], Order]:
    """The weights with their channels sorted, and the order."""
    order = net().sorting_order(weights)
    return dict(net().permute(weights, order)), order


def test_devices_that_take_the_steps_hold_what_the_server_thinks_they_hold() -> None:
    weights = public = held = first_public(net().module)
    for number in range(5):
        weights, order = sort(moved(weights, number))
        step, public = downlink(0.1).make_step(weights, public, order, number)
        held = take_step(net(), held, step, RUN)
        assert all(torch.equal(held[n], t) for n, t in public.items())
    weights, order = sort(weights)
    step, _ = downlink(0.1).make_step(weights, public, order, 5)
    assert not step.order  # sorted already: nothing moves


def test_channels_that_move_take_the_public_model_along() -> None:
    public = moved(first_public(net().module), 0)
    swapped = {g.name: torch.tensor([1, 0, *range(2, g.size)]) for g in net().coupling.groups}
    weights = net().permute(public, swapped)
    step, public = downlink(0.1).make_step(weights, public, swapped, 3)
    assert step.payload == b""  # in its own coordinates nothing has changed
    assert step.size == 4 * (48 + 32)
    assert distance(weights, public) == 0
    assert not any(tensor.requires_grad for tensor in public.values())


def test_a_single_element_is_worth_a_step() -> None:
    public = first_public(net().module)
    weights = {name: tensor.clone() for name, tensor in public.items()}
    weights["2.bias"][3] += 1.0
    _, public = downlink(0.5).make_step(weights, public, {}, 3)
    assert distance(weights, public) < 1e-3


def test_a_part_that_is_not_trained_is_public_too() -> None:
    first = net().module.get_parameter("0.weight")
    first.requires_grad_(False)
    try:
        public = first_public(net().module)
        weights, order = sort(public)
        _, public = downlink(0.5).make_step(weights, public, order, 3)
    finally:
        first.requires_grad_(True)
    assert torch.equal(public["0.weight"], weights["0.weight"])


def test_what_a_step_loses_goes_with_a_later_one() -> None:
    public = first_public(net().module)
    weights = moved(public, 0)
    before = distance(weights, public)
    left = []
    for number in range(12):
        _, public = downlink(0.05).make_step(weights, public, {}, number)
        left.append(distance(weights, public))
    assert left == sorted(left, reverse=True)
    assert left[0] < 0.9 * before
    assert left[-1] < 0.3 * before


def test_the_error_stays_bounded_while_the_model_moves() -> None:
    weights = public = first_public(net().module)
    elements = sum(p.numel() for p in public.values())
    errors = []
    for number in range(40):
        weights = moved(weights, number)
        step, public = downlink(0.1).make_step(weights, public, {}, number)
        errors.append(distance(weights, public))
        assert step.size <= 0.1 * 4 * elements
    assert max(errors[20:]) < 2 * max(errors[:20])


def test_a_step_belongs_to_its_round_and_experiment() -> None:
    public = first_public(net().module)
    step, after = downlink(0.1).make_step(moved(public, 1), public, {}, 3)
    taken = take_step(net(), public, step, RUN)
    assert all(torch.equal(taken[n], t) for n, t in after.items())
    with pytest.raises(PayloadError):
        take_step(net(), public, step, "another run")
    with pytest.raises(PayloadError):
        take_step(net(), public, Step(4, {}, step.payload), RUN)


def test_a_share_that_has_no_room_for_a_step_is_refused_when_the_run_starts(tmp_path: Path) -> None:
    config = small_config(tmp_path, "compression.downlink=1e-9")
    with pytest.raises(ConfigError, match=r"compression\.downlink: given 1e-09, must be 0 .* to 1"):
        build_experiment(config)


def test_the_least_share_that_is_allowed_makes_steps() -> None:
    public = first_public(net().module)
    with pytest.raises(ConfigError) as refused:
        check_share(1e-6, public)
    found = re.search(r"or (\S+) to 1", str(refused.value))
    assert found is not None
    least = float(found[1])
    check_share(least, public)
    step, _ = downlink(least).make_step(moved(public, 0), public, {}, 3)
    assert step.size <= least * 4 * sum(p.numel() for p in public.values())


def test_sub_models_are_cut_from_the_public_model_and_the_servers_own_is_left_alone(
    tmp_path: Path,
) -> None:
    experiment, fleet = small_fleet(small_config(tmp_path, "compression.downlink=0.02"))
    state = first_state(experiment)
    random = torch.Generator().manual_seed(0)
    ahead = {n: w + 0.1 * torch.randn(w.shape, generator=random) for n, w in state.weights.items()}
    state, plan = open_round(
        experiment, replace(state, weights=ahead), fleet.offers(0, Suspensions())
    )
    assert distance(state.weights, state.public) > 0
    assert all(torch.equal(plan.model[n], p) for n, p in state.public.items())
    next(iter(fleet.perform(plan)))
    held = dict(experiment.net.module.named_parameters())
    assert all(torch.equal(held[n], p) for n, p in state.public.items())
    sorted_ahead = experiment.net.permute(ahead, experiment.net.sorting_order(ahead))
    assert all(torch.equal(state.weights[n], w) for n, w in sorted_ahead.items())


# --- what it costs --------------------------------------------------------------------------------


def record(number: int, step: int, *devices: int) -> RoundRecord:
    served = tuple(DeviceRecord(i, Status.OK, alpha=0.5, bytes_down=9) for i in devices)
    return RoundRecord(number, None, (*served, DeviceRecord(99, Status.INFEASIBLE)), step)


def test_a_device_is_sent_what_it_missed_or_all() -> None:
    ledger = ledger_of([record(0, 5, 1, 2), record(1, 30, 2), record(2, 20)])
    assert ledger.download(2, step=7, whole=1000) == 20 + 7
    assert ledger.download(1, step=7, whole=1000) == 30 + 20 + 7
    assert ledger.download(1, step=7, whole=40) == 40
    assert ledger.download(3, step=7, whole=1000) == 5 + 30 + 20 + 7  # from the initial model
    assert ledger.download(99, step=7, whole=1000) == 5 + 30 + 20 + 7  # drawn, but sent nothing
    assert Ledger().download(1, step=7, whole=1000) == 7


def test_assigned_devices_are_charged_for_the_steps_they_missed_or_the_whole_model(
    tmp_path: Path,
) -> None:
    """The whole model has its frozen parameters too; a device that sits out is sent nothing."""
    experiment, fleet = small_fleet(small_config(tmp_path, "compression.downlink=0.1"))
    experiment.net.module.get_parameter("fc1.weight").requires_grad_(False)
    offers = fleet.offers(1, Suspensions())
    devices, (poor, first, second, third) = offers.cohort.devices, offers.cohort.index.tolist()
    budgets = np.where(offers.cohort.index == poor, 1e-9, devices.energy_j)
    cohort = replace(offers.cohort, devices=replace(devices, energy_j=budgets))
    ledger = ledger_of([record(0, 10**9, second)])  # all but one missed a step beyond measure
    state = replace(first_state(experiment), rounds=1, ledger=ledger)
    state, plan = open_round(experiment, state, replace(offers, cohort=cohort))
    assert plan.step is not None
    told = {first: None, second: None, third: 77}  # bytes, where the fleet knows better
    replies = [Reply(i, missing="gone", bytes_down=count) for i, count in told.items()]
    state, closed = close_round(experiment, state, plan, replies)
    whole = 4 * 1_663_370
    down = {d.device: d.bytes_down for d in closed.devices}
    assert down == {poor: 0, first: whole, second: plan.step.size, third: 77}
    assert plan.step.size < whole
    assert state.ledger.held == {first: 1, second: 1, third: 1}
