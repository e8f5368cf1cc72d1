"""What several methods have in common: full models at one rate, the largest elements, plain means.

A method's file says what is its own and takes the rest from here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from anycostfl.checks import FloatArray
from anycostfl.codec import (
    Shapes,
    Upload,
    byte_budget,
    decompress,
    dense_update,
    encode,
    flatten,
)
from anycostfl.codec.arrays import Floats
from anycostfl.codec.dense import pack_dense, unpack_dense
from anycostfl.codec.frame import PayloadBinding, payload_binding
from anycostfl.codec.sparse import (
    Layout,
    Ranked,
    Sparse,
    fill,
    pack_sparse,
    spread,
    unpack_sparse,
)
from anycostfl.methods import elements
from anycostfl.planning.afford import affordable_cycles, affordable_upload, strategies_of
from anycostfl.planning.cost import Devices, Workload, widest_in_memory
from anycostfl.planning.planner import fixed_strategies
from anycostfl.planning.strategy import Limits, Strategies
from anycostfl.state import State, Update, with_full_mask

Planner = Callable[[Devices, Workload, Limits], Strategies]


def full_width_at(default: float) -> Planner:
    """A plan of full models and one rate for all: the limits', or else the default."""

    def plan(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
        ones = np.ones(len(devices))
        return fixed_strategies(
            devices, workload, alpha=ones, beta=ones * (limits.upload_ratio or default)
        )

    return plan


CODED = 0.01
"""αβ of methods that are coded by ours where every budget has to be kept."""


def partial_work_at(default: float) -> Planner:
    """Full models within every budget: an affordable rate, and as many local steps as are left."""

    def plan(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
        wanted = limits.upload_ratio or default
        upload = affordable_upload(devices, workload, limits, wanted)
        return strategies_of(devices, workload, limits, alpha=np.ones(len(devices)), upload=upload)

    return plan


def affordable_widths_at(default: float) -> Planner:
    """The widest sub-models within every budget; below the least width, less work."""

    def plan(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
        wanted = limits.upload_ratio or default
        upload = affordable_upload(devices, workload, limits, wanted)
        widest = affordable_cycles(devices, workload, upload) - devices.overhead
        widest = np.minimum(widest, widest_in_memory(devices))
        alpha = np.clip(widest, limits.alpha_min, 1.0)
        upload = np.minimum(upload, alpha)
        return strategies_of(devices, workload, limits, alpha=alpha, upload=upload)

    return plan


def encode_at_rate(update: State, upload: Upload) -> bytes:
    """32 bits for every element, or a codec's payload where fewer were asked for."""
    return encode_dense(update, upload) if upload.beta == 1 else encode(update, upload)


def decode_at_rate(payload: bytes, shapes: Shapes, upload: Upload) -> Update:
    """The inverse; what was not sent counts as zero."""
    if upload.beta == 1:
        return decode_dense(payload, shapes, upload)
    return decode_unmasked(payload, shapes, upload)


def average(values: FloatArray, claims: str | None = None) -> float:
    """The mean, or the median of what devices claim; one, where there is nobody."""
    if not values.size:
        return 1.0
    return float(np.median(values) if claims == "median" else values.mean())


def weigh_by_samples(alpha: FloatArray, beta: FloatArray, samples: FloatArray) -> FloatArray:
    """In proportion to the data; the plain mean where sample counts are not asked for."""
    del alpha, beta
    shares: FloatArray = samples / samples.sum()
    return shares


def decode_unmasked(payload: bytes, shapes: Shapes, upload: Upload) -> Update:
    """The quantized update; elements that were not sent count as zero."""
    return with_full_mask(decompress(payload, shapes, binding=upload.binding))


def encode_dense(update: State, upload: Upload) -> bytes:
    """32 bits for every element."""
    return pack_dense(update, binding=upload.binding)


def decode_dense(payload: bytes, shapes: Shapes, upload: Upload) -> Update:
    """Every element as it was."""
    return unpack_dense(payload, shapes, upload.binding)


def binding_of(update: State, upload: Upload) -> PayloadBinding:
    """What the payload of an update is bound to."""
    return payload_binding(upload.binding, {name: tensor.shape for name, tensor in update.items()})


def encode_largest(
    update: State,
    upload: Upload,
    quantize: Callable[[Floats, Ranked, int], Sparse],
    *,
    per_byte: float,
) -> bytes:
    """As many of the largest elements as the rate pays for; `per_byte` is a first guess."""
    flat, binding = flatten(update), binding_of(update, upload)
    ranked = Ranked(flat)
    budget = byte_budget(upload.beta, flat.size)
    return fill(
        budget,
        per_byte * budget,
        ranked.most,
        lambda count: pack_sparse(quantize(flat, ranked, count), binding),
    )


def decode_levels(payload: bytes, shapes: Shapes, upload: Upload) -> Update:
    """Levels times the scalar; elements that were not sent count as zero."""
    layout = Layout(elements(shapes), scalars=1)
    sparse = unpack_sparse(payload, payload_binding(upload.binding, shapes), layout)
    return dense_update(spread(sparse, *sparse.scalars), shapes)
