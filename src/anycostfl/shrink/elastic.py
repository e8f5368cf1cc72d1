"""`ElasticModel`: any nn.Module that can be sorted, shrunk to any width, and put together again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anycostfl.coupling import Coupling, Slot
from anycostfl.errors import ShapeMismatchError, TraceError, UnknownNameError
from anycostfl.shrink.order import Order, permute, permute_in_place, sorting_order
from anycostfl.shrink.verify import verified_recipe
from anycostfl.shrink.widths import RULES, Dial, WidthPlan, make_plan, put, take
from anycostfl.state import Update, tensors_of


@dataclass(frozen=True, slots=True, eq=False)
class SubModel:
    """A narrower copy of a model, and the plan that says which part of the global one it holds."""

    module: nn.Module
    plan: WidthPlan


def size_bits(module: nn.Module) -> int:
    """32 bits for every element that is trained."""
    return 32 * sum(p.numel() for p in module.parameters() if p.requires_grad)


class ElasticModel:
    """The server's model: holds the global weights, hands out sub-models of any width.

    The module is traced once on the example inputs (batch first). `rule` chooses widths: "sqrt" as
    in the paper, "fast" or "even" for widths whose training time falls with α (`shrink.widths`).
    """

    def __init__(self, module: nn.Module, *example_inputs: Any, rule: str = "sqrt") -> None:
        if rule not in RULES:
            raise UnknownNameError(f"no width rule {rule!r}; there are {', '.join(RULES)}")
        if not example_inputs:
            raise TraceError("an example input is needed: ElasticModel(module, torch.randn(2, …))")
        self.module = module
        self.rule = rule
        self._recipe = verified_recipe(module, [_at_least_two(x) for x in example_inputs])

    @property
    def coupling(self) -> Coupling:
        """Groups of channels, what is pinned and why, FLOPs as a function of widths."""
        return self._recipe.coupling

    @property
    def dials(self) -> tuple[Dial, ...]:
        """The groups that turn together, most of them alone."""
        return self._recipe.dials

    @property
    def rewritten(self) -> bool:
        """Whether sub-models come from a captured graph because forward holds literal sizes.

        A graph keeps what Python decided when it was captured: an attribute that is changed later,
        or a layer skipped by `random.random()`, stays as it was.
        """
        return self._recipe.source is not self.module

    @property
    def size_bits(self) -> int:
        """S of the paper: the size of an uncompressed update."""
        return size_bits(self.module)

    @property
    def training_flops(self) -> float:
        """FLOPs of one training step per sample, at full width."""
        return self.coupling.flops(self.coupling.full())

    def sort_channels(self) -> Order:
        """Put important channels first (Sec. III-B.1); returns the order, to move other state."""
        state = tensors_of(self.module)
        order = sorting_order(self.coupling, state)
        permute_in_place(self.coupling, state, order)
        return order

    def sorting_order(self, state: Mapping[str, Tensor]) -> Order:
        """The order that puts the important channels of a state first (Sec. III-B.1)."""
        return sorting_order(self.coupling, state)

    def permute(self, state: Mapping[str, Tensor], order: Order) -> dict[str, Tensor]:
        """Any state in global coordinates (momentum, residuals), moved by the same order."""
        self._check(state, {n: t.shape for n, t in tensors_of(self.module).items()})
        return permute(self.coupling, state, order)

    def plan(self, alpha: float) -> WidthPlan:
        """What a sub-model of factor α keeps."""
        state, rule = tensors_of(self.module), RULES[self.rule]
        return make_plan(self.coupling, self._recipe.dials, state, alpha, rule)

    def own_names(self) -> list[str]:
        """Every tensor under its first name only, tied ones once."""
        return [name for name, first in self.coupling.aliases.items() if name == first]

    def bytes_of(self, plan: WidthPlan) -> int:
        """What a sub-model takes as it is."""
        state = tensors_of(self.module)
        return sum(prod(plan.shapes[n]) * state[n].element_size() for n in self.own_names())

    def blocks(self) -> dict[str, int]:
        """For every matrix whose inputs come in blocks: how many one channel owns (after flatten).

        The codec keeps or drops such a block as one kernel. Convolutions have kernels of their own.
        """
        weights = tensors_of(self.module)
        return {
            slot.tensor: slot.owned
            for group in self.coupling.groups
            for slot in group.slots
            if weights[slot.tensor].dim() == 2
            and slot.dim == 1
            and slot.owned > 1
            and _consecutive(slot)
        }

    def shrink(self, alpha: float) -> SubModel:
        """A smaller dense nn.Module of factor α with the same state_dict keys (Sec. III-B.2)."""
        plan = self.plan(alpha)
        return SubModel(self._recipe.build(plan.widths), plan)

    def take(self, state: Mapping[str, Tensor], plan: WidthPlan) -> dict[str, Tensor]:
        """The part of a global state that a sub-model holds; views wherever possible."""
        return {name: take(tensor, plan.index[name]) for name, tensor in state.items()}

    def scatter(self, update: Mapping[str, Tensor], plan: WidthPlan) -> Update:
        """A sub-model's update in global coordinates: its values, zero elsewhere, and the mask."""
        self._check(update, plan.shapes)
        shapes = {name: tensor.shape for name, tensor in tensors_of(self.module).items()}
        values = {n: u.new_zeros(shapes[n]) for n, u in update.items()}
        masks = {n: torch.zeros(shapes[n], dtype=torch.bool) for n in update}
        for name, part in update.items():
            put(values[name], plan.index[name], part)
            put(masks[name], plan.index[name], torch.ones_like(part, dtype=torch.bool))
        return Update(values, masks)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace the global weights; buffers may be left out. Checked first, then all or none.

        Of a tensor with several names the first one's value counts: updates come under that.
        """
        own = tensors_of(self.module)
        self._check(state, {name: tensor.shape for name, tensor in own.items()})
        with torch.no_grad():
            for name, tensor in state.items():
                first = self.coupling.aliases[name]
                if name == first or first not in state:
                    own[name].copy_(tensor)

    def _check(self, state: Mapping[str, Tensor], shapes: Mapping[str, Iterable[int]]) -> None:
        """What is trained must be there, in its shape; all else may be."""
        needed = [name for name, p in self.module.named_parameters() if p.requires_grad]
        problems = [f"{name} is missing" for name in needed if name not in state]
        problems += [f"{name} is not part of the model" for name in state if name not in shapes]
        problems += [
            f"{name} has shape {tuple(tensor.shape)} instead of {tuple(shapes[name])}"
            for name, tensor in state.items()
            if name in shapes and tuple(tensor.shape) != tuple(shapes[name])
        ]
        if problems:
            raise ShapeMismatchError("this state does not fit the model: " + "; ".join(problems))


def _consecutive(slot: Slot) -> bool:
    return bool((np.diff(slot.index, axis=1) == 1).all())


def _at_least_two(example: Any) -> Any:
    """A batch of one becomes two: dimensions of size one would hide structure."""
    if isinstance(example, Tensor) and example.dim() and example.shape[0] == 1:
        return example.repeat(2, *(1 for _ in example.shape[1:]))
    return example
