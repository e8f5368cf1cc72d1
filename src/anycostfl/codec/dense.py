"""An uncompressed update as a payload: 32 bits per element in the same envelope.

The body of the frame "ACFD" is the float32 values of all tensors, sorted by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from torch import Tensor

from anycostfl.codec import dense_update, flatten
from anycostfl.codec.frame import OVERHEAD, payload_binding, seal, unseal_exact
from anycostfl.errors import PayloadError
from anycostfl.state import Update

MAGIC = b"ACFD"


def pack_dense(update: Mapping[str, Tensor], *, binding: bytes = b"") -> bytes:
    """Encode every element as it is."""
    shapes = {name: tuple(tensor.shape) for name, tensor in update.items()}
    return seal(MAGIC, flatten(update).astype("<f4").tobytes(), payload_binding(binding, shapes))


def unpack_dense(payload: bytes, like: Mapping[str, Sequence[int]], binding: bytes) -> Update:
    """Decode an update of these shapes; its mask is true everywhere."""
    expected = OVERHEAD + 4 * sum(map(prod, like.values()))
    if len(payload) != expected:
        raise PayloadError(f"a dense payload of this plan has {expected} bytes, not {len(payload)}")
    body = unseal_exact(payload, MAGIC, payload_binding(binding, like))
    return dense_update(np.frombuffer(body, "<f4").astype(np.float32), like)
