"""One eager forward pass under which every tensor dimension carries the atoms of its channels.

A `TorchDispatchMode` sits below autograd and above the kernels, so it sees every operation of any
model: no graph capture, no limits on control flow. `rules.py` says what each operation does to
labels; an operation without a rule pins every channel it sees, so it stays correct.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anycostfl.coupling.atoms import AtomClasses, Label, Reason

Labels = tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One operation as seen by the tracer, its arguments bound to their names in the schema."""

    name: str
    arguments: dict[str, Any]
    result: Any
    pointwise: bool

    @property
    def inputs(self) -> list[Tensor]:
        """Every tensor among the arguments."""
        return [x for x in tree_leaves(self.arguments) if isinstance(x, Tensor)]

    @property
    def outputs(self) -> list[Tensor]:
        """Every tensor among the results."""
        return [x for x in tree_leaves(self.result) if isinstance(x, Tensor)]

    def dim(self, name: str = "dim") -> int:
        """A dimension argument, counted from the front of the first tensor argument."""
        value: int = self.arguments[name]
        return value % self.inputs[0].dim()


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product or convolution, for counting: 2 · fixed · Π sizes FLOPs forward.

    `passes` is 1 for the forward pass plus 1 for each operand whose gradient is needed.
    """

    fixed: int
    sizes: tuple[tuple[int, Label], ...]
    passes: int


@dataclass(frozen=True, slots=True)
class ModuleOutput:
    """The shapes and labels that one module call returned."""

    module: str
    shapes: tuple[tuple[int, ...], ...]
    labels: tuple[Labels, ...]


Rule = Callable[["Tracer", Call], None]


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Carries labels through every operation; see the module docstring."""

    def __init__(self, rules: dict[str, Rule], fallback: Rule) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.classes = AtomClasses()
        self.products: list[Product] = []
        self.producers: list[Label] = []
        self.outputs: list[ModuleOutput] = []
        self.stack: list[str] = []
        self.samples = 1
        self.used: set[int] = set()
        self._rules = rules
        self._fallback = fallback
        self._labels: dict[int, Labels] = {}
        self._trained: set[int] = set()
        self._data: set[int] = set()
        self._alive: list[Tensor] = []  # ids stay unique while their tensors live

    def labels(self, tensor: Tensor) -> Labels:
        """The labels of a tensor; data and constants have none."""
        return self._labels.get(id(tensor), (None,) * tensor.dim())

    def assign(self, tensor: Tensor, labels: Sequence[Label]) -> None:
        """Attach labels to a result. A dimension of size one has nothing to exchange."""
        kept = tuple(
            None if n == 1 else label for n, label in zip(tensor.shape, labels, strict=True)
        )
        self._labels[id(tensor)] = kept
        self._alive.append(tensor)
        self.classes.touch(kept)

    def enter(self, tensor: Tensor) -> None:
        """Give a parameter, buffer or constant fresh atoms along every dimension."""
        self.assign(tensor, [self.classes.new(n) for n in tensor.shape])
        if tensor.requires_grad:
            self._trained.add(id(tensor))

    def enter_data(self, tensor: Tensor) -> None:
        """Remember an input of the model: its batch size, and its name where it pins something."""
        self.samples = tensor.shape[0] if tensor.dim() and not self._data else self.samples
        self._data.add(id(tensor))
        self._alive.append(tensor)

    def trained(self, tensor: Tensor) -> bool:
        """Whether a training step needs the gradient of this tensor."""
        return id(tensor) in self._trained

    def reason(self, call: Call, why: str) -> Reason:
        """A reason located in the module that is running."""
        return Reason(call.name, self.stack[-1] if self.stack else "", why)

    def misfit(self, call: Call) -> Reason:
        """The reason for pinning what an operation aligns with a dimension without channels."""
        if any(id(x) in self._data for x in call.inputs):
            return self.reason(call, "meets the model's input")
        return self.reason(call, "meets a dimension that cannot shrink")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare torch from loading its compiler (two seconds) only to leave this class alone."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # signature fixed by torch
        """Run the operation, then let its rule label the result."""
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        bound = {
            a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
            for i, a in enumerate(func._schema.arguments)
        }
        name = func.overloadpacket.__name__
        self.used.update(id(x) for x in tree_leaves(bound) if isinstance(x, Tensor))
        call = Call(name, bound, result, torch.Tag.pointwise in func.tags)
        if any(self.trained(x) for x in call.inputs):
            self._trained.update(id(x) for x in call.outputs)
        if call.inputs and all(id(x) in self._data for x in call.inputs):
            self._data.update(id(x) for x in call.outputs)
        rule = self._rules.get(name, self._fallback)
        rule(self, call)
        return result


@contextmanager
def follow(model: nn.Module, tracer: Tracer) -> Iterator[None]:
    """Tell the tracer which module is running and what each one returned."""

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: tracer.stack.append(name)

    def leave(_module: nn.Module, _args: Any, result: Any) -> None:
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        shapes = tuple(tuple(x.shape) for x in tensors)
        labels = tuple(tracer.labels(x) for x in tensors)
        tracer.outputs.append(ModuleOutput(tracer.stack.pop(), shapes, labels))

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluation(model: nn.Module, *, plain: bool = False) -> Iterator[None]:
    """Evaluation mode without gradients, put back afterwards.

    Attention's fast path is off, for it passes by the modules inside. `plain` turns mkldnn off
    too, whose fused kernels hide what a recurrent layer is made of.
    """
    modes = [(m, m.training) for m in model.modules()]
    mkldnn = torch._C._get_mkldnn_enabled()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        model.eval()
        torch._C._set_mkldnn_enabled(mkldnn and not plain)
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        torch._C._set_mkldnn_enabled(mkldnn)
        torch.backends.mha.set_fastpath_enabled(fast_path)
