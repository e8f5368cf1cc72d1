"""The least that a code without contexts takes."""

from __future__ import annotations

import numpy as np

from anycostfl.codec.arrays import Ints


def entropy_bytes(counts: Ints) -> float:
    """Zero-order entropy of symbols with these counts, in bytes."""
    some = counts[counts > 0].astype(np.float64)
    return float((some * (np.log2(some.sum()) - np.log2(some))).sum() / 8)
