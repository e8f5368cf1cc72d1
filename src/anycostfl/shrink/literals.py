"""Literal sizes in a model's forward (`x.view(-1, 1024)`), rewritten for a sub-model.

If such literals break a cut model, its forward is captured as a torch.fx graph and each literal is
replaced by the size that the trace predicts. The result is still an nn.Module with the same
parameters under the same names.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stderr
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from anycostfl.coupling import trace
from anycostfl.coupling.result import Coupling
from anycostfl.coupling.tracer import evaluation
from anycostfl.state import tensors_of

Sizes = Mapping[str, Sequence[int]]


def as_graph(model: nn.Module, inputs: Sequence[Any]) -> fx.GraphModule | None:
    """Capture the model's forward as a graph; None if the graph would be another model."""
    mode = model.training
    try:
        training, evaluating = (fx.symbolic_trace(model.train(flag)) for flag in (True, False))
    except Exception:
        return None
    finally:
        model.train(mode)
    same_code = training.code == evaluating.code  # else the graph would fix the mode
    same_names = _names(training) == _names(model)
    training.train(mode)
    return training if same_code and same_names and _agree(model, training, inputs) else None


def _names(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names of saved tensors and of all tensors: a graph saves every buffer."""
    return list(model.state_dict()), list(tensors_of(model))


def _agree(model: nn.Module, graph: nn.Module, inputs: Sequence[Any]) -> bool:
    """Whether both return the same: capture treats None as a tensor and ignores hooks."""
    try:
        with silent(), evaluation(model), evaluation(graph):
            ours, theirs = tree_leaves(model(*inputs)), tree_leaves(graph(*inputs))
    except Exception:
        return False
    return len(ours) == len(theirs) and all(map(_same, ours, theirs))


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def silent() -> AbstractContextManager[object]:
    """Discard stderr: a captured graph prints where it failed before it raises."""
    return redirect_stderr(io.StringIO())


def trace_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Coupling:
    """Trace a graph and watch the tensor that each of its nodes returns."""
    interpreter = fx.Interpreter(graph, garbage_collect_values=False)

    def watch() -> dict[str, Tensor]:
        firsts = {n.name: v[0] if isinstance(v, tuple) else v for n, v in interpreter.env.items()}
        return {name: v for name, v in firsts.items() if isinstance(v, Tensor)}

    return trace(graph, inputs, forward=interpreter.run, watch=watch)


def rewrite(graph: fx.GraphModule, sizes: Sizes) -> None:
    """Replace literal sizes by those that each node should return, in place."""
    for node in graph.graph.nodes:
        shape = sizes.get(node.name)
        if shape is not None and node.target in SHAPED:
            node.args, node.kwargs = SHAPED[node.target](node, shape)
    graph.recompile()


def _reshaped(node: fx.Node, shape: Sequence[int]) -> tuple[Any, Any]:
    """view(2, 8), view((2, 8)), reshape(x, (2, 8)): literals in order, -1 stays."""
    tensor, *dims = node.args
    nested = dims[0] if dims and isinstance(dims[0], tuple | list) else None
    old = dims if nested is None else list(nested)
    if len(old) != len(shape):
        return node.args, node.kwargs
    new = [s if isinstance(d, int) and d >= 0 else d for d, s in zip(old, shape, strict=True)]
    return (tensor, *new) if nested is None else (tensor, tuple(new)), node.kwargs


def _split(node: fx.Node, shape: Sequence[int]) -> tuple[Any, Any]:
    """split(x, 64, dim): the size of the first part."""
    tensor, size, *rest = node.args
    dim = node.kwargs.get("dim", rest[0] if rest else 0)
    if not isinstance(size, int) or not isinstance(dim, int):
        return node.args, node.kwargs
    return (tensor, shape[dim], *rest), node.kwargs


def _normalised(node: fx.Node, shape: Sequence[int]) -> tuple[Any, Any]:
    """layer_norm(x, (64,)): the trailing dimensions."""
    kwargs = dict(node.kwargs)
    given = kwargs.get("normalized_shape", node.args[1] if len(node.args) > 1 else None)
    if not isinstance(given, tuple | list):
        return node.args, node.kwargs
    new = tuple(shape[len(shape) - len(given) :])
    if "normalized_shape" in kwargs:
        return node.args, {**kwargs, "normalized_shape": new}
    return (node.args[0], new, *node.args[2:]), kwargs


SHAPED: dict[Any, Any] = {
    **dict.fromkeys(("view", "reshape", "expand", torch.reshape), _reshaped),
    **dict.fromkeys(("split", torch.split), _split),
    F.layer_norm: _normalised,
}
"""Graph nodes that take sizes, by target."""
