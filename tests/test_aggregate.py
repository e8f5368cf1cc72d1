"""All-in-one aggregation against brute force, and the server's step by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anycostfl import ElasticModel, models
from anycostfl.errors import ConfigError
from anycostfl.server.aggregate import (
    Contribution,
    ServerOptimizer,
    aggregate,
    apply_moves,
    weighted_means,
)
from anycostfl.shrink.widths import put
from anycostfl.state import State, Update
from contributions import random_contribution, small_net, small_zeros, three_weights

MOMENTUM = ServerOptimizer(momentum=0.9)


def step(
    state: State,
    contributions: Sequence[Contribution],
    optimizer: ServerOptimizer,
    velocity: State | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A round of the server: the next state and velocity."""
    moves = weighted_means(state, contributions)
    return apply_moves(state, moves, optimizer, velocity or {})


def brute_force(contributions: list[Contribution]) -> dict[str, torch.Tensor]:
    """Eq. (5) element by element over dense global masks."""
    state = dict(small_net().module.named_parameters())
    result = {}
    for name, weight in state.items():
        top, bottom = torch.zeros_like(weight).double(), torch.zeros_like(weight).double()
        for c in contributions:
            dense = small_net().scatter(c.update.values, c.plan).values[name]
            sent = small_net().scatter({n: m.float() for n, m in c.update.masks.items()}, c.plan)
            top += c.weight * dense
            bottom += c.weight * sent.values[name]
        mean = torch.where(bottom > 0, top / bottom, 0)
        result[name] = (weight.detach() - mean).float()
    return result


strategies = st.lists(
    st.tuples(st.floats(0.05, 1), st.floats(0, 1), st.integers(0, 10**6)), min_size=0, max_size=6
)


@given(cohort=strategies)
def test_equals_brute_force_on_random_widths_and_masks(
    cohort: list[tuple[float, float, int]],
) -> None:
    contributions = [random_contribution(*one) for one in cohort]
    state = dict(small_net().module.named_parameters())
    result = aggregate(state, contributions)
    for name, wanted in brute_force(contributions).items():
        assert torch.allclose(result[name], wanted, rtol=1e-6, atol=1e-7)


@given(cohort=strategies, seed=st.integers(0, 100))
def test_does_not_depend_on_the_order(cohort: list[tuple[float, float, int]], seed: int) -> None:
    contributions = [random_contribution(*one) for one in cohort]
    shuffled = [contributions[i] for i in np.random.default_rng(seed).permutation(len(cohort))]
    state = dict(small_net().module.named_parameters())
    one, other = aggregate(state, contributions), aggregate(state, shuffled)
    assert all(torch.allclose(one[n], other[n], rtol=1e-6, atol=1e-7) for n in one)


def test_full_width_without_masks_is_fedavg() -> None:
    contributions = [random_contribution(1.0, 1.0, seed) for seed in range(4)]
    state = {n: p.detach() for n, p in small_net().module.named_parameters()}
    total = sum(c.weight for c in contributions)
    for name, new in aggregate(state, contributions).items():
        mean = sum(c.weight / total * c.update.values[name].double() for c in contributions)
        assert torch.allclose(new, (state[name] - mean).float(), rtol=1e-6, atol=1e-7)


def test_nobody_leaves_the_model_unchanged() -> None:
    state = {n: p.detach() for n, p in small_net().module.named_parameters()}
    assert all(torch.equal(new, state[name]) for name, new in aggregate(state, []).items())


def test_an_element_takes_the_value_of_its_only_sender() -> None:
    """The illustration of the paper: wide and narrow devices, one element each way."""
    wide, narrow = random_contribution(1.0, 1.0, 1), random_contribution(0.2, 1.0, 2)
    state = small_zeros()
    new = aggregate(state, [wide, narrow])["0.weight"]
    assert torch.allclose(new[-1], -wide.update.values["0.weight"][-1])
    assert not torch.allclose(new[0], -wide.update.values["0.weight"][0])


def test_tensors_nobody_sends_stay() -> None:
    state = {"0.weight": torch.ones(6, 3), "statistics": torch.ones(3)}
    only = random_contribution(1.0, 1.0, 0)
    sent = Update(
        {"0.weight": only.update.values["0.weight"]}, {"0.weight": only.update.masks["0.weight"]}
    )
    given_ = [Contribution(only.plan, sent, 1.0)]
    new = aggregate(state, given_)
    assert torch.equal(new["statistics"], torch.ones(3))
    assert new["statistics"].data_ptr() != state["statistics"].data_ptr()
    moved, velocity = step(state, given_, MOMENTUM)
    assert torch.equal(moved["statistics"], torch.ones(3))
    assert not velocity["statistics"].any()


def test_what_is_returned_knows_nothing_of_gradients() -> None:
    state = dict(small_net().module.named_parameters())
    moved, velocity = step(state, [random_contribution(1.0, 1.0, 0)], MOMENTUM)
    for result in (moved, velocity, aggregate(state, [])):
        assert not any(tensor.requires_grad for tensor in result.values())


def test_weights_are_finite_and_not_negative() -> None:
    some = random_contribution(1.0, 1.0, 0)
    for weight in (-0.1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="must be finite and >= 0"):
            replace(some, weight=weight)
    state = small_zeros()
    new = aggregate(state, [replace(some, weight=0.0)])
    assert not any(tensor.any() for tensor in new.values())


def test_indices_that_are_no_prefix_are_added_in_place() -> None:
    spec = models.load("vit")
    vit = ElasticModel(spec.build(), spec.example(2))
    plan = vit.plan(0.25)
    name = "blocks.0.attention.qkv.weight"
    ones = torch.ones(plan.shapes[name])
    update = Update({name: ones}, {name: ones.bool()})
    new = aggregate({name: torch.zeros(384, 128)}, [Contribution(plan, update, 0.3)])[name]
    wanted = torch.zeros(384, 128)
    put(wanted, plan.index[name], -ones)
    assert torch.equal(new, wanted)


# --- step and momentum ----------------------------------------------------------------------------


def test_momentum_by_hand() -> None:
    """What nobody sends neither moves nor fades: its velocity waits for the next time."""
    optimizer = ServerOptimizer(step=0.5, momentum=0.5)
    state = {"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}
    rounds = [
        ([4.0, 8.0, 0.0], [1, 1, 0]),
        ([4.0, 0.0, 0.0], [1, 0, 0]),
        ([0.0, 2.0, 6.0], [1] * 3),
    ]
    weights = [(-2.0, -4.0, 0.0), (-5.0, -4.0, 0.0), (-6.5, -7.0, -3.0)]
    moving = [(4.0, 8.0, 0.0), (6.0, 8.0, 0.0), (3.0, 6.0, 6.0)]
    velocity: dict[str, torch.Tensor] = {}
    for (values, sent), weight, speed in zip(rounds, weights, moving, strict=True):
        state, velocity = step(state, [three_weights(values, sent)], optimizer, velocity)
        assert state["weight"].flatten().tolist() == pytest.approx(weight)
        assert velocity["weight"].flatten().tolist() == pytest.approx(speed)
    assert not state["bias"].any()


def test_without_momentum_nothing_is_kept_and_a_step_of_one_is_the_papers() -> None:
    state = {"weight": torch.randn(1, 3), "bias": torch.randn(1)}
    given_ = [three_weights([0.1, 0.2, 0.0], [1, 1, 0]), three_weights([0.3, 0.0, 0.0], [1, 0, 0])]
    moved, velocity = step(state, given_, ServerOptimizer())
    assert velocity == {}
    assert all(torch.equal(moved[n], t) for n, t in aggregate(state, given_).items())
    half, _ = step(state, given_, ServerOptimizer(step=0.5))
    assert half["weight"] == pytest.approx((state["weight"] + moved["weight"]) / 2, abs=1e-6)


def test_momentum_moves_with_the_channels() -> None:
    net = ElasticModel(models.load("cnn").build(), torch.randn(2, 1, 28, 28))
    draw = torch.Generator().manual_seed(0)
    state = {n: p.detach().clone() for n, p in net.module.named_parameters()}
    order = {g.name: torch.randperm(g.size, generator=draw) for g in net.coupling.groups}
    plan = net.plan(1.0)

    def contribution(values: dict[str, torch.Tensor]) -> Contribution:
        return Contribution(plan, Update(values, {n: v > 0 for n, v in values.items()}), 1.0)

    def update() -> dict[str, torch.Tensor]:
        return {n: torch.randn(p.shape, generator=draw).clamp(min=0) for n, p in state.items()}

    one, two = update(), update()
    first, velocity = step(state, [contribution(one)], MOMENTUM)
    after, _ = step(first, [contribution(two)], MOMENTUM, velocity)
    there, moving = (net.permute(s, order) for s in (first, velocity))
    moved, _ = step(there, [contribution(net.permute(two, order))], MOMENTUM, moving)
    for name, tensor in net.permute(after, order).items():
        assert torch.equal(moved[name], tensor)
