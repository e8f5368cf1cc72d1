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
from torch.overrides import TorchFunctionMode
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


BY_POSITION = {"slice", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"}
"""Operations that take a part by numbers, which a narrower copy may get wrong without an error."""

RESHAPES = {"view", "reshape", "unflatten"}
"""The same for sizes, as a model calls them: one call is one operation or two, by memory layout."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The shapes and labels that a module call, or an operation by position in it, returned."""

    module: str
    shapes: tuple[tuple[int, ...], ...]
    labels: tuple[Labels, ...]


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Notes what every module call and every operation by position returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stack: list[tuple[str, nn.Module]] = []  # the modules that are running
        self.outputs: list[Observed] = []

    def labels(self, tensor: Tensor) -> Labels:
        """The labels of a tensor; without a trace it has none."""
        return (None,) * tensor.dim()

    @property
    def where(self) -> str:
        """The name of the module that is running."""
        return self.stack[-1][0] if self.stack else ""

    def observe(self, module: str, result: Any) -> None:
        """Note a result."""
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        shapes = tuple(tuple(x.shape) for x in tensors)
        self.outputs.append(Observed(module, shapes, tuple(map(self.labels, tensors))))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare torch from loading its compiler (two seconds) only to leave this class alone."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # signature fixed by torch
        """Run the operation."""
        del types
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in BY_POSITION:
            self.observe(self.where, result)
        return result


Rule = Callable[["Tracer", Call], None]


class Tracer(Observer):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Carries labels through every operation; see the module docstring."""

    def __init__(self, rules: dict[str, Rule], fallback: Rule) -> None:
        super().__init__()
        self.classes = AtomClasses()
        self.products: list[Product] = []
        self.producers: list[Label] = []
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
        """Attach labels to a result. A dimension of size one has nothing to exchange.

        A channel that was picked out alone is marked all the same: it is not like the others.
        """
        self.classes.touch(labels)
        self._labels[id(tensor)] = tuple(
            None if n == 1 else label for n, label in zip(tensor.shape, labels, strict=True)
        )
        self._alive.append(tensor)

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
        return Reason(call.name, self.where, why)

    def misfit(self, call: Call) -> Reason:
        """The reason for pinning what an operation aligns with a dimension without channels."""
        if any(id(x) in self._data for x in call.inputs):
            return self.reason(call, "meets the model's input")
        return self.reason(call, "meets a dimension that cannot shrink")

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
        if name in BY_POSITION:
            self.observe(self.where, result)
        return result


class _Reshapes(TorchFunctionMode):
    """Shows every reshape to an observer: `view(b, -1, 8)` makes other heads of fewer channels."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # signature fixed by torch
        """Run the function."""
        del types
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in RESHAPES:
            self._observer.observe(self._observer.where, result)
        return result


@contextmanager
def follow(model: nn.Module, observer: Observer) -> Iterator[None]:
    """Tell the observer which module is running, and what modules and reshapes return."""

    def enter(name: str) -> Callable[..., None]:
        return lambda module, _: observer.stack.append((name, module))

    def leave(_module: nn.Module, _args: Any, result: Any) -> None:
        observer.observe(observer.stack.pop()[0], result)

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave))
    try:
        with _Reshapes(observer):
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
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        with _kernels(plain=plain), torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextmanager
def _kernels(*, plain: bool) -> Iterator[None]:
    """Without mkldnn if plain."""
    mkldnn = torch._C._get_mkldnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(mkldnn and not plain)
        yield
    finally:
        torch._C._set_mkldnn_enabled(mkldnn)


@contextmanager
def practice(model: nn.Module, *, plain: bool = False) -> Iterator[None]:
    """Training mode without gradients; buffers, modes and random numbers are put back."""
    modes = [(m, m.training) for m in model.modules()]
    buffers = [(b, b.clone()) for b in model.buffers()]
    try:
        model.train()
        with _kernels(plain=plain), torch.random.fork_rng(), torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # one that is expanded cannot be written to
                    buffer.copy_(before)
