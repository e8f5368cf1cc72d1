"""The optimal aggregation weights (Theorem 1): p_i ∝ 1 / (1 − α_i(2−α_i)√β_i)².

Deviations: the ratio is bounded away from zero, as p* is singular at α = β = 1; the weights may
also carry the device's sample count, which the paper leaves out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from anycostfl.theory import divergence_ratio
from anycostfl.types import ConfigError, FloatArray, Interval

LEAST_RATIO = 1e-3  # no update counts as closer to the truth than 0.1 % of its norm


def optimal_weights(
    alpha: npt.ArrayLike, beta: npt.ArrayLike, *, samples: npt.ArrayLike | None = None
) -> FloatArray:
    """Weights that sum to one and minimise Lemma 2's bound; times |D_i| if samples are given."""
    ratio = np.atleast_1d(np.maximum(divergence_ratio(alpha, beta), LEAST_RATIO))
    weights: FloatArray = ratio**-2.0
    if samples is not None:
        allowed = Interval(0.0, open_low=True)
        if not np.all(allowed.contains(samples)):
            raise ConfigError([f"samples: given {samples}, allowed {allowed}"])
        weights = weights * np.asarray(samples, np.float64)
    shares: FloatArray = weights / weights.sum()
    return shares
