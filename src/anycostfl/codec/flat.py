"""An update as one vector, its tensors in the order of their names, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from anycostfl.codec.arrays import Bools, Floats
from anycostfl.errors import PayloadError, UpdateError
from anycostfl.state import Update, with_full_mask


def flatten(update: Mapping[str, Tensor]) -> Floats:
    """All elements as float32; one that is not finite is an error that names its tensor."""
    pieces = []
    for name in sorted(update):
        if not update[name].is_floating_point():
            raise UpdateError(f"{name} is {update[name].dtype}; an update is floating point")
        piece = update[name].detach().to("cpu", torch.float32).flatten().numpy()
        if not np.isfinite(piece).all():
            raise UpdateError(f"{name} has an element that is not finite in float32")
        pieces.append(piece)
    return np.concatenate(pieces) if pieces else np.empty(0, np.float32)


def unflatten(flat: Floats | Bools, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The vector as tensors of these shapes, in the order of `shapes`."""
    tensors, start = {}, 0
    for name in sorted(shapes):
        end = start + prod(shapes[name])
        tensors[name], start = torch.from_numpy(flat[start:end]).view(tuple(shapes[name])), end
    return {name: tensors[name] for name in shapes}


def all_of(flat: Floats, shapes: Mapping[str, Sequence[int]]) -> Update:
    """A received update in which every element counts, those that are zero too."""
    if not np.isfinite(flat).all():
        raise PayloadError("the payload holds a value that is not finite")
    return with_full_mask(Update(unflatten(flat, shapes), {}))
