"""FedHQ (Chen et al., 2021): finer levels on better channels, and weights that know it.

    ũ[j] = ‖u‖_∞·sgn(u[j])·ξ_j / s_i,   ξ_j = |u[j]|·s_i/‖u‖_∞ rounded at random, E[ũ] = u
    p_i ∝ |D_i| / (1 + q_i),   E‖ũ − u‖² = q_i·‖u‖²

Nothing is left out; a device whose radio is faster sends more bits. Rates are in proportion to the
channel's, so that all upload for about the same time. The weights minimise Σ p_i²·(1 + q_i)/|D_i|,
the part of the convergence bound that quantization adds. Full width; the clock meets the latency
budget.

Deviations: levels fill the rate as entropy-coded, so there are more of them than the 2^b − 1 of b
bits an element, and s_i may be a fraction, below 1 where the rate pays for no more: drawn values
then stand above ‖u‖_∞, and their expectation is u still. The original's devices measure q_i and
report it; here it follows from the rate that the server issued, so false reports gain nothing:
q = ERROR / (2^b − 1)². At 0.67 to 1.9 bits the ERROR of one update of a CNN was measured as 0.30 to
0.44, of an early ResNet-18 as 0.66 to 1.42; with 0.55 the CNN's bound is 0.5 % above its least.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from anycostfl.checks import FloatArray
from anycostfl.codec import Upload, byte_budget, flatten
from anycostfl.codec.arrays import Floats
from anycostfl.codec.sparse import Sparse, chances, draw, fill, pack_sparse
from anycostfl.methods import Method
from anycostfl.methods._common import average, binding_of, decode_levels
from anycostfl.planning.afford import affordable_upload, strategies_of
from anycostfl.planning.cost import Devices, Workload
from anycostfl.planning.planner import fixed_strategies
from anycostfl.planning.strategy import Limits, Strategies
from anycostfl.state import State

RATE = 1 / 33  # of S on average, recovered from the paper's table
FINENESS = 256  # steps of the search from one level to the next
MAX_LEVELS = 2**22
ERROR = 0.55  # between a CNN's and a ResNet-18's


def plan(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """Full width; the mean rate shared out in proportion to the channels.

    Where claims are not trusted, in proportion to the median channel: none gets more than all.
    """
    mean = limits.upload_ratio or RATE
    beta = np.minimum(1.0, mean * devices.rate_bps / average(devices.rate_bps, limits.claims))
    return fixed_strategies(devices, workload, alpha=np.ones(len(devices)), beta=beta)


def plan_strictly(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """The same rates as far as half of each budget pays for them, and as much work as is left."""
    wanted = plan(devices, workload, limits).beta
    upload = np.minimum(wanted, affordable_upload(devices, workload, limits, 1.0))
    return strategies_of(devices, workload, limits, alpha=np.ones(len(devices)), upload=upload)


def encode(update: State, upload: Upload) -> bytes:
    """As many levels as the rate pays for, or a fraction of one."""
    flat, binding = flatten(update), binding_of(update, upload)
    chance = chances(upload.seed, flat.size)

    def payload_of(count: int) -> bytes:
        return pack_sparse(quantize(flat, count / FINENESS, chance), binding)

    budget = byte_budget(upload.beta, flat.size)
    # About three elements that are not drawn as zero fit into two bytes.
    with np.errstate(over="ignore"):  # of numbers that large the search finds its way from 0
        mean = max(float(np.abs(flat).mean()), 1e-30) if flat.size else 1.0
    start = 1.5 * budget / max(flat.size, 1) * float(np.abs(flat).max(initial=0.0)) / mean
    return fill(budget, FINENESS * start, FINENESS * MAX_LEVELS, payload_of)


def quantize(flat: Floats, levels: float, chance: Floats) -> Sparse:
    """Every element on `levels` levels of the largest; those drawn as zero are left out."""
    with np.errstate(over="ignore"):  # a level beyond float32 is none
        unit = np.float32(np.abs(flat).max(initial=0.0) / levels) if levels else np.float32(0.0)
    if not 0 < unit < np.inf:
        return Sparse.nothing(flat.size)
    scaled = np.abs(flat) / unit
    kept = scaled > chance  # below one, drawn as one with just that probability
    drawn = draw(scaled[kept], chance[kept])
    return Sparse(kept, (float(unit),), np.where(flat[kept] < 0, -drawn, drawn))


def weigh(alpha: FloatArray, beta: FloatArray, samples: FloatArray) -> FloatArray:
    """|D_i| / (1 + q_i), from the rate that was issued."""
    del alpha
    error = ERROR / (np.exp2(32.0 * beta) - 1.0) ** 2
    weights = samples / (1.0 + error)
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
METHOD = replace(METHOD, strict=replace(METHOD, plan=plan_strictly))
