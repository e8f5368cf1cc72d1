"""STC (Sattler et al., 2019): the largest elements as ±μ, the rest remembered for later rounds.

    v = u + r,   ũ[j] = μ·sgn(v[j]) on the k largest |v|, μ = mean of those |v|,   r ← v − ũ

The residual r is `feedback`'s. Positions are Golomb-coded, signs are one bit each. Full width at a
fixed rate; the clock meets the latency budget. Elements that were not sent count as zero, as in the
original.
"""

from __future__ import annotations

import numpy as np

from anycostfl.codec.flat import all_of
from anycostfl.codec.frame import bond
from anycostfl.codec.kernels import Floats
from anycostfl.codec.sparse import Layout, Ranked, Sparse, spread, unpack_sparse
from anycostfl.methods import Method, Shapes, State, Upload, elements
from anycostfl.methods._common import encode_largest, full_width_at, weigh_by_samples
from anycostfl.types import Update

RATE = 1 / 43  # of S, recovered from the paper's table


def encode(update: State, upload: Upload) -> bytes:
    """Sparse ternary compression."""
    return encode_largest(update, upload, ternary, per_byte=1.5)


def ternary(wanted: Floats, ranked: Ranked, count: int) -> Sparse:
    """The `count` largest elements as signs, and their mean magnitude μ."""
    kept = ranked.largest(count) if count else np.zeros(wanted.size, np.bool_)
    chosen = wanted[kept]
    size = float(np.abs(chosen).mean()) if chosen.size else 0.0
    return Sparse(kept, (size,), np.where(chosen > 0, 0, -1))


def decode(payload: bytes, shapes: Shapes, binding: bytes) -> Update:
    """The ternary update."""
    layout = Layout(elements(shapes), scalars=1)
    sparse = unpack_sparse(payload, bond(binding, shapes), layout)
    signs = sparse.integers  # 0 and −1 become 1 and −1, in their place
    np.right_shift(signs, 31, out=signs)
    np.bitwise_or(signs, 1, out=signs)
    return all_of(spread(sparse), shapes)


METHOD = Method(
    summary="STC: top-k ternary updates with error feedback, full models",
    plan=full_width_at(RATE),
    encode=encode,
    decode=decode,
    weigh=weigh_by_samples,
    sorts_channels=False,
    feedback=True,
)
