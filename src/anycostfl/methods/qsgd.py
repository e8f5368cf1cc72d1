"""QSGD (Alistarh et al., 2017) on the largest elements, as the paper compares it.

    v = the k largest elements of u,   ũ[j] = ‖v‖₂·sgn(v[j])·ξ_j / s

where ξ_j is |v[j]|·s/‖v‖₂ rounded up or down at random, so that E[ũ] = v. The number of levels is
s = ⌈√k / STEP⌉: points lie STEP root-mean-squares of v apart. Full width at a fixed rate; the clock
meets the latency budget; weights by sample count, as in FedAvg.

Deviation: Elias codes of the original are replaced by the entropy coder that all methods share.
"""

from __future__ import annotations

import math

import numpy as np

from anycostfl.checks import FloatArray
from anycostfl.codec import byte_budget
from anycostfl.codec.flat import all_of, flatten
from anycostfl.codec.frame import bond
from anycostfl.codec.kernels import Floats
from anycostfl.codec.sparse import (
    Layout,
    Ranked,
    Sparse,
    chances,
    draw,
    fill,
    pack_sparse,
    spread,
    unpack_sparse,
)
from anycostfl.methods import Method, Shapes, State, Upload, elements
from anycostfl.planner import fixed_strategies
from anycostfl.types import Devices, Limits, Strategies, Update, Workload

RATE = 1 / 35  # of S, recovered from the paper's table
STEP = 0.4  # in root-mean-squares of what is kept; about the least error at this rate


def plan(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """Full width, one rate for all."""
    ones = np.ones(len(devices))
    return fixed_strategies(devices, workload, alpha=ones, beta=ones * (limits.rate or RATE))


def encode(update: State, upload: Upload) -> bytes:
    """Top-k, then stochastic levels."""
    flat = flatten(update)
    tie = bond(upload.binding, {name: tensor.shape for name, tensor in update.items()})
    ranked = Ranked(flat)

    def payload_of(count: int) -> bytes:
        return pack_sparse(quantize(flat, ranked, count, upload.seed), tie)

    budget = byte_budget(upload.beta, flat.size)
    return fill(budget, 1.0 * budget, ranked.most, payload_of)


def quantize(flat: Floats, ranked: Ranked, count: int, seed: int) -> Sparse:
    """The `count` largest elements on s levels of their norm; the scalar is ‖v‖₂ / s."""
    kept = ranked.largest(count) if count else np.zeros(flat.size, np.bool_)
    chosen = flat[kept].astype(np.float64)
    levels = math.ceil(math.sqrt(chosen.size) / STEP)
    unit = np.float32(np.linalg.norm(chosen) / max(levels, 1))
    if not unit > 0:
        return Sparse(np.zeros(flat.size, np.bool_), (0.0,), np.empty(0, np.int64))
    drawn = draw(np.abs(chosen) / np.float64(unit), chances(seed, chosen.size))
    return Sparse(kept, (float(unit),), np.where(chosen < 0, -drawn, drawn))


def decode(payload: bytes, shapes: Shapes, binding: bytes) -> Update:
    """The quantized update; elements that were not sent count as zero."""
    layout = Layout(elements(shapes), scalars=1)
    return all_of(spread(unpack_sparse(payload, bond(binding, shapes), layout)), shapes)


def weigh(alpha: FloatArray, beta: FloatArray, samples: FloatArray) -> FloatArray:
    """In proportion to the data."""
    del alpha, beta
    shares: FloatArray = samples / samples.sum()
    return shares


METHOD = Method(
    summary="QSGD: top-k elements on stochastic levels, full models",
    plan=plan,
    encode=encode,
    decode=decode,
    weigh=weigh,
    sorts_channels=False,
    by_samples=True,
)
