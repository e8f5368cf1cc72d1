"""`anycostfl export`: the trained model at any width, as a file a device can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import click
import typer

from anycostfl.cli._console import Json, emit_json, err, note, out, say, table
from anycostfl.errors import ConfigError
from anycostfl.export import cut, least_alpha, open_trained, widths
from anycostfl.export.formats import FORMATS, write, write_elastic
from anycostfl.export.trained import TrainedModel
from anycostfl.export.widths import Width

TABLE_ALPHAS = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)
COLUMNS = (">α", ">accuracy", ">parameters", ">MFLOP", ">kB", ">ms")
CHOICES = click.Choice([*FORMATS, "elastic"])


def export(
    run: Annotated[Path, typer.Argument(help="A run directory")],
    alpha: Annotated[
        list[float] | None, typer.Option(help="Width, 0 < α ≤ 1; may be repeated")
    ] = None,
    fit: Annotated[str, typer.Option(help="The widest within 3ms, 2MB or 50MFLOP")] = "",
    format_: Annotated[
        str, typer.Option("--format", click_type=CHOICES, help="elastic: all widths in one file")
    ] = "onnx",
    out_file: Annotated[Path | None, typer.Option("--out", help="File to write")] = None,
    table_: Annotated[bool, typer.Option("--table", help="Measure several widths")] = False,
    json: Json = False,
) -> None:
    """Cut the model of a run to any width and write it for a device, checked against PyTorch.

    Latency is that of one sample on one thread of this machine: run it on the target device.
    `--table` also writes RUN/widths.json, which the report shows.
    """
    _check_options(alpha or [], fit, format_, out_file, table_=table_)
    trained = open_trained(run)
    note(*trained.remarks)
    if format_ == "elastic":
        _export_elastic(trained, out_file or run / f"{_model(trained)}-elastic.safetensors", json)
    elif table_:
        _warn_untrained(trained, alpha or ())
        _measure(trained, run, alpha or _table_alphas(trained), json)
    else:
        fitted = widths.widest(trained, widths.parse_limit(fit), format_) if fit else None
        chosen = [fitted.alpha] if fitted else alpha or []
        _warn_untrained(trained, chosen)
        suffix = FORMATS[format_].suffix
        names = {a: run / f"{_model(trained)}-alpha-{a:.4g}{suffix}" for a in chosen}
        files = {a: out_file or name for a, name in names.items()}
        _export_widths(trained, files, format_, fitted, json)


def _model(trained: TrainedModel) -> str:
    return trained.config.model.name


def _check_options(
    alpha: Sequence[float], fit: str, format_: str, out_file: Path | None, *, table_: bool
) -> None:
    problems = [f"--alpha: given {a:g}, must be in (0, 1]" for a in alpha if not 0 < a <= 1]
    if fit:
        widths.parse_limit(fit)
    if format_ == "elastic" and (alpha or fit or table_):
        problems.append("--format elastic contains all widths: no --alpha, --fit or --table")
    elif alpha and fit:
        problems.append("--alpha and --fit: give only one of them")
    elif table_ and (fit or out_file or format_ != "onnx"):
        problems.append("--table measures ONNX files: no --fit, --out or other --format")
    elif format_ != "elastic" and not (alpha or fit or table_):
        problems.append("give a width: --alpha 0.25, --fit 3ms, --table, or --format elastic")
    formats = {kind.suffix: name for name, kind in FORMATS.items()}
    written = "safetensors" if format_ == "elastic" else format_
    if out_file is not None and formats.get(out_file.suffix, written) != written:
        problems.append(f"--out: given {out_file}, which is not a suffix of --format {format_}")
    if out_file is not None and len(alpha) > 1:
        problems.append(f"--out: one file for {len(alpha)} widths; omit it, or give one --alpha")
    if problems:
        raise ConfigError(problems)


def _warn_untrained(trained: TrainedModel, alphas: Sequence[float]) -> None:
    least = trained.config.limits.alpha_min
    if below := [f"{alpha:g}" for alpha in alphas if alpha < least]:
        note(
            f"α = {', '.join(below)} is below the run's α^min = {least:g}: no device trained a "
            "model this narrow, so its accuracy may be low"
        )


def _table_alphas(trained: TrainedModel) -> list[float]:
    """The usual widths that the model supports."""
    least = least_alpha(trained.net)
    if below := [f"{alpha:g}" for alpha in TABLE_ALPHAS if alpha < least]:
        note(f"α = {', '.join(below)} is left out: the narrowest sub-model has α = {least:.4g}")
    return [alpha for alpha in TABLE_ALPHAS if alpha >= least]


def _export_elastic(trained: TrainedModel, path: Path, json: bool) -> None:
    write_elastic(trained, path)
    size = path.stat().st_size
    if json:
        emit_json({"file": str(path), "format": "elastic", "bytes": size})
        return
    say(f"{path}: all widths of {_model(trained)}, {size / 1e6:.2f} MB")
    say(f'  net = anycostfl.load_elastic("{path}")\n  sub = net.shrink(0.25)')


def _export_widths(
    trained: TrainedModel, files: dict[float, Path], format_: str, fitted: Width | None, json: bool
) -> None:
    """Write, check and show every file; a latency that fitted is not measured again."""
    rows: list[dict[str, object]] = []
    for alpha, path in files.items():
        sub = cut(trained, alpha)
        difference = write(trained, sub, path, format_)
        latency_ms = fitted.latency_ms if fitted else None
        if format_ == "onnx" and latency_ms is None:
            [latency_ms] = widths.measure_latency_ms([path], trained.example(1))
        width = replace(widths.width_of_file(trained, sub, path), latency_ms=latency_ms)
        rows.append({"file": str(path), "difference": difference, **asdict(width)})
        if not json:
            say(f"{path}: differs from PyTorch by at most {difference:.1e}")
            _show([width])
    if json:
        emit_json({"format": format_, "exported": rows})


def _measure(trained: TrainedModel, run: Path, alphas: Sequence[float], json: bool) -> None:
    def on_start(alpha: float) -> None:
        if not json:
            err.print(f"measuring α = {alpha:g} …")

    measured = widths.measure_widths(trained, alphas, on_start)
    path = widths.save_widths(run, measured)
    if json:
        emit_json({"widths": [asdict(width) for width in measured]})
        return
    say(f"{_model(trained)} after {trained.rounds} rounds; ONNX, one sample, one thread:")
    _show(measured)
    say(f"Also in {path}")


def _show(measured: Sequence[Width]) -> None:
    """A table without the columns that were not measured."""
    columns = zip(COLUMNS, *map(_cells, measured), strict=True)
    titles, *rows = zip(*(column for column in columns if column[1]), strict=True)
    out.print(table("", titles, rows))


def _cells(width: Width) -> list[str]:
    return [
        f"{width.alpha:.4g}",
        "" if width.accuracy is None else f"{100 * width.accuracy:.2f} %",
        f"{width.parameters:,}",
        f"{width.flops / 1e6:.2f}",
        f"{width.bytes / 1e3:,.0f}",
        "" if width.latency_ms is None else f"{width.latency_ms:.3f}",
    ]
