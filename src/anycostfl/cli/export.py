"""`anycostfl export`: the trained model at any width, as a file a device can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import click
from typer import Argument, Option

from anycostfl.cli._console import Json, emit_json, err, note, print_table, say
from anycostfl.errors import ConfigError
from anycostfl.export import cut, least_alpha, open_trained, widths
from anycostfl.export.formats import FORMATS, write, write_elastic
from anycostfl.export.trained import TrainedModel
from anycostfl.export.widths import Width
from anycostfl.metrics import MetricInfo

TABLE_ALPHAS = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)
CHOICES = click.Choice([*FORMATS, "elastic"])


def export(
    run: Annotated[Path, Argument(help="A run directory")],
    alpha: Annotated[list[float] | None, Option(help="Width, 0 < α ≤ 1; may be repeated")] = None,
    fit: Annotated[str, Option(help="The widest within 3ms, 2MB or 50MFLOP")] = "",
    format_: Annotated[
        str, Option("--format", click_type=CHOICES, help="elastic: all widths in one file")
    ] = "onnx",
    out_file: Annotated[Path | None, Option("--out", help="File to write")] = None,
    table: Annotated[bool, Option("--table", help="Measure several widths")] = False,
    json: Json = False,
) -> None:
    """Cut the model of a run to any width and write it for a device, checked against PyTorch.

    Latency is that of one sample on one thread of this machine: run it on the target device.
    `--table` also writes RUN/widths.json, which the report shows.
    """
    _check_options(alpha or [], fit, format_, out_file, table=table)
    trained = open_trained(run)
    note(*trained.remarks)
    name = trained.config.model.name
    if format_ == "elastic":
        _export_elastic(trained, out_file or run / f"{name}-elastic.safetensors", json=json)
        return
    if table:
        _warn_untrained(trained, alpha or [])
        _measure(trained, run, alpha or _table_alphas(trained), json=json)
        return
    fitted = widths.widest(trained, widths.parse_limit(fit), format_) if fit else None
    chosen = [fitted.alpha] if fitted else alpha or []
    _warn_untrained(trained, chosen)
    suffix = FORMATS[format_].suffix
    files = {a: out_file or run / f"{name}-alpha-{a:.4g}{suffix}" for a in chosen}
    rows = []
    for a, path in files.items():
        width, difference = _export_width(trained, a, path, format_, fitted)
        rows.append({"file": str(path), "difference": difference, **asdict(width)})
        if not json:
            say(f"{path}: differs from PyTorch by at most {difference:.1e}")
            _show([width], trained.config.metric)
    if json:
        emit_json({"format": format_, "exported": rows})


def _check_options(
    alpha: Sequence[float], fit: str, format_: str, out_file: Path | None, *, table: bool
) -> None:
    if fit:
        widths.parse_limit(fit)
    problems = [f"--alpha: given {a:g}, must be in (0, 1]" for a in alpha if not 0 < a <= 1]
    if format_ == "elastic" and (alpha or fit or table):
        problems.append("--format elastic contains all widths: no --alpha, --fit or --table")
    elif alpha and fit:
        problems.append("--alpha and --fit: give only one of them")
    elif table and (fit or out_file or format_ != "onnx"):
        problems.append("--table measures ONNX files: no --fit, --out or other --format")
    elif format_ != "elastic" and not (alpha or fit or table):
        problems.append("give a width: --alpha 0.25, --fit 3ms, --table, or --format elastic")
    if out_file is not None:
        formats = {kind.suffix: name for name, kind in FORMATS.items()}
        written = "safetensors" if format_ == "elastic" else format_
        if formats.get(out_file.suffix, written) != written:
            problems.append(f"--out: given {out_file}, which is not a suffix of --format {format_}")
        if len(alpha) > 1:
            problems.append(
                f"--out: one file for {len(alpha)} widths; omit it, or give one --alpha"
            )
    if problems:
        raise ConfigError(problems)


def _warn_untrained(trained: TrainedModel, alphas: Sequence[float]) -> None:
    least = trained.config.limits.alpha_min
    if below := [f"{alpha:g}" for alpha in alphas if alpha < least]:
        note(
            f"α = {', '.join(below)} is below the run's α^min = {least:g}: no device trained a "
            "model this narrow, so it may be poor"
        )


def _export_elastic(trained: TrainedModel, path: Path, *, json: bool) -> None:
    write_elastic(trained, path)
    size = path.stat().st_size
    if json:
        emit_json({"file": str(path), "format": "elastic", "bytes": size})
        return
    say(f"{path}: all widths of {trained.config.model.name}, {size / 1e6:.2f} MB")
    say(f'  net = anycostfl.load_elastic("{path}")\n  sub = net.shrink(0.25)')


def _export_width(
    trained: TrainedModel, alpha: float, path: Path, format_: str, fitted: Width | None
) -> tuple[Width, float]:
    """A width as a checked file, and its difference; what fitted is not measured again."""
    sub = cut(trained, alpha)
    difference = write(trained, sub, path, format_)
    latency_ms = fitted.latency_ms if fitted else None
    if format_ == "onnx" and latency_ms is None:
        [latency_ms] = widths.measure_latency_ms([path], trained.example(1))
    return widths.width_of_file(trained, sub, path, latency_ms=latency_ms), difference


def _table_alphas(trained: TrainedModel) -> list[float]:
    """The usual widths that the model supports."""
    least = least_alpha(trained.net)
    if below := [f"{alpha:g}" for alpha in TABLE_ALPHAS if alpha < least]:
        note(f"α = {', '.join(below)} is left out: the narrowest sub-model has α = {least:.4g}")
    return [alpha for alpha in TABLE_ALPHAS if alpha >= least]


def _measure(trained: TrainedModel, run: Path, alphas: Sequence[float], *, json: bool) -> None:
    def on_start(alpha: float) -> None:
        if not json:
            err.print(f"measuring α = {alpha:g} …")

    measured = widths.measure_widths(trained, alphas, on_start)
    path = widths.save_widths(run, measured)
    if json:
        emit_json({"widths": [asdict(width) for width in measured]})
        return
    name = trained.config.model.name
    say(f"{name} after {trained.rounds} rounds; ONNX, one sample, one thread:")
    _show(measured, trained.config.metric)
    say(f"Also in {path}")


def _show(measured: Sequence[Width], info: MetricInfo) -> None:
    """A table without the columns that were not measured."""
    columns = {
        ">α": [f"{w.alpha:.4g}" for w in measured],
        f">{info.name}": [info.show(w.metric) for w in measured if w.metric is not None],
        ">parameters": [f"{w.parameters:,}" for w in measured],
        ">MFLOP": [f"{w.flops / 1e6:.2f}" for w in measured],
        ">kB": [f"{w.bytes / 1e3:,.0f}" for w in measured],
        ">ms": [f"{w.latency_ms:.3f}" for w in measured if w.latency_ms is not None],
    }
    known = {title: cells for title, cells in columns.items() if cells}
    print_table("", list(known), list(zip(*known.values(), strict=True)))
