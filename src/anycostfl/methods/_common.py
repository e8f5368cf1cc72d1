"""What several methods have in common: full models at one rate, the largest elements, plain means.

A method's file says what is its own and takes the rest from here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from anycostfl.checks import FloatArray
from anycostfl.codec import byte_budget, compress, decompress
from anycostfl.codec.arrays import Floats
from anycostfl.codec.dense import pack_dense, unpack_dense
from anycostfl.codec.flat import all_of, flatten
from anycostfl.codec.frame import Bond, bond
from anycostfl.codec.sparse import (
    Layout,
    Ranked,
    Sparse,
    fill,
    pack_sparse,
    spread,
    unpack_sparse,
)
from anycostfl.methods import Shapes, Upload, elements
from anycostfl.planner import fixed_strategies
from anycostfl.state import State, Update, with_full_mask
from anycostfl.types import Devices, Limits, Strategies, Workload

Planner = Callable[[Devices, Workload, Limits], Strategies]


def full_width_at(default: float) -> Planner:
    """A plan of full models and one rate for all: the limits', or else the default."""

    def plan(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
        ones = np.ones(len(devices))
        return fixed_strategies(devices, workload, alpha=ones, beta=ones * (limits.rate or default))

    return plan


def average(values: FloatArray) -> float:
    """The mean; one, where there is nobody."""
    return float(values.mean()) if values.size else 1.0


def weigh_by_samples(alpha: FloatArray, beta: FloatArray, samples: FloatArray) -> FloatArray:
    """In proportion to the data; the plain mean where sample counts are not asked for."""
    del alpha, beta
    shares: FloatArray = samples / samples.sum()
    return shares


def encode_with_codec(update: State, upload: Upload) -> bytes:
    """Flexible gradient compression (Sec. III-C), or another codec that is asked for."""
    return compress(
        update,
        upload.beta,
        seed=upload.seed,
        codec=upload.codec,
        blocks=upload.blocks,
        binding=upload.binding,
    )


def decode_unmasked(payload: bytes, shapes: Shapes, upload: Upload) -> Update:
    """The quantized update; elements that were not sent count as zero."""
    return with_full_mask(decompress(payload, shapes, binding=upload.binding))


def encode_dense(update: State, upload: Upload) -> bytes:
    """32 bits for every element."""
    return pack_dense(update, binding=upload.binding)


def decode_dense(payload: bytes, shapes: Shapes, upload: Upload) -> Update:
    """Every element as it was."""
    return unpack_dense(payload, shapes, upload.binding)


def bond_of(update: State, upload: Upload) -> Bond:
    """What the payload of an update is tied to."""
    return bond(upload.binding, {name: tensor.shape for name, tensor in update.items()})


def encode_largest(
    update: State,
    upload: Upload,
    quantize: Callable[[Floats, Ranked, int], Sparse],
    *,
    per_byte: float,
) -> bytes:
    """As many of the largest elements as the rate pays for; `per_byte` is a first guess."""
    flat, tie = flatten(update), bond_of(update, upload)
    ranked = Ranked(flat)
    budget = byte_budget(upload.beta, flat.size)
    return fill(
        budget,
        per_byte * budget,
        ranked.most,
        lambda count: pack_sparse(quantize(flat, ranked, count), tie),
    )


def decode_levels(payload: bytes, shapes: Shapes, upload: Upload) -> Update:
    """Levels times the scalar; elements that were not sent count as zero."""
    layout = Layout(elements(shapes), scalars=1)
    sparse = unpack_sparse(payload, bond(upload.binding, shapes), layout)
    return all_of(spread(sparse, *sparse.scalars), shapes)
