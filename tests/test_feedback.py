"""Error feedback: nothing is lost, whatever the codec, the widths and the order of channels."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anycostfl import ElasticModel, methods, models
from anycostfl.codec import CODECS, Upload
from anycostfl.device import Job, learn_honestly
from anycostfl.experiment import build_experiment, load_data
from anycostfl.feedback import encode_with_feedback, no_residual
from anycostfl.methods import Method
from anycostfl.shrink import WidthPlan
from small_runs import small_config

State = dict[str, Tensor]
KINDS = [
    *(("anycostfl", codec) for codec in CODECS),
    *((name, "kernel") for name in ("stc", "qsgd", "uveqfed", "fedhq", "heterofl")),
]


@functools.cache
def net() -> ElasticModel:
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 24, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(24 * 16, 40),
        torch.nn.ReLU(),
        torch.nn.Linear(40, 10),
    )
    return ElasticModel(module, torch.randn(2, 1, 8, 8))


def parameters() -> State:
    return {n: p.detach() for n, p in net().module.named_parameters()}


def learnt(seed: int, plan: WidthPlan) -> State:
    """An update of a sub-model: a direction that all rounds share, and noise."""
    common = torch.Generator().manual_seed(0)
    own = torch.Generator().manual_seed(seed + 1)
    whole = {
        n: torch.randn(p.shape, generator=common) + torch.randn(p.shape, generator=own)
        for n, p in parameters().items()
    }
    return {n: v.contiguous() for n, v in net().take(whole, plan).items()}


def upload(codec: str, seed: int) -> Upload:
    return Upload(0.04, seed, b"plan", net().blocks(), codec)


def norm(state: State) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in state.values()))


def added(one: State, other: State, sign: float = 1.0) -> State:
    return {n: t + sign * other[n] for n, t in one.items()}


def decoded(method: Method, payload: bytes, plan: WidthPlan, seed: int) -> State:
    shapes = {n: plan.shapes[n] for n in parameters()}
    return dict(
        net()
        .scatter(method.decode(payload, shapes, Upload(0.04, seed, b"plan")).values, plan)
        .values
    )


@pytest.mark.parametrize(("name", "codec"), KINDS)
@pytest.mark.parametrize("alphas", [(1.0,), (0.5,), (1.0, 0.3, 0.6)])
def test_what_was_decoded_approaches_what_was_learnt(
    name: str, codec: str, alphas: tuple[float, ...]
) -> None:
    method, rounds = methods.load(name), 12
    residual = no_residual(parameters())
    true, sent, alone = (no_residual(parameters()) for _ in range(3))
    left = []
    for number in range(rounds):
        plan = net().plan(alphas[number % len(alphas)])
        update, how = learnt(number, plan), upload(codec, number)
        payload, residual = encode_with_feedback(method, update, how, residual, plan)
        true = added(true, dict(net().scatter(update, plan).values))
        sent = added(sent, decoded(method, payload, plan, how.seed))
        alone = added(alone, decoded(method, method.encode(update, how), plan, how.seed))
        left.append(norm(residual))
        assert norm(added(added(sent, residual), true, -1.0)) <= 1e-4 * norm(true)
    assert left[-1] <= 1.5 * max(left[: rounds // 2])  # bounded, while what was learnt grows
    assert norm(added(sent, true, -1.0)) < norm(added(alone, true, -1.0))


def test_residual_follows_the_channels() -> None:
    """Sorting between rounds: in the coordinates of the end, nothing was lost."""
    draw = torch.Generator().manual_seed(3)
    method, residual = methods.load("anycostfl"), no_residual(parameters())
    true, sent = no_residual(parameters()), no_residual(parameters())
    for number in range(6):
        order = {g.name: torch.randperm(g.size, generator=draw) for g in net().coupling.groups}
        true, sent, residual = (net().permute(s, order) for s in (true, sent, residual))
        plan = net().plan((0.3, 1.0, 0.6)[number % 3])
        update = learnt(number, plan)
        payload, residual = encode_with_feedback(
            method, update, upload("kernel", number), residual, plan
        )
        true = added(true, dict(net().scatter(update, plan).values))
        sent = added(sent, decoded(method, payload, plan, number))
    assert norm(added(added(sent, residual), true, -1.0)) <= 1e-5 * norm(true)


def test_permuted_inputs_give_a_permuted_payload_and_residual() -> None:
    """STC chooses single elements: the order of channels matters to how long their places are."""
    draw, method, plan = torch.Generator().manual_seed(4), methods.load("stc"), net().plan(1.0)
    order = {g.name: torch.randperm(g.size, generator=draw) for g in net().coupling.groups}
    update, residual = learnt(0, plan), learnt(1, plan)
    payload, left = encode_with_feedback(method, update, upload("kernel", 0), residual, plan)
    moved = (net().permute(state, order) for state in (update, residual))
    other, moved_left = encode_with_feedback(method, next(moved), upload("", 0), next(moved), plan)
    expected = net().permute(decoded(method, payload, plan, 0), order)
    nearly = 0.1 * norm(expected)
    assert norm(added(decoded(method, other, plan, 0), expected, -1.0)) < nearly
    assert norm(added(net().permute(left, order), moved_left, -1.0)) < nearly


def test_what_a_narrow_plan_does_not_reach_stays() -> None:
    residual = {n: torch.ones_like(p) for n, p in parameters().items()}
    plan = net().plan(0.2)
    _, left = encode_with_feedback(
        methods.load("anycostfl"), learnt(0, plan), upload("lowrank", 0), residual, plan
    )
    reached = net().scatter({n: torch.ones(plan.shapes[n]) for n in residual}, plan).masks
    assert all((left[n][~reached[n]] == 1).all() for n in residual)
    assert any((left[n][reached[n]] != 1).any() for n in residual)
    assert all((tensor == 1).all() for tensor in residual.values())  # the old one is untouched


def test_what_is_exact_leaves_nothing() -> None:
    plan = net().plan(0.5)
    method = methods.load("fedavg")
    _, left = encode_with_feedback(
        method,
        learnt(0, plan),
        replace(upload("kernel", 0), beta=1.0),
        no_residual(parameters()),
        plan,
    )
    assert norm(left) == 0


def test_every_model_has_a_residual_in_its_own_shapes() -> None:
    module = models.load("cnn").build()
    blank = no_residual(dict(module.named_parameters()))
    assert {n: t.shape for n, t in blank.items()} == {
        n: p.shape for n, p in module.named_parameters()
    }
    assert not any(t.any() or t.requires_grad for t in blank.values())


def test_a_device_remembers_channels_where_they_were_at_first(tmp_path: Path) -> None:
    config = small_config(tmp_path, "run.method=stc")
    dataset = load_data(config)
    experiment, draw = build_experiment(config, dataset), torch.Generator().manual_seed(1)
    runtime, elastic = experiment.runtime, experiment.net
    samples, rate = dataset.train.take(slice(0, 20)), config.training.learning_rate
    order = {g.name: torch.randperm(g.size, generator=draw) for g in elastic.coupling.groups}
    how = Upload(1 / 20, 0, b"plan")
    shapes = elastic.module.named_parameters()
    residual = {n: 5e-5 * torch.randn(p.shape, generator=draw) for n, p in shapes}  # as u
    plain = runtime.perform(
        elastic.shrink(1.0), samples, Job(0, 1.0, how, 3, rate, residual), learn_honestly
    ).memory
    elastic.load(elastic.permute(experiment.initial_weights, order))
    job = Job(0, 1.0, how, 3, rate, residual, order)
    moved = runtime.perform(elastic.shrink(1.0), samples, job, learn_honestly).memory
    assert plain is not None
    assert moved is not None
    # Places cost other bits in another order, so that a few elements more or less are sent.
    assert norm(added(dict(moved), dict(plain), -1.0)) < 0.2 * norm(dict(plain))
