"""`anycostfl inspect`: what can shrink in a model, what cannot and why, and what a width saves."""

from __future__ import annotations

import importlib
import os
import sys
from collections import defaultdict
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from typer import Option

from anycostfl import models
from anycostfl.cli._console import Json, emit_json, print_table, say
from anycostfl.coupling.result import Group
from anycostfl.errors import ConfigError, UnknownNameError
from anycostfl.shrink import ElasticModel, SubModel
from anycostfl.shrink.elastic import size_bits
from anycostfl.shrink.widths import regions, take

COSTS = {  # key of the document, digits, unit
    "parameters": ("parameters", ",", 1),
    "update, Mbit": ("update_bits", ".2f", 1e-6),
    "training MFLOP per sample": ("training_flops_per_sample", ".1f", 1e-6),
}


def inspect(
    model: Annotated[str, Option(help=f"{', '.join(models.names())} or package.module:make")],
    alpha: Annotated[float, Option(help="Shrinking factor, in (0, 1]")] = 0.25,
    rule: Annotated[str, Option(help="Widths: sqrt (the paper), fast, even")] = "sqrt",
    shape: Annotated[str, Option("--input", help="Shape of one sample: 3,32,32")] = "",
    json: Json = False,
) -> None:
    """Show which channels of a model shrink together and what a sub-model of factor ALPHA costs."""
    module, example = _load(model, shape)
    net = ElasticModel(module, example, rule=rule)
    document = describe(model, net, net.shrink(alpha))
    if json:
        emit_json(document)
    else:
        _show(document, net)


def _load(model: str, shape: str) -> tuple[nn.Module, Tensor]:
    """A model of this package by name, or a custom one as package.module:callable."""
    path, custom, name = model.partition(":")
    if not custom:
        if shape:
            why = f"{model} brings its own shape; only for package.module:make"
            raise ConfigError([f"--input: given {shape}, but {why}"])
        spec = models.load(model)
        return spec.build(), spec.example(2)
    sys.path.insert(0, os.getcwd())
    try:
        module = getattr(importlib.import_module(path), name)()
    except Exception as error:
        raise UnknownNameError(
            f"cannot load {model!r}: {type(error).__name__}: {error}. Give package.module:make, "
            "where make() needs no arguments and returns an nn.Module"
        ) from error
    if not isinstance(module, nn.Module):
        raise UnknownNameError(f"{model!r} returns {type(module).__name__}, not an nn.Module")
    try:
        return module, torch.randn(2, *(int(n) for n in shape.split(",")))
    except (ValueError, RuntimeError) as error:  # not numbers, or negative
        raise UnknownNameError(
            f"--input {shape!r} is not a shape; give the shape of one sample, such as 3,32,32"
        ) from error


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def describe(name: str, net: ElasticModel, sub: SubModel) -> dict[str, Any]:
    """Everything the tables show, as plain values."""
    plan, flops = sub.plan, net.training_flops
    return {
        "model": name,
        "alpha": plan.alpha,
        "rule": net.rule,
        "literal_sizes_rewritten": net.rewritten,
        "parameters": {"full": _count(net.module), "sub": _count(sub.module)},
        "update_bits": {"full": net.size_bits, "sub": size_bits(sub.module)},
        "training_flops_per_sample": {
            "full": flops,
            "sub": flops * plan.flops_ratio,
            "ratio": plan.flops_ratio,
        },
        "groups": [_describe_group(group, net, sub) for group in net.coupling.groups],
        "unused": list(net.coupling.unused),
        "turn_together": [[name for name, _ in dial.sizes] for dial in net.tied_widths],
        "pinned": [
            {
                "tensor": pin.tensor,
                "dim": pin.dim,
                "positions": pin.positions,
                "operation": pin.reason.operation,
                "module": pin.reason.where,
                "why": pin.reason.why,
            }
            for pin in net.coupling.pins
        ],
    }


def _describe_group(group: Group, net: ElasticModel, sub: SubModel) -> dict[str, Any]:
    """A group of channels, and what removing one of them from the full model saves."""
    narrower = {**net.coupling.full(), group.name: group.size - 1}
    weights = dict(net.module.named_parameters())
    kept = regions(net.coupling, narrower, {n: w.shape for n, w in weights.items()})
    left = sum(take(weight, kept[name]).numel() for name, weight in weights.items())
    return {
        "name": group.name,
        "channels": group.size,
        "width": sub.plan.widths[group.name],
        "parameters_per_channel": _count(net.module) - left,
        "training_flops_per_channel": net.training_flops - net.coupling.flops(narrower),
        "produced_by": [s.tensor for s in group.slots if s.produces],
        "tensors": sorted({s.tensor for s in group.slots}),
    }


def _show(document: dict[str, Any], net: ElasticModel) -> None:
    alpha = f"α = {document['alpha']:g}"
    rows: list[tuple[object, ...]] = []
    for group in document["groups"]:
        also = [name.removesuffix(".weight") for name in group["produced_by"][1:]]
        parameters, flops = group["parameters_per_channel"], group["training_flops_per_channel"]
        costs = f"{parameters:,}", f"{flops / 1e3:,.1f}"
        rows.append((group["name"], group["channels"], group["width"], *costs, _first_three(also)))
    title = f"{document['model']}: groups of channels at {alpha}, rule {net.rule}"
    columns = ("group", ">channels", ">width", ">parameters", ">kFLOP", "also produced by")
    print_table(title, columns, rows)
    say("(parameters and training kFLOP: cost of one channel of the full model)\n")
    reasons: dict[str, list[str]] = defaultdict(list)
    for pin in net.coupling.pins:
        reasons[str(pin.reason)].append(f"{pin.tensor}[dim {pin.dim}]")
    pinned = [(why, _first_three(where)) for why, where in reasons.items()]
    print_table("pinned: what cannot shrink", ("why", "what"), pinned)
    rows = []
    for title, (key, digits, unit) in COSTS.items():
        full, small = unit * document[key]["full"], unit * document[key]["sub"]
        ratio = f"{small / full:.3f}" if full else ""
        rows.append((title, format(full, digits), format(small, digits), ratio))
    print_table("cost", ("", ">full", f">{alpha}", ">ratio"), rows)
    if document["unused"]:
        say("Not used by the example input, never cut: " + ", ".join(document["unused"]))
    if net.rewritten:
        say("Sub-models run from a captured graph: forward contains literal sizes.")
    for names in document["turn_together"]:
        if len(names) > 1:
            say("Tied widths: " + ", ".join(names))


def _first_three(names: list[str]) -> str:
    more = [f"and {len(names) - 3} more"] if len(names) > 3 else []
    return ", ".join(names[:3] + more)
