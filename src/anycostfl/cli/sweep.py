"""`anycostfl sweep`: the paper's Fig. 4 (a) to (d) and what attackers do, from our runs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from anycostfl import methods
from anycostfl.cli._console import Json, emit_json, say
from anycostfl.cli._options import Overrides, Preset
from anycostfl.cli._series import (
    AGAIN,
    Background,
    OnlyShow,
    OutDir,
    Rates,
    Rounds,
    Target,
    Trial,
    Workers,
    asked,
    names_of,
    numbers_of,
    run_in_background,
    series_in,
    sets_method,
    show,
    working_on,
)
from anycostfl.config import Config
from anycostfl.errors import ConfigError, MissingExtraError
from anycostfl.evaluation.compare import (
    Series,
    Spent,
    as_bounds,
    as_figure,
    cost_to,
    nothing_in,
    to_markdown,
)
from anycostfl.evaluation.sweep import (
    KINDS,
    SPREADS,
    WIDTHS,
    ablation,
    attacks,
    heterogeneity,
    widths,
)
from anycostfl.files import atomic_write, writing_to
from anycostfl.report import draw_bars, draw_lines

X_LABELS = {
    "compute": "standard deviation of ε, 1e-27",
    "radio": "standard deviation of the distance, m",
}
METHODS = "anycostfl,heterofl,stc"
FOR = {
    "--methods": ("compute", "radio", "widths"),
    "--values": ("compute", "radio"),
    "--target": ("ablation", "compute", "radio"),
    "--learning-rates": ("ablation", "compute", "radio", "widths"),
    "--set run.method": ("attacks",),
}
"""Which sweeps look at an option."""
QUANTITIES = {"energy, kJ": "energy_kj", "latency, min": "latency_min", "uploaded, GB": "gigabytes"}
NUMBERS = ("reached", "rounds", *QUANTITIES.values())


@dataclass(frozen=True, slots=True)
class Finding:
    """A table, the same as numbers in JSON and in CSV, and what draws a figure of it."""

    header: Sequence[str]
    cells: Sequence[Sequence[str]]
    figures: Mapping[str, object]
    rows: Sequence[Sequence[object]]  # the first names the columns
    draw: Callable[[Path], None]


def sweep(
    kind: Annotated[str, typer.Argument(help="ablation, compute, radio, widths or attacks")],
    preset: Preset,
    method_names: Annotated[
        str, typer.Option("--methods", help=f"For compute, radio and widths; default: {METHODS}")
    ] = "",
    values: Annotated[
        str, typer.Option(help="Spreads for compute and radio, separated by commas")
    ] = "",
    target: Target = None,
    rounds: Rounds = None,
    rates: Rates = "",
    trial: Trial = None,
    set_: Overrides = None,
    out_dir: OutDir = None,
    workers: Workers = 0,
    background: Background = False,
    only_show: OnlyShow = False,
    json: Json = False,
) -> None:
    """What mechanisms buy, what heterogeneity costs, what sub-models and attackers can do.

    Runs share the folder of `anycostfl compare` and are not repeated. Ctrl-C stops cleanly.
    """
    if kind not in KINDS:
        raise ConfigError([f"sweep: given {kind!r}, must be one of {', '.join(KINDS)}"])
    given: dict[str, object] = {
        "--methods": method_names,
        "--values": values,
        "--learning-rates": rates,
    }
    given |= {"--target": target is not None, "--set run.method": sets_method(set_)}
    _check_options(kind, given)
    config = asked(preset, set_, target, rounds)
    names = names_of(method_names or METHODS, methods.names(), methods.load)
    spreads = numbers_of(values, "--values") or SPREADS.get(kind, ())
    folder = out_dir or Path("runs", f"compare-{Path(preset).stem}")
    series = series_in(folder, workers, (rates, trial), only_show=only_show, quiet=json)
    if background:
        run_in_background(series, json=json)
        return
    with working_on(series):
        if kind == "ablation":
            found = _ablation(series, config)
        elif kind == "widths":
            found = _widths(series, config, names)
        elif kind == "attacks":
            found = _attacks(series, config)
        else:
            found = _heterogeneity(series, config, kind, (names, spreads))
    if series.play:
        _write(found, folder / kind)
    if json:
        emit_json({"folder": str(folder), kind: found.figures})
        return
    show(f"{config.summary or preset}: {kind}", found.header, found.cells)
    if series.play:
        say(f"Everything is in {folder}: {kind}.md, .csv, .png, and one folder a run")


def _check_options(kind: str, given: Mapping[str, object]) -> None:
    """Refuse what a sweep would not look at."""
    ignored = [name for name, value in given.items() if value and kind not in FOR[name]]
    if ignored:
        raise ConfigError([f"{name}: only for {', '.join(FOR[name])}" for name in ignored])


def _write(found: Finding, stem: Path) -> None:
    """The table, the same for programs, and the picture."""
    rows = io.StringIO(newline="")
    csv.writer(rows).writerows(found.rows)
    with writing_to(stem.parent, AGAIN):
        atomic_write(stem.with_suffix(".md"), to_markdown(found.header, found.cells).encode())
        atomic_write(stem.with_suffix(".csv"), rows.getvalue().encode())
        with suppress(MissingExtraError):
            found.draw(stem.with_suffix(".png"))


def _ablation(series: Series, config: Config) -> Finding:
    target = config.run.target_accuracy
    found = {
        name: cost_to(records, changed, target)
        for name, (changed, records) in ablation(series, config).items()
    }
    _check_played(series, found.values())
    header = [f"to {100 * target:g} %", "rounds", *QUANTITIES]
    cells = [[name, *_cells(spent)] for name, spent in found.items()]
    panels = {
        title: {_bar(name, spent): getattr(spent.cost, key) for name, spent in found.items()}
        for title, key in QUANTITIES.items()
    }
    numbers = {name: _numbers(spent) for name, spent in found.items()}
    rows = [[name, *each.values()] for name, each in numbers.items()]
    draw = partial(draw_bars, panels)
    return Finding(header, cells, numbers, [["method", *NUMBERS], *rows], draw)


def _bar(name: str, spent: Spent) -> str:
    """What stands under a bar; one that did not get to the target would be higher."""
    return name.removeprefix("anycostfl/") + ("" if spent.reached else ", not reached")


def _heterogeneity(
    series: Series, config: Config, kind: str, over: tuple[Sequence[str], Sequence[float]]
) -> Finding:
    curves = heterogeneity(series, config, kind, *over)
    _check_played(series, (spent for points in curves.values() for _, spent in points))
    header = ["method", "spread", "rounds", *QUANTITIES]
    cells = [
        [name, f"{value:g}", *_cells(spent)]
        for name, points in curves.items()
        for value, spent in points
    ]
    scale = 1e27 if kind == "compute" else 1.0
    panels = {
        title: {
            name: (
                [scale * value for value, spent in points if spent.reached],
                [float(getattr(spent.cost, key)) for _, spent in points if spent.reached],
            )
            for name, points in curves.items()
        }
        for title, key in QUANTITIES.items()
    }
    numbers = {n: [(value, _numbers(spent)) for value, spent in p] for n, p in curves.items()}
    rows = [[n, value, *each.values()] for n, p in numbers.items() for value, each in p]
    draw = partial(draw_lines, panels, X_LABELS[kind])
    return Finding(header, cells, numbers, [["method", "spread", *NUMBERS], *rows], draw)


def _widths(series: Series, config: Config, names: Sequence[str]) -> Finding:
    found = widths(series, config, names)
    if not found:
        raise nothing_in(series.folder)
    header = ["method", *(f"α = {alpha:g}" for alpha in WIDTHS)]
    cells = [
        [name, *("–" if a is None else f"{100 * a:.2f}" for a in accuracy)]
        for name, accuracy in found.items()
    ]
    lines = {
        name: (WIDTHS, [math.nan if a is None else 100 * a for a in accuracy])
        for name, accuracy in found.items()
    }
    draw = partial(draw_lines, {"test accuracy, %": lines}, "width factor α")
    rows = [[name, *accuracy] for name, accuracy in found.items()]
    figures = {"alpha": list(WIDTHS), **found}
    return Finding(header, cells, figures, [["method", *WIDTHS], *rows], draw)


def _attacks(series: Series, config: Config) -> Finding:
    found = attacks(series, config)
    if all(accuracy is None for by_defence in found.values() for accuracy in by_defence.values()):
        raise nothing_in(series.folder)
    clean = found["none"]["open"]
    header = ["attack", "open, %", "points", "defended, %", "points"]
    cells = [
        [kind, *(text for a in by_defence.values() for text in _against(clean, a))]
        for kind, by_defence in found.items()
    ]
    panels = {
        f"{defence}: accuracy, %": {k: 100 * (by[defence] or 0.0) for k, by in found.items()}
        for defence in ("open", "defended")
    }
    rows = [[kind, *by_defence.values()] for kind, by_defence in found.items()]
    draw = partial(draw_bars, panels)
    return Finding(header, cells, found, [["attack", *found["none"]], *rows], draw)


def _against(clean: float | None, accuracy: float | None) -> list[str]:
    """An accuracy, and how many points it is above the clean run's."""
    if clean is None or accuracy is None:
        return ["–", "–"]
    return [f"{100 * accuracy:.2f}", f"{100 * (accuracy - clean):+.2f}"]


def _check_played(series: Series, found: Iterable[Spent]) -> None:
    if not any(spent.cost.rounds for spent in found):
        raise nothing_in(series.folder)


def _cells(spent: Spent) -> list[str]:
    figures = (as_figure(getattr(spent.cost, key), 3) for key in QUANTITIES.values())
    return as_bounds([f"{spent.cost.rounds:.0f}", *figures], reached=spent.reached)


def _numbers(spent: Spent) -> dict[str, float | bool]:
    _, *keys = NUMBERS
    return {"reached": spent.reached, **{key: float(getattr(spent.cost, key)) for key in keys}}
