"""AnycostFL (Li et al., 2023): the best strategy that every device can afford, each round."""

from __future__ import annotations

from anycostfl.aggregate import optimal_weights
from anycostfl.checks import FloatArray
from anycostfl.codec import compress, decompress
from anycostfl.methods import Method, Shapes, State, Upload
from anycostfl.planner import plan_strategies
from anycostfl.types import Update


def encode(update: State, upload: Upload, memory: State | None) -> tuple[bytes, State | None]:
    """Flexible gradient compression (Sec. III-C); remembers nothing."""
    payload = compress(
        update, upload.beta, seed=upload.seed, blocks=upload.blocks, binding=upload.binding
    )
    return payload, memory


def decode(payload: bytes, shapes: Shapes, binding: bytes) -> Update:
    """The quantized update and its mask."""
    return decompress(payload, shapes, binding=binding)


def weigh(alpha: FloatArray, beta: FloatArray, samples: FloatArray) -> FloatArray:
    """Theorem 1."""
    return optimal_weights(alpha, beta, samples=samples)


METHOD = Method(
    summary="AnycostFL: sub-models, compressed kernels and clocks planned under budgets",
    plan=plan_strategies,
    encode=encode,
    decode=decode,
    weigh=weigh,
    sorts_channels=True,
)
