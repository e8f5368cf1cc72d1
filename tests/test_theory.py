"""The bounds and rates of Sec. IV, at their known points and by their own inequalities."""

import math
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anycostfl.errors import ConfigError, UnknownNameError
from anycostfl.planning import cost
from anycostfl.server import theory
from anycostfl.server.aggregate import LEAST_RATIO, divergence_ratio, optimal_weights

ROOT = Path(__file__).parents[1]
share = st.floats(0.0, 1.0)
positive = st.floats(0.01, 1.0)


def test_bound_at_its_corners() -> None:
    assert theory.local_divergence_bound(1.0, 1.0) == 0.0
    assert theory.local_divergence_bound(0.5, 0.0) == 1.0
    assert theory.local_divergence_bound(0.5, 0.25, update_norm_squared=4.0) == pytest.approx(
        4 * (1 - 0.75 * 0.5) ** 2
    )


@given(alpha=st.floats(0.01, 0.99), beta=st.floats(0.0001, 1.0))
def test_last_step_of_lemma_1_holds_exactly_up_to_its_limit(alpha: float, beta: float) -> None:
    d, s = 1 - alpha, math.sqrt(beta)
    before = d**3 + (1 - s) ** 2 * (1 - d**3)
    after = float(theory.local_divergence_bound(alpha, beta))
    limit = 2 / (3 - alpha)
    if s < limit * (1 - 1e-6):
        assert before <= after + 1e-12
    elif s > limit * (1 + 1e-6):
        assert before >= after - 1e-12


def uniform_divergence(alpha: float, beta: float) -> float:
    """Shrink, sparsify and quantize |u| ~ U(0, 1) as Appendix A does; ‖u − ũ‖² / ‖u‖²."""
    rng = np.random.default_rng(0)
    magnitude = np.sort(rng.uniform(0.0, 1.0, 200_000))
    kept = magnitude[int((1 - alpha) * magnitude.size) :]
    cut = int((1 - math.sqrt(beta)) * kept.size)
    levels = 2 ** (32 * math.sqrt(beta))
    low, high = kept[cut], kept[-1]
    steps = (kept[cut:] - low) / (high - low) * levels
    rounded = np.floor(steps + rng.random(steps.size)) / levels * (high - low) + low
    lost = (magnitude**2).sum() - (kept[cut:] ** 2).sum() + ((kept[cut:] - rounded) ** 2).sum()
    return float(lost / (magnitude**2).sum())


@pytest.mark.parametrize("beta", [0.01, 1 / 15, 0.3])
@pytest.mark.parametrize(
    ("alpha", "holds"), [(0.25, False), (0.5, False), (0.75, True), (1.0, True)]
)
def test_lemma_1_on_the_uniform_update_it_assumes_holds_only_for_wide_sub_models(
    alpha: float, beta: float, holds: bool
) -> None:
    measured = uniform_divergence(alpha, beta)
    assert measured == pytest.approx((1 - alpha * math.sqrt(beta)) ** 3, rel=0.02)
    assert (measured <= float(theory.local_divergence_bound(alpha, beta))) is holds
    # what Theorem 2 needs of it survives for every width
    assert measured <= 1 - float(cost.learning_gain(alpha, beta))


# --- Theorem 1 and Lemma 2 ------------------------------------------------------------------------


@given(alpha=positive, beta=positive, count=st.integers(1, 30))
def test_equal_strategies_give_equal_weights(alpha: float, beta: float, count: int) -> None:
    weights = optimal_weights(np.full(count, alpha), np.full(count, beta))
    assert weights == pytest.approx(np.full(count, 1 / count))


@given(pairs=st.lists(st.tuples(positive, positive), min_size=1, max_size=30))
def test_weights_sum_to_one_and_follow_the_ratio(pairs: list[tuple[float, float]]) -> None:
    alpha, beta = np.array(pairs).T
    weights = optimal_weights(alpha, beta)
    assert weights.sum() == pytest.approx(1.0)
    ratio = np.maximum(1 - alpha * (2 - alpha) * np.sqrt(beta), LEAST_RATIO)
    assert np.all(np.diff(weights[np.argsort(-ratio)]) >= -1e-15)


def test_weights_by_hand() -> None:
    # ratios 0.5 and 0.25: weights 4 and 16 of 20
    assert optimal_weights([1.0, 1.0], [0.25, 0.5625]) == pytest.approx([0.2, 0.8])


def test_weights_are_bounded_where_the_formula_is_singular() -> None:
    weights = optimal_weights([1.0, 1.0, 0.5], [1.0, 1.0, 0.05])
    assert np.all(np.isfinite(weights))
    assert weights[:2] == pytest.approx([0.5, 0.5], abs=1e-5)


def test_samples_multiply_the_weights() -> None:
    assert optimal_weights([0.5, 0.5], [0.1, 0.1], samples=[100, 300]) == pytest.approx(
        [0.25, 0.75]
    )
    with pytest.raises(ConfigError, match="samples"):
        optimal_weights([0.5], [0.1], samples=[-1])


@given(weights=st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3))
def test_optimal_weights_minimise_lemma_2(weights: list[float]) -> None:
    alpha, beta = np.array([0.3, 0.7, 1.0]), np.array([0.01, 0.05, 0.066])
    best = theory.global_divergence_bound(optimal_weights(alpha, beta), alpha, beta)
    other = np.array(weights) / sum(weights)
    assert theory.global_divergence_bound(other, alpha, beta) >= best * (1 - 1e-12)


def test_global_bound_by_hand() -> None:
    # two equal devices, ratio 1 − 0.75·0.5 = 0.625: 2 · 3 · 2 · (2 · 0.25 · 0.625²)
    bound = theory.global_divergence_bound(
        [0.5, 0.5], [0.5, 0.5], [0.25, 0.25], dissimilarity=3.0, step_norm_squared=2.0
    )
    assert bound == pytest.approx(12 * 0.5 * 0.625**2)


@given(alpha=share, beta=share)
def test_gain_is_a_share_and_step_c_of_theorem_2_holds(alpha: float, beta: float) -> None:
    gain = float(cost.learning_gain(alpha, beta))
    assert gain == pytest.approx(alpha**4 * beta)
    assert 0.0 <= gain <= 1.0
    assert float(theory.local_divergence_bound(alpha, beta)) <= 1.0 - gain + 1e-12


def test_factor_and_rounds_by_hand() -> None:
    factor = theory.convergence_factor(1.0, strong_convexity=2.0, lipschitz=4.0)
    assert factor == 0.5
    assert theory.convergence_factor(1.0, strong_convexity=2.0, lipschitz=2.0) == 0.0
    assert theory.rounds_to(1.0, factor=factor, start=8.0) == 4.0  # 8 → 4 → 2 → 1
    assert theory.rounds_to(9.0, factor=factor, start=8.0) == 1.0
    assert theory.rounds_to(1.0, factor=0.2, start=125.0) == 4.0  # though log 125 / log 5 > 3 here
    for factor in (0.0, -0.1):
        assert theory.rounds_to(1.0, factor=factor, start=8.0) == 2.0


def test_no_promise_without_gain() -> None:
    factor = theory.convergence_factor(0.0, strong_convexity=0.1, lipschitz=1.0)
    assert theory.rounds_to(0.1, factor=factor, start=1.0) == math.inf


@given(low=share, high=share)
def test_more_gain_never_needs_more_rounds(low: float, high: float) -> None:
    low, high = sorted((low, high))
    need = [
        theory.rounds_to(
            1e-3,
            factor=theory.convergence_factor(gain, strong_convexity=0.2, lipschitz=1.0),
            start=1.0,
        )
        for gain in (low, high)
    ]
    assert need[1] <= need[0]


def test_bad_values_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        divergence_ratio(1.5, float("nan"))
    assert len(caught.value.problems) == 2
    for convexity in (0.0, 2.0):
        with pytest.raises(ConfigError, match="0 < ν <= λ"):
            theory.convergence_factor(0.5, strong_convexity=convexity, lipschitz=1.0)
    for target, start in ((0.0, 1.0), (1.0, 0.0)):
        with pytest.raises(ConfigError, match="must be > 0"):
            theory.rounds_to(target, factor=0.5, start=start)


# --- the quality of a measured codec --------------------------------------------------------------


def test_quality_by_hand() -> None:
    curve = cost.RateDistortion((0.01, 0.1), (0.25, 0.04))
    np.testing.assert_allclose(curve.quality([0.01, 0.1, 1.0]), [0.25, 0.64, 1.0])
    assert curve.quality(np.sqrt(0.01 * 0.1)) == pytest.approx(np.sqrt(0.25 * 0.64))
    assert curve.quality(0.001) == pytest.approx(0.025)  # a tenth of the rate, a tenth of it
    assert curve.quality(0.0) < 1e-300


@pytest.mark.parametrize("codec", cost.MEASURED)
def test_measured_quality_rises_and_is_concave_in_logarithms(codec: str) -> None:
    beta = np.geomspace(1e-5, 1.0, 400)
    slope = np.diff(np.log(cost.MEASURED[codec].quality(beta))) / np.diff(np.log(beta))
    assert np.all(slope > 0)
    assert np.all(np.diff(slope) < 1e-9)


@pytest.mark.parametrize("codec", cost.MEASURED)
def test_measured_errors_are_the_means_of_the_published_table(codec: str) -> None:
    table = "".join(page.read_text() for page in (ROOT / "docs/results").glob("codec*.md"))
    row = rf"^\| {re.escape(codec)} \| 1/([\d.]+) \| [\d,]+ \| ([\d.e+-]+) \|"
    errors: dict[float, list[float]] = {rate: [] for rate in cost.RATES}
    for ratio, error in re.findall(row, table, re.MULTILINE):
        nearest = min(cost.RATES, key=lambda rate: abs(math.log(rate * float(ratio))))
        errors[nearest].append(float(error))
    assert all(len(found) == 12 for found in errors.values())
    means = [statistics.fmean(found) for found in errors.values()]
    assert means == pytest.approx(cost.MEASURED[codec].errors, abs=5e-5)


def test_a_codec_without_a_measured_quality_is_named() -> None:
    with pytest.raises(UnknownNameError, match="no codec 'lowrnak'"):
        cost.quality("lowrnak", 0.1)


def test_rounds_are_counted_over_the_whole_range_of_numbers() -> None:
    assert theory.rounds_to(1e-300, factor=0.5, start=1e300) == 1 + math.ceil(600 / math.log10(2))


def test_the_papers_codec_has_beta_itself_as_its_quality() -> None:
    beta = np.array([0.01, 0.1, 0.5])
    paper = cost.RateDistortion(tuple(beta), tuple((1 - np.sqrt(beta)) ** 2))
    np.testing.assert_allclose(paper.quality(beta), beta)
