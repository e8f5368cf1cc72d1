"""QSGD (Alistarh et al., 2017) on the largest elements, as the paper compares it.

    v = the k largest elements of u,   ũ[j] = ‖v‖₂·sgn(v[j])·ξ_j / s

where ξ_j is |v[j]|·s/‖v‖₂ rounded up or down at random, so that E[ũ] = v. The number of levels is
s = ⌈√k / STEP⌉: points lie STEP root-mean-squares of v apart. Full width at a fixed rate; the clock
meets the latency budget; weights by sample count, as in FedAvg.

Deviations: Elias codes of the original are replaced by the entropy coder that all methods share. It
quantizes buckets of elements, each by a norm of its own; here one norm is for all, which at this
rate leaves as much of a CNN's update as a norm for every tensor, or for every 512 elements, does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from anycostfl.codec import Upload
from anycostfl.codec.arrays import Floats
from anycostfl.codec.sparse import Ranked, Sparse, chances, draw
from anycostfl.methods import Method
from anycostfl.methods._common import (
    decode_levels,
    encode_largest,
    full_width_at,
    partial_work_at,
    weigh_by_samples,
)
from anycostfl.state import State

RATE = 1 / 35  # of S, recovered from the paper's table
STEP = 0.4  # in root-mean-squares of what is kept; about the least error at this rate


def encode(update: State, upload: Upload) -> bytes:
    """Top-k, then stochastic levels."""
    return encode_largest(update, upload, partial(quantize, seed=upload.seed), per_byte=1.0)


def quantize(flat: Floats, ranked: Ranked, count: int, seed: int) -> Sparse:
    """The `count` largest elements on s levels of their norm; the scalar is ‖v‖₂ / s."""
    kept = ranked.largest(count)
    chosen = flat[kept].astype(np.float64)
    levels = math.ceil(math.sqrt(chosen.size) / STEP)
    unit = np.float32(np.linalg.norm(chosen) / max(levels, 1))
    if not unit > 0:
        return Sparse.nothing(flat.size)
    drawn = draw(np.abs(chosen) / np.float64(unit), chances(seed, chosen.size))
    return Sparse(kept, (float(unit),), np.where(chosen < 0, -drawn, drawn))


METHOD = Method(
    summary="QSGD: top-k elements on stochastic levels, full models",
    plan=full_width_at(RATE),
    encode=encode,
    decode=decode_levels,
    weigh=weigh_by_samples,
    sorts_channels=False,
    by_samples=True,
)
METHOD = replace(METHOD, strict=replace(METHOD, plan=partial_work_at(RATE)))
