"""`anycostfl export`: the trained model at any width, as a file a device can run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import click
from typer import Argument, Option

from anycostfl.cli._console import Json, amount, emit_json, err, note, print_table, say
from anycostfl.data.files import DataMissingError
from anycostfl.errors import ConfigError
from anycostfl.export import cut, least_alpha, metric_of, open_trained, widths
from anycostfl.export.card import card_of
from anycostfl.export.formats import FORMATS, deployed_for, write, write_elastic
from anycostfl.export.trained import TrainedModel
from anycostfl.export.widths import Width
from anycostfl.files import atomic_write, writing_to
from anycostfl.metrics import MetricInfo

TABLE_ALPHAS = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)
CHOICES = click.Choice([*FORMATS, "elastic"])


def export(
    run: Annotated[Path, Argument(help="A run directory")],
    alpha: Annotated[list[float] | None, Option(help="Width, 0 < α ≤ 1; may be repeated")] = None,
    fit: Annotated[str, Option(help="The widest within 3ms, 2MB or 50MFLOP")] = "",
    format_: Annotated[
        str,
        Option("--format", click_type=CHOICES, help="executorch: .pte; elastic: all widths in one"),
    ] = "onnx",
    out_file: Annotated[Path | None, Option("--out", help="File to write")] = None,
    prepare: Annotated[
        bool,
        Option(
            "--preparation/--no-preparation",
            help="The file prepares raw input itself, or takes prepared input",
        ),
    ] = True,
    table: Annotated[bool, Option("--table", help="Measure several widths")] = False,
    json: Json = False,
) -> None:
    """Cut the model of a run to any width and write it for a device, checked against PyTorch.

    The file takes raw input, as the task's data has it, and a model card stands beside it. Latency
    is that of one sample on one thread of this machine: run it on the target device. `--table`
    measures every width in 32 and 8 bits and writes RUN/widths.json, which the report shows.
    """
    _check_options(alpha or [], fit, format_, out_file, table=table, prepare=prepare)
    trained = open_trained(run)
    note(*trained.remarks)
    name = trained.config.model.name
    if format_ == "elastic":
        _export_elastic(trained, out_file or run / f"{name}-elastic.safetensors", json=json)
        return
    if table:
        _warn_untrained(trained, alpha or [])
        alphas = alpha or _table_alphas(trained)
        _measure(trained, run, alphas, prepare=prepare, json=json)
        return
    limit = widths.parse_limit(fit) if fit else None
    fitted = widths.widest(trained, limit, format_, prepare=prepare) if limit else None
    chosen = [fitted.alpha] if fitted else alpha or []
    _warn_untrained(trained, chosen)
    suffix = FORMATS[format_].suffix
    kind = "-int8" if format_ == "int8" else ""
    files = {a: out_file or run / f"{name}-alpha-{a:.4g}{kind}{suffix}" for a in chosen}
    rows = []
    for a, path in files.items():
        width = _export_width(trained, a, path, format_, fitted, prepare=prepare)
        rows.append({"file": str(path), **asdict(width)})
        if not json:
            say(f"{path}: differs from PyTorch by at most {width.difference:.1e}")
            _show([width], trained.config.metric)
    if json:
        emit_json({"format": format_, "exported": rows})


def _check_options(
    alpha: Sequence[float],
    fit: str,
    format_: str,
    out_file: Path | None,
    *,
    table: bool,
    prepare: bool,
) -> None:
    if fit:
        widths.parse_limit(fit)
    problems = [f"--alpha: given {a:g}, must be in (0, 1]" for a in alpha if not 0 < a <= 1]
    if format_ == "elastic" and (alpha or fit or table):
        problems.append("--format elastic contains all widths: no --alpha, --fit or --table")
    elif alpha and fit:
        problems.append("--alpha and --fit: give only one of them")
    elif not prepare and not FORMATS.get(format_, FORMATS["onnx"]).prepares:
        problems.append(f"--no-preparation: --format {format_} holds weights only, leave it out")
    elif table and (fit or out_file or format_ != "onnx"):
        problems.append("--table measures ONNX files: no --fit, --out or other --format")
    elif format_ != "elastic" and not (alpha or fit or table):
        problems.append("give a width: --alpha 0.25, --fit 3ms, --table, or --format elastic")
    if out_file is not None:
        formats = {kind.suffix for kind in FORMATS.values()}
        written = FORMATS["safetensors" if format_ == "elastic" else format_].suffix
        if out_file.suffix in formats - {written}:
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
    trained: TrainedModel,
    alpha: float,
    path: Path,
    format_: str,
    fitted: Width | None,
    *,
    prepare: bool,
) -> Width:
    """A width as a checked file with its card; what fitted is not measured again."""
    sub = cut(trained, alpha)
    deployed = deployed_for(trained, sub, format_, prepare=prepare)
    difference = write(trained, sub, path, format_, prepare=prepare)
    latency_ms, metric = fitted.latency_ms if fitted else None, None
    if FORMATS[format_].suffix == ".onnx":
        with suppress(DataMissingError):
            metric = metric_of(trained, widths.OnnxFile(path), deployed.test())
        if latency_ms is None:
            [latency_ms] = widths.measure_latency_ms([path], deployed.inputs(1))
    width = widths.width_of_file(trained, sub, path, metric=metric, latency_ms=latency_ms)
    width = replace(width, precision=widths.precision_of(format_), difference=difference)
    card = card_of(trained, deployed, path, format_, width)
    with writing_to(path, "Free some space"):
        atomic_write(path.with_name(f"{path.name}.md"), card.encode())
    return width


def _table_alphas(trained: TrainedModel) -> list[float]:
    """The usual widths that the model supports."""
    least = least_alpha(trained.net)
    if below := [f"{alpha:g}" for alpha in TABLE_ALPHAS if alpha < least]:
        note(f"α = {', '.join(below)} is left out: the narrowest sub-model has α = {least:.4g}")
    return [alpha for alpha in TABLE_ALPHAS if alpha >= least]


def _measure(
    trained: TrainedModel, run: Path, alphas: Sequence[float], *, prepare: bool, json: bool
) -> None:
    def on_start(alpha: float) -> None:
        if not json:
            err.print(f"measuring α = {alpha:g} …")

    measured = widths.measure_widths(trained, alphas, on_start, prepare=prepare)
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
        "precision": [w.precision for w in measured],
        f">{info.name}": [info.show(w.metric) for w in measured if w.metric is not None],
        ">parameters": [f"{w.parameters:,}" for w in measured],
        ">MFLOP": [f"{w.flops / 1e6:.3g}" for w in measured],
        ">size": [amount(w.bytes, "B") for w in measured],
        ">latency": [amount(w.latency_ms / 1e3, "s") for w in measured if w.latency_ms is not None],
        ">error": [f"{w.difference:.2g}" for w in measured if w.difference is not None],
    }
    known = {title: cells for title, cells in columns.items() if cells}
    print_table("", list(known), list(zip(*known.values(), strict=True)))
