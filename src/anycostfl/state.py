"""What is passed around: the state of a model, an update to it, samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

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


# --- samples --------------------------------------------------------------------------------------

Tree = Any
"""A tensor, or a tuple or dict of trees."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Inputs and targets, and the number of each sample's owner where it is known."""

    inputs: Tree
    targets: Tree
    owners: Tensor | None = None

    def __len__(self) -> int:
        return len(tree_leaves(self.inputs)[0])

    def take(self, index: Tensor | slice) -> Samples:
        """Some of the samples, in this order."""
        return self.map(lambda tensor: tensor[index])

    def map(self, how: Callable[[Tensor], Tensor]) -> Samples:
        """The samples with every tensor converted."""
        owners = None if self.owners is None else how(self.owners)
        return Samples(tree_map(how, self.inputs), tree_map(how, self.targets), owners)

    def tensors(self) -> list[Tensor]:
        """Every tensor."""
        owned = [] if self.owners is None else [self.owners]
        return [*tree_leaves(self.inputs), *tree_leaves(self.targets), *owned]


def call(module: nn.Module, inputs: Tree) -> Tree:
    """The module's outputs: several inputs are passed by position, a dict of them by name."""
    if isinstance(inputs, Tensor):
        return module(inputs)
    return module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)
