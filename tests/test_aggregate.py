"""Theorem 1's weights, and the element-wise aggregation against brute force."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anycostfl import ElasticModel, models
from anycostfl.aggregate import (
    LEAST_RATIO,
    Contribution,
    Rules,
    advance,
    aggregate,
    agreements,
    clip_bound,
    clipped,
    optimal_weights,
    size_of,
)
from anycostfl.errors import ConfigError
from anycostfl.shrink.widths import put, take
from anycostfl.state import Update

share = st.floats(0.01, 1.0)


@given(alpha=share, beta=share, count=st.integers(1, 30))
def test_equal_strategies_give_equal_weights(alpha: float, beta: float, count: int) -> None:
    weights = optimal_weights(np.full(count, alpha), np.full(count, beta))
    assert weights == pytest.approx(np.full(count, 1 / count))


@given(pairs=st.lists(st.tuples(share, share), min_size=1, max_size=30))
def test_weights_sum_to_one_and_follow_the_ratio(pairs: list[tuple[float, float]]) -> None:
    alpha, beta = np.array(pairs).T
    weights = optimal_weights(alpha, beta)
    assert weights.sum() == pytest.approx(1.0)
    ratio = np.maximum(1 - alpha * (2 - alpha) * np.sqrt(beta), LEAST_RATIO)
    assert np.all(np.diff(weights[np.argsort(-ratio)]) >= -1e-15)


def test_by_hand() -> None:
    # ratios 0.5 and 0.25: weights 4 and 16 of 20
    assert optimal_weights([1.0, 1.0], [0.25, 0.5625]) == pytest.approx([0.2, 0.8])


def test_bounded_where_the_formula_is_singular() -> None:
    weights = optimal_weights([1.0, 1.0, 0.5], [1.0, 1.0, 0.05])
    assert np.all(np.isfinite(weights))
    assert weights[:2] == pytest.approx([0.5, 0.5], abs=1e-5)


def test_samples_multiply_the_weights() -> None:
    assert optimal_weights([0.5, 0.5], [0.1, 0.1], samples=[100, 300]) == pytest.approx(
        [0.25, 0.75]
    )
    with pytest.raises(ConfigError, match="samples"):
        optimal_weights([0.5], [0.1], samples=[-1])


# --- eq. (5) ------------------------------------------------------------------------------------


@functools.cache
def net() -> ElasticModel:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    return ElasticModel(layers, torch.randn(2, 3))


def random_contribution(alpha: float, density: float, seed: int) -> Contribution:
    """An update as a decoder returns it: zero outside its mask."""
    generator = torch.Generator().manual_seed(seed)
    plan = net().plan(alpha)
    values, masks = {}, {}
    for name, _ in net().module.named_parameters():
        mask = torch.rand(plan.shapes[name], generator=generator) < density
        values[name] = torch.randn(plan.shapes[name], generator=generator) * mask
        masks[name] = mask
    weight = float(torch.rand(1, generator=generator)) + 0.1
    return Contribution(plan, Update(values, masks), weight)


def brute_force(contributions: list[Contribution]) -> dict[str, torch.Tensor]:
    """Eq. (5) element by element over dense global masks."""
    state = dict(net().module.named_parameters())
    result = {}
    for name, weight in state.items():
        top, bottom = torch.zeros_like(weight).double(), torch.zeros_like(weight).double()
        for c in contributions:
            dense = net().scatter(c.update.values, c.plan).values[name]
            sent = net().scatter({n: m.float() for n, m in c.update.masks.items()}, c.plan)
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
    state = dict(net().module.named_parameters())
    result = aggregate(state, contributions)
    for name, wanted in brute_force(contributions).items():
        assert torch.allclose(result[name], wanted, rtol=1e-6, atol=1e-7)


@given(cohort=strategies, seed=st.integers(0, 100))
def test_does_not_depend_on_the_order(cohort: list[tuple[float, float, int]], seed: int) -> None:
    contributions = [random_contribution(*one) for one in cohort]
    shuffled = [contributions[i] for i in np.random.default_rng(seed).permutation(len(cohort))]
    state = dict(net().module.named_parameters())
    one, other = aggregate(state, contributions), aggregate(state, shuffled)
    assert all(torch.allclose(one[n], other[n], rtol=1e-6, atol=1e-7) for n in one)


def test_full_width_without_masks_is_fedavg() -> None:
    contributions = [random_contribution(1.0, 1.0, seed) for seed in range(4)]
    state = {n: p.detach() for n, p in net().module.named_parameters()}
    total = sum(c.weight for c in contributions)
    for name, new in aggregate(state, contributions).items():
        mean = sum(c.weight / total * c.update.values[name].double() for c in contributions)
        assert torch.allclose(new, (state[name] - mean).float(), rtol=1e-6, atol=1e-7)


def test_nobody_leaves_the_model_unchanged() -> None:
    state = {n: p.detach() for n, p in net().module.named_parameters()}
    assert all(torch.equal(new, state[name]) for name, new in aggregate(state, []).items())


def test_an_element_takes_the_value_of_its_only_sender() -> None:
    """The illustration of the paper: wide and narrow devices, one element each way."""
    wide, narrow = random_contribution(1.0, 1.0, 1), random_contribution(0.2, 1.0, 2)
    state = {n: torch.zeros_like(p) for n, p in net().module.named_parameters()}
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
    moved, velocity = advance(state, given_, Rules(momentum=0.9), {})
    assert torch.equal(moved["statistics"], torch.ones(3))
    assert not velocity["statistics"].any()


def test_what_is_returned_knows_nothing_of_gradients() -> None:
    state = dict(net().module.named_parameters())
    moved, velocity = advance(state, [random_contribution(1.0, 1.0, 0)], Rules(momentum=0.9), {})
    for result in (moved, velocity, aggregate(state, [])):
        assert not any(tensor.requires_grad for tensor in result.values())


def test_weights_are_finite_and_not_negative() -> None:
    some = random_contribution(1.0, 1.0, 0)
    for weight in (-0.1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="allowed a finite number >= 0"):
            replace(some, weight=weight)
    state = {n: torch.zeros_like(p) for n, p in net().module.named_parameters()}
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


# --- rules against devices that lie ---------------------------------------------------------------


def ranked(values: list[float], rules: Rules) -> float:
    """One element by hand: sort, leave out both ends, take the mean of the rest."""
    if len(values) < max(rules.least, 1):
        return 0.0
    out = (len(values) - 1) // 2 if rules.combine == "median" else int(rules.trim * len(values))
    out = min(out, (len(values) - 1) // 2)
    kept = sorted(values)[out : len(values) - out]
    return sum(kept) / len(kept)


@given(
    cohort=strategies,
    combine=st.sampled_from(["mean", "trimmed", "median"]),
    least=st.integers(1, 4),
    trim=st.floats(0, 0.5),
)
def test_rules_equal_brute_force(
    cohort: list[tuple[float, float, int]], combine: str, least: int, trim: float
) -> None:
    rules = Rules(combine=combine, least=least, trim=trim)
    contributions = [random_contribution(*one) for one in cohort]
    state = {n: torch.zeros_like(p) for n, p in net().module.named_parameters()}
    result = aggregate(state, contributions, rules)
    for name, got in result.items():
        dense = [net().scatter(c.update.values, c.plan).values[name] for c in contributions]
        sent = [
            net().scatter({n: m.float() for n, m in c.update.masks.items()}, c.plan).values[name]
            for c in contributions
        ]
        for place in np.ndindex(*got.shape):
            here = [i for i, s in enumerate(sent) if s[place] > 0]
            values = [float(dense[i][place]) for i in here]
            if combine == "mean":
                weights = [contributions[i].weight for i in here]
                enough = len(here) >= least
                wanted = np.average(values, weights=weights) if enough else 0.0
            else:
                wanted = ranked(values, rules)
            assert float(got[place]) == pytest.approx(-wanted, abs=1e-6)


def test_one_liar_cannot_move_a_median_far() -> None:
    honest = [random_contribution(1.0, 1.0, seed) for seed in range(4)]
    liar = random_contribution(1.0, 1.0, 9)
    scaled = Update({n: 1e6 * v for n, v in liar.update.values.items()}, liar.update.masks)
    state = {n: torch.zeros_like(p) for n, p in net().module.named_parameters()}
    lied = Contribution(liar.plan, scaled, 1.0)
    for combine in ("trimmed", "median"):
        new = aggregate(state, [*honest, lied], Rules(combine=combine, trim=0.25))
        assert max(float(w.abs().max()) for w in new.values()) < 10


def test_agreement_by_hand() -> None:
    """Two that agree, one that says the opposite, one about elements of its own."""
    given = [
        pair([1.0, 1.0, 0.0], [1, 1, 0]), pair([1.0, 0.0, 0.0], [1, 0, 0]),
        pair([-1.0, -1.0, 0.0], [1, 1, 0]), pair([0.0, 0.5, 0.0], [0, 1, 0]),
    ]  # fmt: skip
    found = agreements(dict(line().module.state_dict()), lambda: given)
    # others of the first: (1 − 1 + 0, −1 + 0.5) = (0, −0.5); of the second, on its element: 1 − 1
    assert found[0] == pytest.approx(-1 / 2**0.5)
    assert found[1] == 0.0
    # others of the third: (2, 1.5), and it is their opposite direction nearly
    assert found[2] == pytest.approx(-3.5 / (2 * 6.25) ** 0.5)
    assert found[3] == 0.0


def test_those_who_flip_the_sign_disagree_at_any_width() -> None:
    torch.manual_seed(0)
    honest = [random_contribution(a, 1.0, seed=1) for a in (0.3, 0.6, 1.0, 1.0, 0.8, 1.0)]
    common = {n: torch.randn(t.shape) for n, t in net().module.state_dict().items()}
    told = []
    for i, c in enumerate(honest):
        sign = -1 if i == 2 else 1
        values = {
            n: sign * take(common[n], c.plan.index[n]) + 0.5 * v for n, v in c.update.values.items()
        }
        told.append(replace(c, update=Update(values, c.update.masks)))
    found = agreements(dict(net().module.state_dict()), lambda: told)
    assert found[2] < -0.2
    assert min(found[:2] + found[3:]) > 0.2


def test_sizes_are_clipped_to_their_median() -> None:
    updates = [random_contribution(1.0, 1.0, seed).update for seed in range(5)]
    updates[3] = Update({n: 100 * v for n, v in updates[3].values.items()}, updates[3].masks)
    sizes = [size_of(u) for u in updates]
    bound = clip_bound(sizes, Rules(clip=2.0))
    assert bound == pytest.approx(2 * float(np.median(sizes)))
    assert [size_of(clipped(u, bound)) for u in updates] == pytest.approx(
        [min(size, bound) for size in sizes]
    )
    assert clipped(updates[0], bound) is updates[0]
    assert clip_bound(sizes, Rules(clip=0.0)) == np.inf
    assert clip_bound([0.0], Rules()) == np.inf
    assert clip_bound([100.0, 1.0, 100.0, 1.0], Rules(clip=2.0)) == 2.0
    by_hand = Update({"w": torch.tensor([3.0, 4.0, 0.0, 0.0])}, {})
    assert size_of(by_hand) == pytest.approx(2.5)


# --- step and momentum ----------------------------------------------------------------------------


def pair(values: list[float], sent: list[int]) -> Contribution:
    """An update of the one tensor `w` of a plain layer, with its mask."""
    plan = line().plan(1.0)
    update = Update(
        {"weight": torch.tensor([values]), "bias": torch.zeros(1)},
        {"weight": torch.tensor([sent], dtype=torch.bool), "bias": torch.zeros(1) > 0},
    )
    return Contribution(plan, update, 1.0)


@functools.cache
def line() -> ElasticModel:
    return ElasticModel(nn.Sequential(nn.Linear(3, 1))[0], torch.randn(2, 3))


def test_momentum_by_hand() -> None:
    """What nobody sends neither moves nor fades: its velocity waits for the next time."""
    rules = Rules(step=0.5, momentum=0.5, clip=0.0)
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
        state, velocity = advance(state, [pair(values, sent)], rules, velocity)
        assert state["weight"].flatten().tolist() == pytest.approx(weight)
        assert velocity["weight"].flatten().tolist() == pytest.approx(speed)
    assert not state["bias"].any()


def test_momentum_leaves_alone_what_too_few_sent() -> None:
    rules = Rules(momentum=0.9, least=2, clip=0.0)
    state = {"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}
    both = [pair([2.0, 2.0, 0.0], [1, 1, 0]), pair([4.0, 0.0, 0.0], [1, 0, 0])]
    for combine in ("mean", "median"):
        moved, velocity = advance(state, both, replace(rules, combine=combine), {})
        assert moved["weight"].flatten().tolist() == [-3.0, 0.0, 0.0]
        assert velocity["weight"].flatten().tolist() == [3.0, 0.0, 0.0]


def test_without_momentum_nothing_is_kept_and_a_step_of_one_is_the_papers() -> None:
    state = {"weight": torch.randn(1, 3), "bias": torch.randn(1)}
    given_ = [pair([0.1, 0.2, 0.0], [1, 1, 0]), pair([0.3, 0.0, 0.0], [1, 0, 0])]
    moved, velocity = advance(state, given_, Rules(), {})
    assert velocity == {}
    assert all(torch.equal(moved[n], t) for n, t in aggregate(state, given_).items())
    half = aggregate(state, given_, Rules(step=0.5))
    assert half["weight"] == pytest.approx((state["weight"] + moved["weight"]) / 2, abs=1e-6)


def test_momentum_moves_with_the_channels() -> None:
    net = ElasticModel(models.load("cnn").build(), torch.randn(2, 1, 28, 28))
    draw = torch.Generator().manual_seed(0)
    state = {n: p.detach().clone() for n, p in net.module.named_parameters()}
    order = {g.name: torch.randperm(g.size, generator=draw) for g in net.coupling.groups}
    rules, plan = Rules(momentum=0.9, clip=0.0), net.plan(1.0)

    def contribution(values: dict[str, torch.Tensor]) -> Contribution:
        return Contribution(plan, Update(values, {n: v > 0 for n, v in values.items()}), 1.0)

    def update() -> dict[str, torch.Tensor]:
        return {n: torch.randn(p.shape, generator=draw).clamp(min=0) for n, p in state.items()}

    one, two = update(), update()
    first, velocity = advance(state, [contribution(one)], rules, {})
    after, _ = advance(first, [contribution(two)], rules, velocity)
    there, moving = (net.permute(s, order) for s in (first, velocity))
    moved, _ = advance(there, [contribution(net.permute(two, order))], rules, moving)
    for name, tensor in net.permute(after, order).items():
        assert torch.equal(moved[name], tensor)
