"""FedHQ (Chen et al., 2021): finer levels on better channels, and weights that know it.

    ũ[j] = ‖u‖_∞·sgn(u[j])·ξ_j / s_i,   ξ_j = |u[j]|·s_i/‖u‖_∞ rounded at random, E[ũ] = u
    p_i ∝ |D_i| / (1 + q_i),   q_i = min(J/s², √J/s)

Nothing is left out; a device whose radio is faster sends more bits. Rates are in proportion to the
channel's, so that all upload for about the same time. The weights minimise Σ p_i²·(1 + q_i), the
part of the convergence bound that quantization adds (E‖Q(u) − u‖² <= q‖u‖²). They come from the
rate that the server issued: b bits an element make s = 2^b − 1 levels. Full width; the clock meets
the latency budget.

Deviation: levels fill the rate as entropy-coded, so there are more of them than 2^b − 1.
"""

from __future__ import annotations

import numpy as np

from anycostfl.checks import FloatArray
from anycostfl.codec import byte_budget
from anycostfl.codec.flat import flatten
from anycostfl.codec.kernels import Floats
from anycostfl.codec.sparse import Sparse, chances, draw, fill, pack_sparse
from anycostfl.methods import Method, State, Upload
from anycostfl.methods._common import bond_of, decode_levels
from anycostfl.planner import fixed_strategies
from anycostfl.types import Devices, Limits, Strategies, Workload

RATE = 1 / 33  # of S on average, recovered from the paper's table
MAX_LEVELS = 2**22
BOUND_ELEMENTS = 512.0  # J of the bound: QSGD's bucket, as one norm per model bounds nothing


def plan(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """Full width; the mean rate shared out in proportion to the channels."""
    mean = limits.rate or RATE
    beta = np.minimum(1.0, mean * devices.rate_bps / devices.rate_bps.mean())
    return fixed_strategies(devices, workload, alpha=np.ones(len(devices)), beta=beta)


def encode(update: State, upload: Upload) -> bytes:
    """As many levels as the rate pays for."""
    flat, tie = flatten(update), bond_of(update, upload)
    chance = chances(upload.seed, flat.size)

    def payload_of(levels: int) -> bytes:
        return pack_sparse(quantize(flat, levels, chance), tie)

    budget = byte_budget(upload.beta, flat.size)
    # About three elements that are not drawn as zero fit into two bytes.
    mean = max(float(np.abs(flat).mean()), 1e-30) if flat.size else 1.0
    start = 1.5 * budget / max(flat.size, 1) * float(np.abs(flat).max(initial=0.0)) / mean
    return fill(budget, start, MAX_LEVELS, payload_of)


def quantize(flat: Floats, levels: int, chance: Floats) -> Sparse:
    """Every element on `levels` levels of the largest; those drawn as zero are left out."""
    unit = np.float32(np.abs(flat).max(initial=0.0) / max(levels, 1))
    if not unit > 0 or not levels:
        return Sparse(np.zeros(flat.size, np.bool_), (0.0,), np.empty(0, np.int64))
    scaled = np.abs(flat) / unit
    kept = scaled > chance  # below one, drawn as one with just that probability
    drawn = draw(scaled[kept], chance[kept])
    return Sparse(kept, (float(unit),), np.where(flat[kept] < 0, -drawn, drawn))


def weigh(alpha: FloatArray, beta: FloatArray, samples: FloatArray) -> FloatArray:
    """|D_i| / (1 + q_i), from the rate that was issued."""
    del alpha
    levels = np.exp2(32.0 * beta) - 1.0
    bound = np.minimum(BOUND_ELEMENTS / levels**2, np.sqrt(BOUND_ELEMENTS) / levels)
    weights = samples / (1.0 + bound)
    shares: FloatArray = weights / weights.sum()
    return shares


METHOD = Method(
    summary="FedHQ: stochastic levels by channel state, weights by their error, full models",
    plan=plan,
    encode=encode,
    decode=decode_levels,
    weigh=weigh,
    sorts_channels=False,
    by_samples=True,
)
