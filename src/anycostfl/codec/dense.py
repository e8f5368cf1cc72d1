"""An uncompressed update as a payload: 32 bits per element, guarded like a compressed one.

The body of the frame "ACFD" is the float32 values of all tensors in the order of their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from torch import Tensor

from anycostfl.codec.flat import all_of, flatten
from anycostfl.codec.frame import OVERHEAD, bond, seal, unseal_exact
from anycostfl.errors import PayloadError
from anycostfl.state import Update

MAGIC = b"ACFD"


def pack_dense(update: Mapping[str, Tensor], *, binding: bytes = b"") -> bytes:
    """Every element as it is."""
    shapes = {name: tuple(tensor.shape) for name, tensor in update.items()}
    return seal(MAGIC, flatten(update).astype("<f4").tobytes(), bond(binding, shapes))


def unpack_dense(payload: bytes, like: Mapping[str, Sequence[int]], binding: bytes) -> Update:
    """The update of these shapes; its mask is true everywhere."""
    expected = OVERHEAD + 4 * sum(map(prod, like.values()))
    if len(payload) != expected:
        raise PayloadError(f"a dense payload of this plan has {expected} bytes, not {len(payload)}")
    body = unseal_exact(payload, MAGIC, bond(binding, like))
    return all_of(np.frombuffer(body, "<f4").astype(np.float32), like)
