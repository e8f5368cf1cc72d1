"""STC (Sattler et al., 2019): the largest elements as ±μ, the rest remembered for later rounds.

    v = u + r,   ũ[j] = μ·sgn(v[j]) on the k largest |v|, μ = mean of those |v|,   r ← v − ũ

Each tensor has its own k, the same share of all, and its own μ, as in the authors' program. The
residual r is `feedback`'s. Positions are Golomb-coded, signs are one bit each. Full width at a
fixed rate; the clock meets the latency budget. Elements that were not sent count as zero, as in the
original.

Deviation: the original compresses the way down too; here no baseline does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from anycostfl.codec import Shapes, Upload, byte_budget, dense_update, flatten
from anycostfl.codec.arrays import Floats
from anycostfl.codec.frame import payload_binding
from anycostfl.codec.sparse import Layout, Ranked, Sparse, fill, pack_sparse, spread, unpack_sparse
from anycostfl.methods import Method, elements
from anycostfl.methods._common import binding_of, full_width_at, partial_work_at, weigh_by_samples
from anycostfl.state import State, Update

RATE = 1 / 43  # of S, recovered from the paper's table


def encode(update: State, upload: Upload) -> bytes:
    """Sparse ternary compression, of as large a share as the rate pays for."""
    flat, binding = flatten(update), binding_of(update, upload)
    places = places_of({name: tensor.shape for name, tensor in update.items()})
    ranked = [Ranked(flat[place]) for place in places]
    budget = byte_budget(upload.beta, flat.size)
    return fill(
        budget,
        1.5 * budget,
        flat.size,
        lambda count: pack_sparse(
            ternary(flat, places, ranked, count / max(flat.size, 1)), binding
        ),
    )


def places_of(shapes: Shapes) -> list[slice]:
    """Where each tensor lies in a flat update."""
    sizes = [math.prod(shapes[name]) for name in sorted(shapes)]
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def ternary(
    flat: Floats, places: Sequence[slice], ranked: Sequence[Ranked], share: float
) -> Sparse:
    """A share of each tensor's elements, the largest, as signs; and their mean magnitudes μ."""
    kept, means = np.zeros(flat.size, np.bool_), []
    for place, ranks in zip(places, ranked, strict=True):
        kept[place] = ranks.largest(math.ceil(share * (place.stop - place.start)))
        chosen = np.abs(flat[place][kept[place]])
        means.append(float(chosen.mean(dtype=np.float64)) if chosen.size else 0.0)
    return Sparse(kept, tuple(means), np.where(flat[kept] > 0, 0, -1))


def decode(payload: bytes, shapes: Shapes, upload: Upload) -> Update:
    """The ternary update."""
    layout = Layout(elements(shapes), scalars=len(shapes))
    sparse = unpack_sparse(payload, payload_binding(upload.binding, shapes), layout)
    signs = sparse.integers  # 0 and −1 become 1 and −1, in place
    np.right_shift(signs, 31, out=signs)
    np.bitwise_or(signs, 1, out=signs)
    flat = spread(sparse, unit=1.0)
    for place, mean in zip(places_of(shapes), sparse.scalars, strict=True):
        flat[place] *= np.float32(mean)
    return dense_update(flat, shapes)


METHOD = Method(
    summary="STC: top-k ternary updates with error feedback, full models",
    plan=full_width_at(RATE),
    encode=encode,
    decode=decode,
    weigh=weigh_by_samples,
    sorts_channels=False,
    feedback=True,
)
METHOD = replace(METHOD, strict=replace(METHOD, plan=partial_work_at(RATE)))
