"""FedAvg (McMahan et al., 2017): full width, nothing compressed, weights by sample count.

It knows no budgets: every device takes part and pays what it costs, at the clock that finishes
computing within the latency budget if there is one.
"""

from __future__ import annotations

import numpy as np

from anycostfl.checks import FloatArray
from anycostfl.codec.dense import pack_dense, unpack_dense
from anycostfl.methods import Method, Shapes, State, Upload
from anycostfl.planner import fixed_strategies
from anycostfl.types import Devices, Limits, Strategies, Update, Workload


def plan(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """α = β = 1 for everyone, whatever it costs."""
    del limits
    ones = np.ones(len(devices))
    return fixed_strategies(devices, workload, alpha=ones, beta=ones)


def encode(update: State, upload: Upload) -> bytes:
    """32 bits for every element."""
    return pack_dense(update, binding=upload.binding)


def decode(payload: bytes, shapes: Shapes, binding: bytes) -> Update:
    """Exactly what was sent; every element counts."""
    return unpack_dense(payload, shapes, binding=binding)


def weigh(alpha: FloatArray, beta: FloatArray, samples: FloatArray) -> FloatArray:
    """In proportion to the data."""
    del alpha, beta
    shares: FloatArray = samples / samples.sum()
    return shares


METHOD = Method(
    summary="FedAvg: full models, uncompressed updates, no budgets",
    plan=plan,
    encode=encode,
    decode=decode,
    weigh=weigh,
    sorts_channels=False,
    by_samples=True,
)
