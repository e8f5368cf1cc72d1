"""`ElasticModel`: any nn.Module that can be sorted, shrunk to any width, and merged again.

BatchNorm statistics are never sent or averaged: a sub-model's activations have other means and
variances than the full model's. Devices train on batch statistics; a model that is used for
inference is recalibrated on a few batches first (docs/decisions/0003).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from anycostfl.coupling.atoms import Reason
from anycostfl.coupling.result import Coupling
from anycostfl.coupling.tracer import evaluation
from anycostfl.data.samples import Tree, call
from anycostfl.errors import CalibrationError, ShapeMismatchError, TraceError, UnknownNameError
from anycostfl.shrink.cut import Order, permute, permute_in_place, sorting_order
from anycostfl.shrink.verify import verified_spec
from anycostfl.shrink.widths import RULES, Shapes, Ties, WidthPlan, WidthPlanner, put, take
from anycostfl.state import State, Update, tensors_of


@dataclass(frozen=True, slots=True, eq=False)
class SubModel:
    """A narrower copy of a model, and the plan of the part of the global model that it holds."""

    module: nn.Module
    plan: WidthPlan


def size_bits(module: nn.Module) -> int:
    """32 bits for every trained element."""
    return 32 * sum(p.numel() for p in module.parameters() if p.requires_grad)


class ElasticModel:
    """The server's model: holds the global weights and creates sub-models of any width.

    The module is traced once on the example inputs (batch first). `rule` chooses widths: "sqrt" as
    in the paper, "fast" or "even" for widths whose training time falls with α (`shrink.widths`).
    `freeze` and `keep` are patterns of tensor names (`encoder.*`): those tensors are neither sorted
    nor cut, and frozen ones are not trained and so not sent either. `freeze=True` means the
    parameters that require no gradient; without it, those are cut like all others.

    `coupling` holds the groups of channels, pins with reasons, and FLOPs as a function of widths;
    `tied_widths` the groups whose widths are tied (most stand alone).

    Names, shapes and plans are resolved once. The tensors themselves are looked up on every use,
    since `module.to(...)` replaces buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        *example_inputs: Any,
        rule: str = "sqrt",
        freeze: Sequence[str] | bool = (),
        keep: Sequence[str] = (),
        **named_inputs: Any,
    ) -> None:
        if rule not in RULES:
            raise UnknownNameError(f"no width rule {rule!r}; there are {', '.join(RULES)}")
        inputs = _by_position(module, example_inputs, named_inputs)
        if not inputs:
            raise TraceError("an example input is needed: ElasticModel(module, torch.randn(2, …))")
        self.module = module
        self.rule = rule
        whole = _whole(module, freeze, keep)
        self._spec = verified_spec(module, tree_map(_at_least_two, inputs), whole)
        self.coupling: Coupling = self._spec.coupling
        self.tied_widths: Ties = self._spec.ties
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(module).items()}
        self._planner = WidthPlanner(self.coupling, self.tied_widths, self._shapes, rule)
        self._blocks = _input_blocks(self.coupling, self._shapes)

    @property
    def rewritten(self) -> bool:
        """Whether sub-models replace sizes in the model's code by those of their widths."""
        return self._spec.rewritten

    @property
    def size_bits(self) -> int:
        """S of the paper: the size of an uncompressed update."""
        return size_bits(self.module)

    @property
    def training_flops(self) -> float:
        """FLOPs of one training step per sample, at full width."""
        return self.coupling.full_flops

    @property
    def trained_names(self) -> tuple[str, ...]:
        """The parameters that are trained: the tensors of an update."""
        return tuple(name for name, p in self.module.named_parameters() if p.requires_grad)

    def own_names(self) -> list[str]:
        """Every tensor once, under its first name."""
        return [name for name, first in self.coupling.aliases.items() if name == first]

    def blocks(self) -> dict[str, int]:
        """For every matrix whose inputs come in blocks: how many one channel owns (after flatten).

        The codec keeps or drops such a block as one kernel, like a kernel of a convolution.
        """
        return dict(self._blocks)

    def sort_channels(self) -> Order:
        """Put important channels first (Sec. III-B.1); returns the order, for other state."""
        state = tensors_of(self.module)
        order = sorting_order(self.coupling, state)
        permute_in_place(self.coupling, state, order)
        return order

    def sorting_order(self, state: State) -> Order:
        """The order that puts the important channels of a state first (Sec. III-B.1)."""
        return sorting_order(self.coupling, state)

    def permute(self, state: State, order: Order) -> dict[str, Tensor]:
        """Permute a state in global coordinates (momentum, residuals) by the same order."""
        self._check(state, self._shapes)
        return permute(self.coupling, state, order)

    def plan(self, alpha: float) -> WidthPlan:
        """Plan what a sub-model of factor α keeps."""
        return self._planner.plan(alpha)

    def bytes_of(self, plan: WidthPlan) -> int:
        """The size of an uncompressed sub-model."""
        state = tensors_of(self.module)
        return sum(prod(plan.shapes[n]) * state[n].element_size() for n in self.own_names())

    def shrink(self, alpha: float) -> SubModel:
        """Cut a dense nn.Module of factor α with the same state_dict keys (Sec. III-B.2)."""
        plan = self.plan(alpha)
        return SubModel(self._spec.build(plan.widths, plan.index), plan)

    def take(self, state: State, plan: WidthPlan) -> dict[str, Tensor]:
        """Return the part of a global state that a sub-model holds; views where possible."""
        return {name: take(tensor, plan.index[name]) for name, tensor in state.items()}

    def scatter(self, update: State, plan: WidthPlan) -> Update:
        """A sub-model's update in global coordinates: its values, zero elsewhere, and the mask."""
        self._check(update, plan.shapes)
        values = {n: u.new_zeros(self._shapes[n]) for n, u in update.items()}
        masks = {n: torch.zeros(self._shapes[n], dtype=torch.bool) for n in update}
        for name, part in update.items():
            put(values[name], plan.index[name], part)
            put(masks[name], plan.index[name], torch.ones_like(part, dtype=torch.bool))
        return Update(values, masks)

    def load(self, state: State) -> None:
        """Replace the global weights, all or none; buffers may be left out.

        Of a tensor with several names, the value under the first one counts, as in updates.
        """
        self._check(state, self._shapes)
        own = tensors_of(self.module)
        with torch.no_grad():
            for name, tensor in state.items():
                first = self.coupling.aliases[name]
                if name == first or first not in state:
                    own[name].copy_(tensor)

    def _check(self, state: State, shapes: Shapes) -> None:
        """Every trained parameter must be there; every tensor must have its shape."""
        problems = [f"{name} is missing" for name in self.trained_names if name not in state]
        problems += [f"{name} is not part of the model" for name in state if name not in shapes]
        problems += [
            f"{name} has shape {tuple(tensor.shape)} instead of {tuple(shapes[name])}"
            for name, tensor in state.items()
            if name in shapes and tuple(tensor.shape) != tuple(shapes[name])
        ]
        if problems:
            raise ShapeMismatchError("this state does not fit the model: " + "; ".join(problems))


FROZEN = Reason("freeze", "", "is frozen")
KEPT = Reason("keep", "", "is kept whole")


def _whole(
    module: nn.Module, freeze: Sequence[str] | bool, keep: Sequence[str]
) -> dict[str, Reason]:
    """The tensors that stay whole, and why; those to freeze no longer require a gradient."""
    tensors = tensors_of(module)
    if isinstance(freeze, bool):
        fixed = [
            n for n, p in tensors.items() if isinstance(p, nn.Parameter) and not p.requires_grad
        ]
        frozen = fixed if freeze else []
    else:
        frozen = _matching(tensors, freeze, "freeze")
    for name in frozen:
        tensors[name].requires_grad_(False)
    kept = _matching(tensors, keep, "keep")
    return {**dict.fromkeys(kept, KEPT), **dict.fromkeys(frozen, FROZEN)}


def _matching(tensors: State, patterns: Sequence[str], argument: str) -> list[str]:
    """The names that a pattern matches; a pattern that matches none is a mistake."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    for pattern in patterns:
        if not any(map(partial(fnmatchcase, pat=pattern), tensors)):
            some = ", ".join(list(tensors)[:3])
            raise UnknownNameError(
                f"{argument}: no tensor matches {pattern!r}; give patterns of names such as {some}"
            )
    return [name for name in tensors if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _input_blocks(coupling: Coupling, shapes: Shapes) -> dict[str, int]:
    """The matrices in which every input channel owns several consecutive columns."""
    return {
        slot.tensor: slot.owned
        for group in coupling.groups
        for slot in group.slots
        if len(shapes[slot.tensor]) == 2 and slot.dim == 1 and slot.owned > 1
        if (np.diff(slot.index, axis=1) == 1).all()
    }


def _by_position(module: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """The example inputs as the module's forward takes them by position."""
    if not named:
        return list(inputs)
    try:
        bound = inspect.signature(module.forward).bind(*inputs, **named)
    except TypeError as error:
        raise TraceError(f"the model does not take these inputs: {error}") from error
    if bound.kwargs:
        raise TraceError(f"{', '.join(bound.kwargs)}: must be inputs that have a position")
    given = len(bound.arguments)
    bound.apply_defaults()  # of inputs between those that are given
    last = max(i for i, name in enumerate(bound.arguments) if name in named or i < len(inputs))
    return list(bound.args[: max(last + 1, given)])


def _at_least_two(example: Any) -> Any:
    """Repeat a batch of one: a dimension of size one would hide structure."""
    if isinstance(example, Tensor) and example.dim() and example.shape[0] == 1:
        return example.repeat(2, *(1 for _ in example.shape[1:]))
    return example


# --- BatchNorm statistics ---------------------------------------------------------------------

RECALIBRATION_SAMPLES = 1024


def recalibrate(module: nn.Module, batches: Iterable[Tree]) -> None:
    """Set every BatchNorm's running statistics to their average over these batches, in place."""
    norms = [
        m
        for m in module.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    ]
    if not norms:
        return
    first = next(remaining := iter(batches), None)
    if first is None:
        raise CalibrationError(
            "no batch was given to measure BatchNorm statistics on; give at least one "
            "(an exhausted generator yields none)"
        )
    with evaluation(module), _plain_average(norms):  # dropout stays off
        for batch in chain([first], remaining):
            call(module, batch)


@contextmanager
def _plain_average(norms: Sequence[nn.modules.batchnorm._BatchNorm]) -> Iterator[None]:
    """Reset the statistics and average all batches equally."""
    momenta = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
            norm.train()
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def calibration_batches(inputs: Tree) -> Iterator[Tree]:
    """The training samples on which BatchNorm statistics are measured (docs/decisions/0003).

    They are drawn with a fixed seed: in a file sorted by class, the first samples are all of one
    class. A last batch of one is left out: it has no variance.
    """
    count = len(tree_leaves(inputs)[0])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    batches = torch.split(order[:RECALIBRATION_SAMPLES], 128)
    for batch in batches:
        if len(batch) > 1 or len(batches) == 1:
            yield tree_map(partial(_pick, batch), inputs)


def _pick(index: Tensor, leaf: Tensor) -> Tensor:
    return leaf[index.to(leaf.device)]
