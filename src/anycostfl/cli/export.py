"""`anycostfl export`: the trained model at any width, as a file a device can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from anycostfl import export as exporting
from anycostfl.cli._console import Json, emit_json, err, note, out, say, table
from anycostfl.errors import ConfigError
from anycostfl.export import FORMATS, TABLE_ALPHAS, Trained, Width

COLUMNS = (">α", ">accuracy", ">parameters", ">MFLOP", ">kB", ">ms")
CHOICES = (*FORMATS, "elastic")


def export(
    run: Annotated[Path, typer.Argument(help="A run directory")],
    alpha: Annotated[
        list[float] | None, typer.Option(help="Width factor, in (0, 1]; may be repeated")
    ] = None,
    fit: Annotated[str, typer.Option(help="The widest that fits: 3ms, 2MB or 50MFLOP")] = "",
    format_: Annotated[
        str, typer.Option("--format", help=f"{', '.join(CHOICES)} (all widths in one file)")
    ] = "onnx",
    out_file: Annotated[Path | None, typer.Option("--out", help="File to write")] = None,
    table_: Annotated[
        bool, typer.Option("--table", help="Measure several widths; also into RUN/widths.json")
    ] = False,
    json: Json = False,
) -> None:
    """Cut the model of a run to any width and write it for a device, checked against PyTorch.

    Latency is that of one sample on one thread of this machine: run it where it matters.
    """
    _refuse_nonsense(alpha or [], fit, format_, out_file, table_=table_)
    trained = exporting.open_trained(run)
    note(*trained.remarks)
    if format_ == "elastic":
        name = f"{trained.config.model.name}-elastic.safetensors"
        _export_elastic(trained, out_file or run / name, json)
    elif table_:
        note(*exporting.warnings_of(trained, alpha or ()))
        _measure(trained, run, alpha or _table_alphas(trained), json)
    else:
        fitted = exporting.widest(trained, exporting.parse_limit(fit), format_) if fit else None
        chosen = [fitted.alpha] if fitted else alpha or []
        note(*exporting.warnings_of(trained, chosen))
        files = {a: out_file or run / exporting.default_name(trained, format_, a) for a in chosen}
        _export_widths(trained, files, format_, fitted.latency_ms if fitted else None, json)


def _refuse_nonsense(
    alpha: Sequence[float], fit: str, format_: str, out_file: Path | None, *, table_: bool
) -> None:
    problems = [
        f"--alpha: given {a:g}, allowed above 0 and at most 1" for a in alpha if not 0 < a <= 1
    ]
    if format_ not in CHOICES:
        problems.append(f"--format: given {format_!r}, allowed {', '.join(CHOICES)}")
    if fit:
        exporting.parse_limit(fit)
    if format_ == "elastic" and (alpha or fit or table_):
        problems.append("--format elastic holds all widths: no --alpha, --fit or --table")
    elif alpha and fit:
        problems.append("--alpha and --fit: allowed one of them")
    elif table_ and (fit or out_file or format_ != "onnx"):
        problems.append("--table measures ONNX files: no --fit, --out or other --format")
    elif format_ != "elastic" and not (alpha or fit or table_):
        problems.append("say how wide: --alpha 0.25, --fit 3ms, --table, or --format elastic")
    named = {kind.suffix: name for name, kind in exporting.FORMATS.items()}
    written = "safetensors" if format_ == "elastic" else format_
    if out_file is not None and named.get(out_file.suffix, written) != written:
        problems.append(f"--out: given {out_file}, which is not how --format {format_} is named")
    if out_file is not None and len(alpha) > 1:
        problems.append(f"--out: one file for {len(alpha)} widths; leave it out, or give one alpha")
    if problems:
        raise ConfigError(problems)


def _table_alphas(trained: Trained) -> list[float]:
    """The usual widths, as far as the model goes."""
    least = exporting.least_alpha(trained.net)
    below = [f"{alpha:g}" for alpha in TABLE_ALPHAS if alpha < least]
    if below:
        note(f"α = {', '.join(below)} is left out: the narrowest cut there is has α = {least:.4g}")
    return [alpha for alpha in TABLE_ALPHAS if alpha >= least]


def _export_elastic(trained: Trained, path: Path, json: bool) -> None:
    exporting.write_elastic(trained, path)
    size = path.stat().st_size
    if json:
        emit_json({"file": str(path), "format": "elastic", "bytes": size})
        return
    say(f"{path}: all widths of {trained.config.model.name}, {size / 1e6:.2f} MB")
    say(f'  net = anycostfl.load_elastic("{path}")\n  sub = net.shrink(0.25)')


def _export_widths(
    trained: Trained, files: dict[float, Path], format_: str, known_ms: float | None, json: bool
) -> None:
    """Write, check and show every file; `known_ms` is a latency that was measured already."""
    rows: list[dict[str, object]] = []
    for alpha, path in files.items():
        sub = exporting.cut(trained, alpha)
        difference = exporting.write(trained, sub, path, format_)
        width = exporting.weigh(trained, sub, path)
        latency = known_ms
        if format_ == "onnx" and known_ms is None:
            latency = exporting.measure_latency_ms([path], trained.example(1))[0]
        width = replace(width, latency_ms=latency)
        rows.append({"file": str(path), "difference": difference, **asdict(width)})
        if not json:
            say(f"{path}: differs from PyTorch by at most {difference:.1e}")
            _show([width])
    if json:
        emit_json({"format": format_, "exported": rows})


def _measure(trained: Trained, run: Path, alphas: Sequence[float], json: bool) -> None:
    def show(alpha: float) -> None:
        if not json:
            err.print(f"measuring α = {alpha:g} …")

    widths = exporting.measure_widths(trained, alphas, show)
    path = exporting.save_widths(run, widths)
    if json:
        emit_json({"widths": [asdict(width) for width in widths]})
        return
    model = trained.config.model.name
    say(f"{model} after {trained.rounds} rounds; ONNX, one sample, one thread:")
    _show(widths)
    say(f"Also in {path}")


def _show(widths: Sequence[Width]) -> None:
    """A table of what is known of these widths."""
    rows = [_cells(width) for width in widths]
    known = [i for i in range(len(COLUMNS)) if rows[0][i]]
    cells = [[row[i] for i in known] for row in rows]
    out.print(table("", [COLUMNS[i] for i in known], cells))


def _cells(width: Width) -> list[str]:
    return [
        f"{width.alpha:.4g}",
        "" if width.accuracy is None else f"{100 * width.accuracy:.2f} %",
        f"{width.parameters:,}",
        f"{width.flops / 1e6:.2f}",
        f"{width.bytes / 1e3:,.0f}",
        "" if width.latency_ms is None else f"{width.latency_ms:.3f}",
    ]
