"""`anycostfl codec FILE.safetensors`: what an update costs in bytes, and what that loses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from typer import Argument, Option

from anycostfl.cli._console import Json, emit_json, print_table
from anycostfl.codec import byte_budget, compress, decompress
from anycostfl.codec.frame import OVERHEAD
from anycostfl.codec.sections import MAGIC, bytes_by_section
from anycostfl.errors import UpdateError
from anycostfl.report.figures import new_figure, save

SWEEP = (4, 8, 15, 25, 40, 65, 100, 160, 250, 400, 630, 1000)


def codec(
    file: Annotated[Path, Argument(help="An update: tensors by name", dir_okay=False)],
    beta: Annotated[float, Option(help="Payload bits over 32 bits per element")] = 0.02,
    name: Annotated[str, Option("--codec", help="kernel or lowrank")] = "kernel",
    seed: Annotated[int, Option(help="Seed of the quantizer")] = 0,
    block: Annotated[
        list[str] | None,
        Option(help="NAME=N: N consecutive inputs of this weight belong to one channel"),
    ] = None,
    sweep: Annotated[Path | None, Option(help="Also plot error over bytes here")] = None,
    as_json: Json = False,
) -> None:
    """Compress one update, decode it, and show size, error, time and where the bytes went."""
    update = _load(file)
    blocks = _blocks(block or [], update)
    result = measure(update, beta, name, seed, blocks)
    least = OVERHEAD / (4 * result["elements"])  # β of an empty payload
    curve = [measure(update, 1 / n, name, seed, blocks) for n in SWEEP if sweep and 1 / n > least]
    if sweep:
        _draw(curve, sweep)
    if as_json:
        emit_json({**result, "sweep": curve})
        return
    _show(file, result)
    if curve:
        rows = [
            (f"1/{1 / p['beta']:.0f}", f"{p['payload_bytes']:,}", f"{p['relative_error']:.4g}")
            for p in curve
        ]
        print_table(f"plotted into {sweep}", [">beta", ">bytes", ">relative error"], rows)


def measure(
    update: dict[str, Tensor], beta: float, codec: str, seed: int, blocks: dict[str, int]
) -> dict[str, Any]:
    """Encode twice (the first call may compile), decode, compare."""
    started = time.perf_counter()
    payload = compress(update, beta, seed=seed, codec=codec, blocks=blocks)
    decompress(payload, update)
    compiled = time.perf_counter()
    compress(update, beta, seed=seed, codec=codec, blocks=blocks)
    encoded = time.perf_counter()
    decoded = decompress(payload, update)
    done = time.perf_counter()
    sent = torch.cat([tensor.flatten().double() for tensor in update.values()])
    received = torch.cat([decoded.values[name].flatten().double() for name in update])
    error = (sent - received).square().sum() / sent.square().sum()
    cosine = sent @ received / (sent.norm() * received.norm())
    in_context = {"coded in context": len(payload) - OVERHEAD, "header": OVERHEAD}
    return {
        "codec": codec,
        "beta": beta,
        "elements": len(sent),
        "budget_bytes": byte_budget(beta, len(sent)),
        "payload_bytes": len(payload),
        "bytes_by_section": bytes_by_section(payload) if payload.startswith(MAGIC) else in_context,
        "kept_share": sum(int(mask.sum()) for mask in decoded.masks.values()) / len(sent),
        "relative_error": float(error.nan_to_num()),  # of zeros: 0
        "cosine": float(cosine.nan_to_num()),
        "first_encode_s": compiled - started,
        "encode_s": encoded - compiled,
        "decode_s": done - encoded,
    }


def _load(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except FileNotFoundError as error:
        raise UpdateError(f"no file {file}") from error
    except (SafetensorError, OSError) as error:
        raise UpdateError(f"{file} is not a safetensors file: {error}") from error


def _blocks(options: list[str], update: dict[str, Tensor]) -> dict[str, int]:
    blocks = {}
    for option in options:
        name, _, count = option.rpartition("=")
        if not name or not count.isdigit():
            raise UpdateError(f"--block {option!r} is not NAME=N, as in fc1.weight=49")
        if name not in update:
            raise UpdateError(f"--block {option!r}: no {name}; there are {', '.join(update)}")
        blocks[name] = int(count)
    return blocks


def _show(file: Path, result: dict[str, Any]) -> None:
    size, budget = result["payload_bytes"], result["budget_bytes"]
    figures = {
        "codec": result["codec"],
        "elements": f"{result['elements']:,}",
        "payload": f"{size:,} bytes",
        "budget": f"{budget:,} bytes, {size / budget:.1%} used",
        "kept": f"{result['kept_share']:.1%} of the elements",
        "relative error": f"{result['relative_error']:.4g}",
        "cosine": f"{result['cosine']:.4f}",
        "encode": f"{result['encode_s'] * 1e3:.1f} ms",
        "decode": f"{result['decode_s'] * 1e3:.1f} ms",
        "first call of both": f"{result['first_encode_s'] * 1e3:.0f} ms",
    }
    title = f"{file.name} at β = {result['beta']:g}"
    print_table(title, ["figure", ">value"], list(figures.items()))
    sections = result["bytes_by_section"].items()
    rows = [(name, f"{count:,}", f"{count / size:.1%}") for name, count in sections]
    print_table("where the bytes went", ["kind", ">bytes", ">share"], rows)


def _draw(curve: list[dict[str, Any]], path: Path) -> None:
    figure, [axes] = new_figure(1, (6, 4))
    x, y = ([point[key] for point in curve] for key in ("payload_bytes", "relative_error"))
    axes.loglog(x, y, marker="o")
    axes.set(xlabel="payload in bytes", ylabel="relative squared error")
    axes.grid(visible=True, which="both", alpha=0.3)
    save(figure, path)
