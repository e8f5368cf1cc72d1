"""`anycostfl inspect`: what can shrink in a model, what cannot and why, and what a width saves."""

from __future__ import annotations

import importlib
import os
import sys
from collections import defaultdict
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from anycostfl import models
from anycostfl.cli._console import Json, emit_json, out, say, table
from anycostfl.coupling.result import Group
from anycostfl.errors import ConfigError, UnknownNameError
from anycostfl.shrink import ElasticModel, SubModel
from anycostfl.shrink.elastic import size_bits
from anycostfl.shrink.widths import regions, take


def inspect(
    model: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(models.names())}, or your own as package.module:make"
        ),
    ],
    alpha: Annotated[float, typer.Option(help="Shrinking factor, above 0 and at most 1")] = 0.25,
    rule: Annotated[str, typer.Option(help="Widths: sqrt (the paper), fast, even")] = "sqrt",
    shape: Annotated[
        str, typer.Option("--input", help="Shape of one sample, for your own model: 3,32,32")
    ] = "",
    json: Json = False,
) -> None:
    """Show which channels of a model move together and what a sub-model of factor ALPHA costs."""
    module, example = _load(model, shape)
    net = ElasticModel(module, example, rule=rule)
    sub = net.shrink(alpha)
    if json:
        emit_json(describe(model, net, sub))
    else:
        _show(model, net, sub)


def _load(model: str, shape: str) -> tuple[nn.Module, Tensor]:
    """A model of ours by name, or anybody's as package.module:callable."""
    if ":" not in model:
        if shape:
            raise ConfigError(
                [f"--input: given {shape}, but {model} would be a model of ours, which brings its "
                 "own shape; allowed with package.module:callable"]
            )  # fmt: skip
        spec = models.load(model)
        return spec.build(), spec.example(2)
    path, _, name = model.partition(":")
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
    except (ValueError, RuntimeError) as error:  # no numbers, or none that are sizes
        raise UnknownNameError(
            f"--input {shape!r} is not a shape; give the shape of one sample, such as 3,32,32"
        ) from error


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _per_channel(group: Group, net: ElasticModel) -> tuple[int, float]:
    """Parameters and training FLOPs that go when the full model loses one channel of a group."""
    narrower = {**net.coupling.full(), group.name: group.size - 1}
    weights = dict(net.module.named_parameters())
    kept = regions(net.coupling, narrower, {n: w.shape for n, w in weights.items()})
    left = sum(take(weight, kept[name]).numel() for name, weight in weights.items())
    return _count(net.module) - left, net.training_flops - net.coupling.flops(narrower)


def describe(name: str, net: ElasticModel, sub: SubModel) -> dict[str, object]:
    """Everything the tables show, as plain values."""
    coupling, plan = net.coupling, sub.plan
    return {
        "model": name,
        "alpha": plan.alpha,
        "rule": net.rule,
        "literal_sizes_rewritten": net.rewritten,
        "parameters": {"full": _count(net.module), "sub": _count(sub.module)},
        "update_bits": {"full": net.size_bits, "sub": size_bits(sub.module)},
        "training_flops_per_sample": {
            "full": net.training_flops,
            "sub": net.training_flops * plan.flops_ratio,
            "ratio": plan.flops_ratio,
        },
        "groups": [
            _describe_group(group, net, plan.widths[group.name]) for group in coupling.groups
        ],
        "unused": list(coupling.unused),
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
            for pin in coupling.pins
        ],
    }


def _describe_group(group: Group, net: ElasticModel, width: int) -> dict[str, object]:
    parameters, flops = _per_channel(group, net)
    return {
        "name": group.name,
        "channels": group.size,
        "width": width,
        "parameters_per_channel": parameters,
        "training_flops_per_channel": flops,
        "produced_by": [s.tensor for s in group.slots if s.produces],
        "tensors": sorted({s.tensor for s in group.slots}),
    }


def _show(name: str, net: ElasticModel, sub: SubModel) -> None:
    rows = []
    for g in net.coupling.groups:
        parameters, flops = _per_channel(g, net)
        others = _few([s.tensor.removesuffix(".weight") for s in g.slots if s.produces][1:])
        width = sub.plan.widths[g.name]
        rows.append((g.name, g.size, width, f"{parameters:,}", f"{flops / 1e3:,.1f}", others))
    columns = ("group", ">channels", ">width", ">parameters", ">kFLOP", "also produced by")
    title = f"{name}: groups of channels at α = {sub.plan.alpha:g}, rule {net.rule}"
    out.print(table(title, columns, rows))
    say("(parameters and training kFLOP: what one channel of the full model costs)\n")
    reasons: dict[str, list[str]] = defaultdict(list)
    for pin in net.coupling.pins:
        reasons[str(pin.reason)].append(f"{pin.tensor}[dim {pin.dim}]")
    pinned = [(why, _few(where)) for why, where in reasons.items()]
    out.print(table("pinned: what cannot shrink", ("why", "what"), pinned))
    _show_costs(net, sub)


def _few(names: list[str], most: int = 3) -> str:
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join(names[:most] + more)


def _show_costs(net: ElasticModel, sub: SubModel) -> None:
    full, small = _count(net.module), _count(sub.module)
    flops, ratio = net.training_flops, sub.plan.flops_ratio
    amounts = [
        ("parameters", full, small, "{:,}"),
        ("update, Mbit", net.size_bits / 1e6, size_bits(sub.module) / 1e6, "{:.2f}"),
        ("training MFLOP per sample", flops / 1e6, flops * ratio / 1e6, "{:.1f}"),
    ]
    rows = [
        (what, f.format(a), f.format(b), f"{b / a:.3f}" if a else "") for what, a, b, f in amounts
    ]
    out.print(table("cost", ("", ">full", f">α = {sub.plan.alpha:g}", ">ratio"), rows))
    if net.coupling.unused:
        say("Not used on the example input, kept whole: " + ", ".join(net.coupling.unused))
    if net.rewritten:
        say("Sub-models run from a captured graph: forward holds literal sizes.")
    for dial in (dial for dial in net.tied_widths if len(dial.sizes) > 1):
        say("Turn together: " + ", ".join(name for name, _ in dial.sizes))
