"""Named tensors: a model's state, and an update of it with its mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

State = Mapping[str, Tensor]
"""Tensors by parameter or buffer name."""


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """A decoded update ũ and its mask m: both by parameter name, values 0 outside the mask."""

    values: dict[str, Tensor]
    masks: dict[str, Tensor]


def with_full_mask(update: Update) -> Update:
    """The same values with a mask that is true everywhere: zeros count as zeros."""
    masks = {name: torch.ones(v.shape, dtype=torch.bool) for name, v in update.values.items()}
    return Update(update.values, masks)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name; shared ones appear under each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def clone_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's tensors as they are now."""
    return {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
