"""What the strategies of a round promise: divergence, gain, convergence (Sec. IV-B, IV-C).

    Lemma 1     E‖δ_i‖² <= (1 − α(2−α)√β)² E‖u_i‖²
    Theorem 1   p_i ∝ 1 / (1 − α_i(2−α_i)√β_i)²
    Lemma 2     E‖Δ‖² <= I·ε·η² Σ p_i² (1 − α_i(2−α_i)√β_i)² E‖∇F‖²
    gain        g_i = α_i⁴ β_i,  g = mean of g_i
    Theorem 2   F(w_T) − F* <= Z^{T−1} (F(w_0) − F*),  Z = 1 − (ν/λ)(1 − ε(1 − g^min))
    Quality     q(β) = (1 − √e(β))² instead of β, for a codec of relative error e(β)

Lemma 1 rests on |u| being uniform and on shrinking removing the smallest elements. Its last step
(b) holds exactly while √β <= 2/(3 − α), which every β <= 4/9 meets. The step before it treats the
shrunk update as uniform from zero again, which it no longer is: what is lost is then (1 − α√β)³,
above the bound for narrow sub-models (α up to about one half). Theorem 2 does not suffer: it needs
no more than 1 − α⁴β, and (1 − α√β)³ is below that for every α and β. docs/planner.md shows the
divergence of real updates beside the bound.

In all of this, √β stands for what the codec keeps of the update's norm: the paper's codec leaves
‖u − ũ‖ = (1 − √β)‖u‖ of a uniform update. A codec whose error is measured keeps 1 − √e(β) instead,
so its square replaces β in the gain and in Theorem 1. `MEASURED` holds what was measured.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from anycostfl.checks import FloatArray
from anycostfl.errors import ConfigError
from anycostfl.server.aggregate import divergence_ratio


def local_divergence_bound(
    alpha: npt.ArrayLike, beta: npt.ArrayLike, *, update_norm_squared: npt.ArrayLike = 1.0
) -> FloatArray:
    """Lemma 1: the largest expected ‖u − ũ‖² of one device."""
    bound: FloatArray = divergence_ratio(alpha, beta) ** 2 * np.asarray(update_norm_squared)
    return bound


def global_divergence_bound(
    weights: npt.ArrayLike,
    alpha: npt.ArrayLike,
    beta: npt.ArrayLike,
    *,
    dissimilarity: float = 1.0,
    step_norm_squared: float = 1.0,
) -> float:
    """Lemma 2: the largest expected ‖u − ũ‖² of the aggregate.

    `dissimilarity` is the ε of Assumption 4 and `step_norm_squared` is η²·E‖∇F‖².
    """
    terms = np.asarray(weights, np.float64) ** 2 * divergence_ratio(alpha, beta) ** 2
    return float(terms.size * dissimilarity * step_norm_squared * terms.sum())


def convergence_factor(
    gain_min: float, *, strong_convexity: float, lipschitz: float, dissimilarity: float = 1.0
) -> float:
    """Theorem 2's Z: the factor by which one round shrinks the distance to the optimum."""
    if not 0 < strong_convexity <= lipschitz:
        given = f"{strong_convexity:g} and {lipschitz:g}"
        raise ConfigError([f"strong_convexity, lipschitz: given {given}, must be 0 < ν <= λ"])
    return 1.0 - strong_convexity / lipschitz * (1.0 - dissimilarity * (1.0 - gain_min))


def rounds_to(target: float, *, factor: float, start: float) -> float:
    """The least T with Z^{T−1}·start <= target; infinite where Z >= 1 (no promise is made)."""
    if not (target > 0 and start > 0):
        raise ConfigError([f"target, start: given {target:g} and {start:g}, must be > 0"])
    if target >= start:
        return 1.0
    if factor >= 1.0:
        return math.inf
    if factor <= 0.0:
        return 2.0
    return 1.0 + math.ceil((math.log(target) - math.log(start)) / math.log(factor) - 1e-12)
