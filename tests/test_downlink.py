"""The downlink: devices follow the server's model by small steps, and every byte is counted."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from anycostfl import ElasticModel
from anycostfl.downlink import (
    Ledger,
    Step,
    charge_downloads,
    check_share,
    first_public,
    ledger_of,
    make_step,
    showing,
    take_step,
)
from anycostfl.errors import ConfigError, PayloadError
from anycostfl.fleet import Cohort
from anycostfl.server import Server
from anycostfl.state import clone_state
from anycostfl.types import DeviceRecord, RoundRecord
from small_runs import small_config

WHERE = ("an experiment", 3)


@functools.cache
def parts() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(30, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32), torch.nn.ReLU(),
        torch.nn.Linear(32, 10),
    )  # fmt: skip


def net() -> ElasticModel:
    return ElasticModel(parts(), torch.randn(2, 30))


def distance(model: ElasticModel, public: dict[str, Tensor]) -> float:
    own = dict(model.module.named_parameters())
    return sum(float((own[n] - p).detach().square().sum()) for n, p in public.items())


def wander(model: ElasticModel, seed: int) -> None:
    """Move the server's model, as updates of a round would."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.module.parameters():
            p.add_(torch.randn(p.shape, generator=random), alpha=0.01)


def test_devices_that_take_the_steps_hold_what_the_server_thinks_they_hold() -> None:
    model = net()
    there = held = first_public(model.module)
    for number in range(5):
        wander(model, number)
        order = model.sort_channels()
        step, there = make_step(model, there, order, 0.1, ("x", number))
        held = take_step(model, held, step, "x")
        assert all(torch.equal(held[n], t) for n, t in there.items())
    step, _ = make_step(model, there, model.sort_channels(), 0.1, ("x", 5))
    assert not step.order  # sorted already: nothing moves


def test_channels_that_move_take_the_public_model_along() -> None:
    model = net()
    wander(model, 0)
    public = first_public(model.module)
    swapped = {g.name: torch.tensor([1, 0, *range(2, g.size)]) for g in model.coupling.groups}
    model.load(model.permute(clone_state(model.module), swapped))
    step, public = make_step(model, public, swapped, 0.1, WHERE)
    assert step.payload == b""  # in its own coordinates nothing has changed
    assert step.size == 4 * (48 + 32)
    assert distance(model, public) == 0
    assert not any(tensor.requires_grad for tensor in public.values())


def test_a_single_element_is_worth_a_step() -> None:
    model = net()
    public = first_public(model.module)
    with torch.no_grad():
        model.module.get_parameter("2.bias")[3] += 1.0
    _, public = make_step(model, public, {}, 0.5, WHERE)
    assert distance(model, public) < 1e-3


def test_a_part_that_is_not_trained_is_public_too() -> None:
    model = net()
    first = next(iter(model.module.parameters()))
    first.requires_grad_(False)
    try:
        public = first_public(model.module)
        _, public = make_step(model, public, model.sort_channels(), 0.5, WHERE)
        with showing(model, public):
            assert torch.equal(first, public["0.weight"])
    finally:
        first.requires_grad_(True)


def test_what_a_step_loses_goes_with_a_later_one() -> None:
    model = net()
    public = first_public(model.module)
    wander(model, 0)
    before = distance(model, public)
    left = []
    for number in range(12):
        _, public = make_step(model, public, {}, 0.05, ("x", number))
        left.append(distance(model, public))
    assert left == sorted(left, reverse=True)
    assert left[0] < 0.9 * before
    assert left[-1] < 0.3 * before


def test_the_error_stays_bounded_while_the_model_moves() -> None:
    model = net()
    public = first_public(model.module)
    errors = []
    for number in range(40):
        wander(model, number)
        step, public = make_step(model, public, {}, 0.1, ("x", number))
        errors.append(distance(model, public))
        elements = sum(p.numel() for p in public.values())
        assert step.size <= 0.1 * 4 * elements
    assert max(errors[20:]) < 2 * max(errors[:20])


def test_a_step_belongs_to_its_round_and_experiment() -> None:
    model = net()
    public = first_public(model.module)
    wander(model, 1)
    step, _ = make_step(model, public, {}, 0.1, WHERE)
    take_step(model, public, step, WHERE[0])
    with pytest.raises(PayloadError):
        take_step(model, public, step, "another experiment")
    with pytest.raises(PayloadError):
        take_step(model, public, Step(4, {}, step.payload), WHERE[0])


def test_a_share_that_has_no_room_for_a_step_is_refused_when_the_run_starts(tmp_path: Path) -> None:
    config = small_config(tmp_path, "compression.downlink=1e-9")
    with pytest.raises(ConfigError, match=r"compression\.downlink: given 1e-09, allowed 0 .* to 1"):
        Server(config)


def test_the_least_share_that_is_allowed_makes_steps() -> None:
    model = net()
    public = first_public(model.module)
    with pytest.raises(ConfigError) as refused:
        check_share(1e-6, public)
    least = re.search(r"or (\S+) to 1", str(refused.value))
    assert least is not None
    check_share(float(least[1]), public)
    wander(model, 0)
    step, _ = make_step(model, public, {}, float(least[1]), WHERE)
    assert step.size <= float(least[1]) * 4 * sum(p.numel() for p in public.values())


def test_sub_models_are_cut_from_the_public_model_for_a_while() -> None:
    model = net()
    own = {n: p.detach().clone() for n, p in model.module.named_parameters()}
    public = {n: torch.zeros_like(p) for n, p in own.items()}
    with showing(model, public):
        assert all((p == 0).all() for p in model.shrink(0.5).module.parameters())
    assert all(torch.equal(own[n], p) for n, p in model.module.named_parameters())
    with showing(model, {}):
        assert all(torch.equal(own[n], p) for n, p in model.module.named_parameters())


# --- what it costs --------------------------------------------------------------------------------


def record(number: int, step: int, *devices: int) -> RoundRecord:
    told = tuple(DeviceRecord(i, "ok", 1, 0.0, 1.0, 1.0, alpha=0.5, bytes_down=9) for i in devices)
    away = DeviceRecord(99, "sat out: energy", 1, 0.0, 1.0, 1.0)
    return RoundRecord(number, None, (*told, away), step)


def test_a_device_is_sent_what_it_missed_or_all() -> None:
    ledger = ledger_of([record(0, 5, 1, 2), record(1, 30, 2), record(2, 20)])
    assert ledger.download(2, step=7, whole=1000) == 20 + 7
    assert ledger.download(1, step=7, whole=1000) == 30 + 20 + 7
    assert ledger.download(1, step=7, whole=40) == 40
    assert ledger.download(3, step=7, whole=1000) == 5 + 30 + 20 + 7  # from the initial model
    assert ledger.download(99, step=7, whole=1000) == 5 + 30 + 20 + 7  # drawn, but sent nothing
    assert Ledger().download(1, step=7, whole=1000) == 7


def test_a_whole_download_holds_frozen_parameters_too(tmp_path: Path) -> None:
    server = Server(small_config(tmp_path, "compression.downlink=0.1"))
    server.net.module.get_parameter("fc1.weight").requires_grad_(False)
    server.begin(0)
    server.ledger = ledger_of([record(0, 10**9)])
    cohort = cast("Cohort", SimpleNamespace(index=np.array([3])))
    assert server.downloads(cohort) == {3: 4 * 1_663_370}


def test_only_those_who_were_sent_something_are_charged() -> None:
    paid = charge_downloads(record(0, 5, 1, 2).devices, {1: 77, 99: 77})
    assert [d.bytes_down for d in paid] == [77, 9, 0]
