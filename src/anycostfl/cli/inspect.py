"""`anycostfl inspect`: what can shrink in a model, what cannot and why, and what a width saves."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections import Counter, defaultdict
from typing import Annotated, Any

import torch
from torch import nn
from typer import Option

from anycostfl import models
from anycostfl.cli._console import Json, emit_json, print_table, say
from anycostfl.coupling.atoms import Reason
from anycostfl.coupling.result import Group, Pin
from anycostfl.errors import ConfigError, UnknownNameError
from anycostfl.shrink import ElasticModel, SubModel
from anycostfl.shrink.elastic import size_bits
from anycostfl.shrink.widths import regions, take
from anycostfl.state import tensors_of

COSTS = {  # key of the document, digits, unit
    "parameters": ("parameters", ",", 1),
    "update, Mbit": ("update_bits", ".2f", 1e-6),
    "training MFLOP per sample": ("training_flops_per_sample", ".1f", 1e-6),
}


def inspect(
    model: Annotated[str, Option(help=f"{', '.join(models.names())} or package.module:function")],
    alpha: Annotated[float, Option(help="Shrinking factor, in (0, 1]")] = 0.25,
    rule: Annotated[str, Option(help="Widths: sqrt (the paper), fast, even")] = "sqrt",
    shape: Annotated[str, Option("--input", help="Shape of one sample: 3,32,32")] = "",
    json: Json = False,
) -> None:
    """Show which channels of a model shrink together and what a sub-model of factor ALPHA costs."""
    module, inputs = _load(model, shape)
    seconds = time.process_time()
    net = ElasticModel(module, *inputs, rule=rule)
    seconds = time.process_time() - seconds
    document = describe(model, net, net.shrink(alpha), seconds)
    if json:
        emit_json(document)
    else:
        _show(document, net)


def _load(model: str, shape: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model of this package by name, or a custom one as package.module:function."""
    path, custom, name = model.partition(":")
    if not custom:
        if shape:
            why = f"{model} brings its own shape; only for package.module:function"
            raise ConfigError([f"--input: given {shape}, but {why}"])
        spec = models.load(model)
        return spec.build(), (spec.example(2),)
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(path), name)()
    except Exception as error:
        raise UnknownNameError(
            f"cannot load {model!r}: {type(error).__name__}: {error}. Give package.module:function,"
            " where function() needs no arguments and returns an nn.Module, or a tuple of an"
            " nn.Module and example inputs for it"
        ) from error
    module, *inputs = made if isinstance(made, tuple) else (made,)
    if not isinstance(module, nn.Module):
        raise UnknownNameError(f"{model!r} returns {type(module).__name__}, not an nn.Module")
    if inputs and not shape:
        return module, tuple(inputs)
    try:
        return module, (torch.randn(2, *(int(n) for n in shape.split(","))),)
    except (ValueError, RuntimeError) as error:  # not numbers, or negative
        raise UnknownNameError(
            f"--input {shape!r} is not a shape; give the shape of one sample, such as 3,32,32, "
            "or let the function return (module, example inputs)"
        ) from error


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def describe(name: str, net: ElasticModel, sub: SubModel, seconds: float) -> dict[str, Any]:
    """Everything the tables show, as plain values."""
    plan, flops = sub.plan, net.training_flops
    return {
        "model": name,
        "alpha": plan.alpha,
        "rule": net.rule,
        "trace_cpu_seconds": seconds,
        "coverage": {
            "parameters": _shrinking_parameters(net) / max(_count(net.module), 1),
            "training_flops": net.coupling.coverage(),
        },
        "would_raise_it": _obstacles(net),
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


def _shrinking_parameters(net: ElasticModel) -> int:
    """The parameters in tensors of which some dimension shrinks."""
    shrink = {slot.tensor for group in net.coupling.groups for slot in group.slots}
    return sum(p.numel() for n, p in net.module.named_parameters() if n in shrink)


def _obstacles(net: ElasticModel) -> list[dict[str, Any]]:
    """What pins the most parameters besides the model's own inputs and outputs."""
    sizes = {name: p.numel() for name, p in net.module.named_parameters()}
    held: Counter[Reason] = Counter()
    for pin in net.coupling.pins:
        if pin.reason.operation != "output" and pin.reason.why not in INHERENT:
            size = sizes.get(pin.tensor, 0)
            held[pin.reason] += size * pin.positions // _length(net, pin)
    return [
        {"operation": r.operation, "module": r.where, "why": r.why, "parameters": count}
        for r, count in held.most_common(5)
        if count
    ]


def _length(net: ElasticModel, pin: Pin) -> int:
    return int(tensors_of(net.module)[pin.tensor].shape[pin.dim])


INHERENT = {"meets the model's input", "rows are chosen by the data"}
"""Reasons to pin that no rule could remove."""


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
    covered = document["coverage"]
    say(
        f"Coverage: {covered['training_flops']:.0%} of training FLOPs and "
        f"{covered['parameters']:.0%} of parameters are in tensors that shrink. "
        f"Traced in {document['trace_cpu_seconds']:.1f} s of CPU time."
    )
    for obstacle in document["would_raise_it"]:
        place = f" in {obstacle['module']}" if obstacle["module"] else ""
        say(
            f"Would raise it: {obstacle['operation']}{place} holds {obstacle['parameters']:,} "
            f"parameters ({obstacle['why']})"
        )
    if document["unused"]:
        say("Not used by the example input, never cut: " + ", ".join(document["unused"]))
    if net.rewritten:
        say("The code contains literal sizes: sub-models replace them as they run.")
    for names in document["turn_together"]:
        if len(names) > 1:
            say("Tied widths: " + ", ".join(names))


def _first_three(names: list[str]) -> str:
    more = [f"and {len(names) - 3} more"] if len(names) > 3 else []
    return ", ".join(names[:3] + more)
