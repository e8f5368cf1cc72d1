"""Named tensors: the state of a model, and an update to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

State = Mapping[str, Tensor]
"""Tensors by name, as a model, an update or an optimizer holds them."""


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by name; a shared tensor appears under each of its names.

    Do not keep the result: `model.to(...)` and `model.double()` replace buffers.
    """
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def clone_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every parameter and buffer, which later training does not change."""
    return {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """A decoded update ũ and its mask m: both by parameter name, values 0 outside the mask."""

    values: dict[str, Tensor]
    masks: dict[str, Tensor]


def with_full_mask(update: Update) -> Update:
    """Return the same values with a mask that is true everywhere: a zero is a value, too."""
    masks = {name: torch.ones(v.shape, dtype=torch.bool) for name, v in update.values.items()}
    return Update(update.values, masks)
