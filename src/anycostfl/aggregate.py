"""All-in-one aggregation (Sec. III-D, eq. 5) with the optimal weights of Theorem 1.

    ũ[j] = Σ_i p_i m_i[j] u_i[j] / Σ_i p_i m_i[j],   0 where nobody sent element j
    w_{t+1} = w_t − ũ_t,   p_i ∝ 1 / (1 − α_i(2−α_i)√β_i)²

One pass over the contributions: memory does not grow with the cohort. A sub-model is a prefix of
every dimension after sorting, so its update is added through slices, without masks of global size.

Deviations: Theorem 1's ratio is bounded away from zero, as p* is singular at α = β = 1; the weights
may also carry the device's sample count, which the paper leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from anycostfl.checks import FloatArray, Interval
from anycostfl.errors import ConfigError
from anycostfl.shrink.widths import WidthPlan, add
from anycostfl.theory import divergence_ratio
from anycostfl.types import Update

LEAST_RATIO = 1e-3  # no update counts as closer to the truth than 0.1 % of its norm


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """A decoded update in its sub-model's coordinates, the plan it belongs to, and its weight."""

    plan: WidthPlan
    update: Update
    weight: float


def aggregate(
    like: Mapping[str, Tensor], contributions: Iterable[Contribution]
) -> dict[str, Tensor]:
    """The next global state: element by element, the weighted mean of whoever sent it is taken off.

    Tensors that nobody sends (running statistics) stay as they are. Sums are kept in float64.
    """
    sums: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for contribution in contributions:
        for name, values in contribution.update.values.items():
            if name not in sums:
                sums[name] = torch.zeros(like[name].shape, dtype=torch.float64)
                weights[name] = torch.zeros(like[name].shape, dtype=torch.float64)
            region, mask = contribution.plan.index[name], contribution.update.masks[name]
            add(sums[name], region, values, contribution.weight)  # zero outside the mask
            add(weights[name], region, mask, contribution.weight)
    return {name: _step(w, sums.get(name), weights.get(name)) for name, w in like.items()}


def _step(weight: Tensor, total: Tensor | None, shares: Tensor | None) -> Tensor:
    if total is None or shares is None:
        return weight.detach().clone()
    mean = total / torch.where(shares > 0, shares, 1.0)
    return (weight.detach() - mean).to(weight.dtype)


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
