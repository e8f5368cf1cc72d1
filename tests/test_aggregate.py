"""Theorem 1's weights are a distribution, bounded, and prefer richer updates."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anycostfl.aggregate import LEAST_RATIO, optimal_weights
from anycostfl.types import ConfigError

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
