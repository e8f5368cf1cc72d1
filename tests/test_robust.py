"""Robust rules against brute force and by hand: what a few devices that lie cannot do."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anycostfl.server.aggregate import (
    Contribution,
    Move,
    ServerOptimizer,
    apply_moves,
    clip_bound,
    clipped,
    size_of,
    weighted_means,
)
from anycostfl.server.robust import OPEN, Robustness, agreements, ranked_means
from anycostfl.shrink.widths import take
from anycostfl.state import State, Update
from contributions import one_layer, random_contribution, small_net, small_zeros, three_weights

strategies = st.lists(
    st.tuples(st.floats(0.05, 1), st.floats(0, 1), st.integers(0, 10**6)), min_size=0, max_size=6
)


def combine(
    state: State, contributions: Sequence[Contribution], rules: Robustness
) -> dict[str, Move]:
    """As a round combines updates."""
    if rules.combine == "mean":
        return weighted_means(state, contributions, rules.least)
    return ranked_means(state, contributions, rules)


def moved(
    state: State, contributions: Sequence[Contribution], rules: Robustness
) -> dict[str, torch.Tensor]:
    """The next state of a server with these rules."""
    return apply_moves(state, combine(state, contributions, rules), ServerOptimizer(), {})[0]


def ranked(values: list[float], rules: Robustness) -> float:
    """One element by hand: sort, leave out both ends, take the mean of the rest."""
    if len(values) < max(rules.least, 1):
        return 0.0
    out = (len(values) - 1) // 2 if rules.combine == "median" else int(rules.trim * len(values))
    out = min(out, (len(values) - 1) // 2)
    kept = sorted(values)[out : len(values) - out]
    return sum(kept) / len(kept)


@given(
    cohort=strategies,
    how=st.sampled_from(["mean", "trimmed", "median"]),
    least=st.integers(1, 4),
    trim=st.floats(0, 0.5),
)
def test_rules_equal_brute_force(
    cohort: list[tuple[float, float, int]], how: str, least: int, trim: float
) -> None:
    rules = Robustness(combine=how, least=least, trim=trim)
    contributions = [random_contribution(*one) for one in cohort]
    state = small_zeros()
    result = moved(state, contributions, rules)
    for name, got in result.items():
        dense, sent = [], []
        for c in contributions:
            masks = {n: m.float() for n, m in c.update.masks.items()}
            dense.append(small_net().scatter(c.update.values, c.plan).values[name])
            sent.append(small_net().scatter(masks, c.plan).values[name])
        for place in np.ndindex(*got.shape):
            here = [i for i, s in enumerate(sent) if s[place] > 0]
            values = [float(dense[i][place]) for i in here]
            if how == "mean":
                weights = [contributions[i].weight for i in here]
                enough = len(here) >= least
                wanted = np.average(values, weights=weights) if enough else 0.0
            else:
                wanted = ranked(values, rules)
            assert float(got[place]) == pytest.approx(-wanted, abs=1e-6)


def test_one_attacker_cannot_move_a_median_far() -> None:
    honest = [random_contribution(1.0, 1.0, seed) for seed in range(4)]
    attacker = random_contribution(1.0, 1.0, 9)
    scaled = Update({n: 1e6 * v for n, v in attacker.update.values.items()}, attacker.update.masks)
    state = small_zeros()
    false = Contribution(attacker.plan, scaled, 1.0)
    for how in ("trimmed", "median"):
        new = moved(state, [*honest, false], Robustness(combine=how, trim=0.25))
        assert max(float(w.abs().max()) for w in new.values()) < 10


def test_agreement_by_hand() -> None:
    """Two that agree, one that says the opposite, one that sends other elements."""
    given = [
        three_weights([1.0, 1.0, 0.0], [1, 1, 0]), three_weights([1.0, 0.0, 0.0], [1, 0, 0]),
        three_weights([-1.0, -1.0, 0.0], [1, 1, 0]), three_weights([0.0, 0.5, 0.0], [0, 1, 0]),
    ]  # fmt: skip
    found = agreements(dict(one_layer().module.state_dict()), lambda: given)
    # others of the first: (1 − 1 + 0, −1 + 0.5) = (0, −0.5); of the second, on its element: 1 − 1
    assert found[0] == pytest.approx(-1 / 2**0.5)
    assert found[1] == 0.0
    # others of the third: (2, 1.5), and it is their opposite direction nearly
    assert found[2] == pytest.approx(-3.5 / (2 * 6.25) ** 0.5)
    assert found[3] == 0.0


def test_sign_flipping_devices_disagree_at_any_width() -> None:
    torch.manual_seed(0)
    honest = [random_contribution(a, 1.0, seed=1) for a in (0.3, 0.6, 1.0, 1.0, 0.8, 1.0)]
    common = {n: torch.randn(t.shape) for n, t in small_net().module.state_dict().items()}
    told = []
    for i, c in enumerate(honest):
        sign = -1 if i == 2 else 1
        values = {
            n: sign * take(common[n], c.plan.index[n]) + 0.5 * v for n, v in c.update.values.items()
        }
        told.append(replace(c, update=Update(values, c.update.masks)))
    found = agreements(dict(small_net().module.state_dict()), lambda: told)
    assert found[2] < -0.2
    assert min(found[:2] + found[3:]) > 0.2


def test_sizes_are_clipped_to_their_median() -> None:
    updates = [random_contribution(1.0, 1.0, seed).update for seed in range(5)]
    updates[3] = Update({n: 100 * v for n, v in updates[3].values.items()}, updates[3].masks)
    sizes = [size_of(u) for u in updates]
    bound = clip_bound(sizes, 2.0)
    assert bound == pytest.approx(2 * float(np.median(sizes)))
    assert [size_of(clipped(u, bound)) for u in updates] == pytest.approx(
        [min(size, bound) for size in sizes]
    )
    assert clipped(updates[0], bound) is updates[0]
    assert clip_bound(sizes, 0.0) == np.inf
    assert clip_bound([0.0], 5.0) == np.inf
    assert clip_bound([100.0, 1.0, 100.0, 1.0], 2.0) == 2.0
    by_hand = Update({"w": torch.tensor([3.0, 4.0, 0.0, 0.0])}, {})
    assert size_of(by_hand) == pytest.approx(2.5)


def test_an_element_that_too_few_devices_sent_has_neither_step_nor_momentum() -> None:
    state = {"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}
    both = [three_weights([2.0, 2.0, 0.0], [1, 1, 0]), three_weights([4.0, 0.0, 0.0], [1, 0, 0])]
    for how in ("mean", "median"):
        moves = combine(state, both, replace(OPEN, least=2, combine=how))
        new, velocity = apply_moves(state, moves, ServerOptimizer(momentum=0.9), {})
        assert new["weight"].flatten().tolist() == [-3.0, 0.0, 0.0]
        assert velocity["weight"].flatten().tolist() == [3.0, 0.0, 0.0]
