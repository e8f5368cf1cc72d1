"""One eager forward pass in which every tensor dimension carries the atoms of its channels.

A `TorchDispatchMode` sits below autograd and above the kernels, so it sees every operation of any
model: no graph capture, no limits on control flow. `rules.py` defines what each operation does to
labels; an operation without a rule pins every channel it sees, which is always correct.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anycostfl.coupling.atoms import AtomClasses, Atoms, Label, Reason
from anycostfl.coupling.sizes import FAMILIES, Counted, Place, SizeArguments, place_of_call

Labels = tuple[Label, ...]


def tensors_in(tree: Any) -> list[Tensor]:
    """Return every tensor in nested tuples, lists and dicts."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


@dataclass(frozen=True, slots=True)
class Call:
    """One operation as seen by the tracer, its arguments bound to their names in the schema."""

    name: str
    arguments: dict[str, Any]
    inputs: list[Tensor]  # every tensor among the arguments
    outputs: list[Tensor]
    labels: list[Label]  # of the first input; a rule may change them
    pointwise: bool

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
"""Operations that select by literal positions, which may be wrong in a narrower copy."""

RESHAPES = {"view", "reshape", "unflatten"}
"""Functions that take literal sizes; watched as Python calls, since one may be two operations."""


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """Several channel dimensions flattened into one, which has atoms of its own.

    As long as every operation treats them all alike, the dimensions stay free, if no more than one
    of them can move at all. Otherwise only the last may move.
    """

    atoms: Atoms
    parts: tuple[Label, ...]
    sizes: tuple[int, ...]
    reason: Reason

    def along(self, part: int) -> Atoms:
        """Which atom of a part lies where."""
        inner, outer = math.prod(self.sizes[part + 1 :]), math.prod(self.sizes[:part])
        label = self.parts[part]
        return np.tile(np.repeat(np.empty(0, np.int64) if label is None else label, inner), outer)

    @property
    def last(self) -> int:
        """The last part that carries channels."""
        return max(k for k, label in enumerate(self.parts) if label is not None)


@dataclass(frozen=True, slots=True)
class Frame:
    """A module that is running, and how often each place in its code was passed."""

    name: str
    module: nn.Module
    visits: Counter[Place] = field(default_factory=Counter)


SiteKey = tuple[str, Place, int]
"""The module that was running, the call in its code, and how often it had been passed."""


@dataclass(frozen=True, slots=True)
class SizesTaken:
    """The sizes that one call was given, and the channels that each counts."""

    sizes: tuple[Any, ...]
    counted: tuple[Counted, ...]


@dataclass(frozen=True, slots=True)
class Observed:
    """The shapes and labels that a module call, or an operation by position in it, returned."""

    module: str
    shapes: tuple[tuple[int, ...], ...]
    labels: tuple[Labels, ...]


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Records what every module call and every operation by position returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stack: list[Frame] = []  # the modules that are running
        self.outputs: list[Observed] = []

    def labels(self, tensor: Tensor) -> Labels:
        """The labels of a tensor; a plain observer has none."""
        return (None,) * tensor.dim()

    @property
    def where(self) -> str:
        """The name of the module that is running."""
        return self.stack[-1].name if self.stack else ""

    def observe(self, module: str, result: Any) -> None:
        """Record a result."""
        tensors = tensors_in(result)
        shapes = tuple(tuple(x.shape) for x in tensors)
        self.outputs.append(Observed(module, shapes, tuple(map(self.labels, tensors))))

    def seen(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Called after every operation."""

    def took_sizes(self, place: Place, given: SizeArguments, counted: list[Counted]) -> None:
        """Called after every function that takes sizes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler (two seconds) only to skip this class."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # signature fixed by torch
        """Run the operation, then record it."""
        del types
        result = func(*args, **(kwargs or {}))
        self.seen(func, args, kwargs or {}, result)
        if func.overloadpacket.__name__ in BY_POSITION:
            self.observe(self.where, result)
        return result


Results = Sequence[Sequence[Label]]
"""The labels of each output of a call."""

Rule = Callable[["Tracer", Call], Results]


class Tracer(Observer):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Propagates labels through every operation; see the module docstring."""

    def __init__(self, rules: dict[str, Rule], fallback: Rule) -> None:
        super().__init__()
        self.classes = AtomClasses()
        self.products: list[Product] = []
        self.producers: list[Label] = []
        self.samples = 1
        self.used: set[int] = set()  # ids of tensors that an operation took
        self.trained: set[int] = set()  # ids of tensors whose gradient a training step needs
        self._rules = rules
        self._fallback = fallback
        self._labels: dict[int, Labels] = {}
        self._data: set[int] = set()
        self._base: list[Tensor] = []  # ids are unique only while their tensors are alive
        self._alive: dict[int, Tensor] = {}
        self.sites: dict[SiteKey, SizesTaken] = {}
        self._merged: dict[int, Merged] = {}  # by their first atom

    def labels(self, tensor: Tensor) -> Labels:
        """The labels of a tensor; data and constants have none."""
        return self._labels.get(id(tensor), (None,) * tensor.dim())

    def assign(self, tensor: Tensor, labels: Sequence[Label]) -> None:
        """Attach labels to a result; a dimension of size one has no channels to exchange.

        The signature of a channel that was selected alone changes all the same: it is unlike the
        others.
        """
        self.classes.touch(labels)
        self._labels[id(tensor)] = tuple(
            None if n == 1 else label for n, label in zip(tensor.shape, labels, strict=True)
        )
        self._alive[id(tensor)] = tensor

    def enter(self, tensor: Tensor) -> None:
        """Give a parameter, buffer or constant fresh atoms along every dimension."""
        self.assign(tensor, [self.classes.new(n) for n in tensor.shape])
        self._base.append(tensor)
        if tensor.requires_grad:
            self.trained.add(id(tensor))

    def enter_data(self, tensor: Tensor) -> None:
        """Register an input of the model; the first one sets the batch size."""
        self.samples = tensor.shape[0] if tensor.dim() and not self._data else self.samples
        self._data.add(id(tensor))
        self._base.append(tensor)

    def forget_results(self) -> None:
        """Let go of what one run computed, to save its memory, unless the model remembers it."""
        alone = {0: torch.empty(0)}
        only_here = next(sys.getrefcount(t) for t in alone.values())
        self._alive = {k: t for k, t in self._alive.items() if sys.getrefcount(t) > only_here}
        kept = {*map(id, self._base), *self._alive}
        self._labels = {key: labels for key, labels in self._labels.items() if key in kept}
        self._data &= kept
        self.trained &= kept

    def took_sizes(self, place: Place, given: SizeArguments, counted: list[Counted]) -> None:
        """Remember what the sizes count; the first of several runs decides."""
        if not self.stack:
            return
        visit = self.stack[-1].visits[place]
        self.stack[-1].visits[place] += 1
        if all(label is None for label in counted):
            return
        taken = SizesTaken(tuple(given.sizes), tuple(counted))
        self.sites.setdefault((self.where, place, visit), taken)

    def pin(self, call: Call, labels: Sequence[Label], why: str) -> None:
        """Pin these dimensions; the reason names the operation and the module that is running."""
        for label in labels:
            self.classes.pin(label, Reason(call.name, self.where, why))

    def unite(self, call: Call, labels: Sequence[Label]) -> Label:
        """Join dimensions that an operation aligns; pin them if one carries no channels."""
        from_data = any(id(x) in self._data for x in call.inputs)
        why = "meets the model's input" if from_data else "meets a dimension that cannot shrink"
        return self.classes.unite(labels, Reason(call.name, self.where, why))

    def merge(self, call: Call, parts: Sequence[Label], sizes: Sequence[int]) -> Atoms:
        """Give flattened dimensions atoms of their own; see `Merged`."""
        atoms = self.classes.new(math.prod(sizes))
        reason = Reason(call.name, self.where, "merges two channel dimensions")
        self._merged[int(atoms[0])] = Merged(atoms, tuple(parts), tuple(sizes), reason)
        return atoms

    def unmerge(self, atoms: Atoms, sizes: Sequence[int]) -> Atoms | tuple[Label, ...]:
        """The dimensions that were flattened, if these are their sizes; else one that may move."""
        merged = self._merged.get(int(atoms[0]))
        if merged is None or len(atoms) != len(merged.atoms):
            return atoms
        if tuple(sizes) == merged.sizes:
            return merged.parts
        self._resolve(merged)
        return merged.along(merged.last)

    def _resolve(self, merged: Merged) -> None:
        """Pin all merged dimensions but the last."""
        del self._merged[int(merged.atoms[0])]
        for label in merged.parts[: merged.last]:
            self.classes.pin(label, merged.reason)
        self.classes.join(merged.atoms, merged.along(merged.last))

    def resolve_merged(self) -> dict[int, Atoms]:
        """Resolve every merged dimension that cannot stay as it is.

        Of the others, by their first atom: the atoms of the one part that can move.
        """
        while True:
            alone, pinned = self.classes.alone(), self.classes.pinned_atoms()
            free = {
                key: [k for k, p in enumerate(m.parts) if p is not None and not pinned[p].all()]
                for key, m in self._merged.items()
            }
            spoilt = [
                merged
                for key, merged in self._merged.items()
                if len(free[key]) > 1
                or not (alone[merged.atoms].all() and self.classes.alike(merged.atoms))
            ]
            if not spoilt:
                return {key: self._merged[key].along(k[0]) for key, k in free.items() if k}
            for merged in spoilt:
                self._resolve(merged)

    def seen(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Let the operation's rule label its results."""
        bound = {
            a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
            for i, a in enumerate(func._schema.arguments)
        }
        name = func.overloadpacket.__name__
        inputs, outputs = tensors_in(bound), tensors_in(result)
        self.used.update(map(id, inputs))
        if any(id(x) in self.trained for x in inputs):
            self.trained.update(map(id, outputs))
        if inputs and all(id(x) in self._data for x in inputs):
            self._data.update(map(id, outputs))
        labels = list(self.labels(inputs[0])) if inputs else []
        call = Call(name, bound, inputs, outputs, labels, torch.Tag.pointwise in func.tags)
        rule = self._rules.get(name, self._fallback)
        for tensor, found in zip(outputs, rule(self, call), strict=False):
            self.assign(tensor, found)


class _Functions(TorchFunctionMode):
    """Shows an observer every reshape and every size that a function is given."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # signature fixed by torch
        """Run the function."""
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        family = FAMILIES.get(name)
        if family is None:
            return func(*args, **kwargs)
        given = family.read(func, args, kwargs)
        result = func(*args, **kwargs)
        counted = family.count(given, args, result, self._observer.labels)
        self._observer.took_sizes(place_of_call(sys._getframe(1)), given, counted)
        if name in RESHAPES:
            self._observer.observe(self._observer.where, result)
        return result


@contextmanager
def follow(model: nn.Module, observer: Observer) -> Iterator[None]:
    """Tell the observer which module is running, and what modules and reshapes return."""

    def enter(name: str) -> Callable[..., None]:
        return lambda module, _: observer.stack.append(Frame(name, module))

    def leave(_module: nn.Module, _args: Any, result: Any) -> None:
        observer.observe(observer.stack.pop().name, result)

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave))
    try:
        with _Functions(observer):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluation(model: nn.Module, *, plain: bool = False) -> Iterator[None]:
    """Switch to evaluation mode without gradients; the previous modes are restored.

    The attention fast path is off, since it bypasses the modules inside. `plain` also turns mkldnn
    off, whose fused kernels hide the operations of a recurrent layer.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with _mode(model, training=False, plain=plain):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextmanager
def train_mode(model: nn.Module, *, plain: bool = False) -> Iterator[None]:
    """Switch to training mode without gradients; modes, buffers and random state are restored."""
    buffers = [(b, b.clone()) for b in model.buffers()]
    try:
        with _mode(model, training=True, plain=plain), torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # an expanded buffer cannot be written to
                    buffer.copy_(before)


@contextmanager
def _mode(model: nn.Module, *, training: bool, plain: bool) -> Iterator[None]:
    modes = [(m, m.training) for m in model.modules()]
    mkldnn = torch._C._get_mkldnn_enabled()
    try:
        model.train(training)
        torch._C._set_mkldnn_enabled(mkldnn and not plain)
        with torch.no_grad():
            yield
    finally:
        torch._C._set_mkldnn_enabled(mkldnn)
        for module, before in modes:
            module.training = before
