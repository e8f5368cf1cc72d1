"""`anycostfl compare`: every method on equal terms, and the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from anycostfl import methods
from anycostfl.cli._console import Json, emit_json, note, say
from anycostfl.cli._options import Overrides, Preset
from anycostfl.cli._rounds import nothing_learnt
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
    run_in_background,
    series_in,
    sets_method,
    show,
    working_on,
)
from anycostfl.config import Config, load_preset, preset_names
from anycostfl.errors import AnycostError, ConfigError, MissingExtraError
from anycostfl.evaluation.compare import (
    HEADER,
    Enough,
    Row,
    Series,
    as_cells,
    lasted,
    make_case,
    make_row,
    nothing_in,
    reached,
    to_csv,
    to_curves,
    to_markdown,
)
from anycostfl.files import atomic_write, writing_to
from anycostfl.records.round import Records
from anycostfl.report import draw_curves

Runs = Mapping[str, Sequence[tuple[Config, Records]]]
"""The runs of every method, one per seed."""


def compare(
    preset: Preset,
    method_names: Annotated[
        str,
        typer.Option(
            "--methods", help=f"all, or names separated by commas: {', '.join(methods.names())}"
        ),
    ] = "all",
    seeds: Annotated[int, typer.Option(help="Seeds per method: run.seed, run.seed + 1, …")] = 1,
    target: Target = None,
    rounds: Rounds = None,
    rates: Rates = "",
    trial: Trial = None,
    full: Annotated[bool, typer.Option("--full", help="Run all rounds, beyond the target")] = False,
    set_: Overrides = None,
    out_dir: OutDir = None,
    workers: Workers = 0,
    background: Background = False,
    only_show: OnlyShow = False,
    json: Json = False,
) -> None:
    """Run every method to a target accuracy; what is done already is not repeated.

    With --learning-rates, each method is tried at every rate (all for a quarter of --trial rounds,
    the better half for half of it, and so on; larger ones too, while the largest is the best) and
    continues with the one that did best. Ctrl-C stops cleanly; the same command resumes. The table
    shows all methods that have runs in the folder.
    """
    if sets_method(set_):
        raise ConfigError(["--set run.method: has no effect; --methods names the methods to run"])
    config = asked(preset, set_, target, rounds)
    if seeds < 1:
        raise ConfigError([f"--seeds: given {seeds}, must be >= 1"])
    chosen = names_of(method_names, methods.names(), methods.load)
    name = Path(preset).stem
    folder = out_dir or Path("runs", f"compare-{name}")
    goal = config.run.target_accuracy
    enough = lasted(config.run.rounds) if full else reached(goal)
    series = series_in(folder, workers, (rates, trial), only_show=only_show, quiet=json)
    if background:
        run_in_background(series, json=json)
        return
    with working_on(series):
        played = {m: _runs_of(series, config, m, seeds, enough) for m in chosen}
    runs = _with_earlier(played, replace(series, play=False), config, seeds, enough)
    rows = [make_row(method, of_method, goal) for method, of_method in runs.items()]
    cells = as_cells(rows, _papers(preset, goal))
    if not rows:
        raise nothing_in(folder)
    _note_the_idle(runs)
    stem = folder / ("tuned" if len(series.rates) > 1 else "results")
    if series.play:
        _write(stem, rows, runs, cells)
    if json:
        emit_json({"folder": str(folder), "target": goal, "rows": [asdict(row) for row in rows]})
        return
    show(f"{config.summary or name}: cost to {100 * goal:g} %", HEADER, cells)
    if series.play:
        files = f"{stem.name}.md, .csv, .curves.csv and .png"
        say(f"Everything is in {folder}: {files}, a folder a run")


def _with_earlier(played: Runs, there: Series, config: Config, seeds: int, enough: Enough) -> Runs:
    """What was run, and what earlier commands ran for the same table, in its order."""
    found = dict(played)
    for method in set(methods.names()) - set(played):
        with suppress(AnycostError):  # other settings, another table; or damaged
            found[method] = _runs_of(there, config, method, seeds, enough)
    order = dict.fromkeys((*methods.names(), *played))
    return {method: found[method] for method in order if found.get(method)}


def _note_the_idle(runs: Runs) -> None:
    """Which runs learnt nothing, and why."""
    for method, of_method in runs.items():
        for why in filter(None, (nothing_learnt(records) for _, records in of_method)):
            note(f"{method}: {why}")


def _write(stem: Path, rows: Sequence[Row], runs: Runs, cells: Sequence[Sequence[str]]) -> None:
    """The table, its figures unrounded, the curves and their picture."""
    first = {method: list(of[0][1]) for method, of in runs.items()}
    with writing_to(stem.parent, AGAIN):
        atomic_write(stem.with_suffix(".md"), to_markdown(HEADER, cells).encode())
        atomic_write(stem.with_suffix(".csv"), to_csv(rows).encode())
        atomic_write(stem.with_suffix(".curves.csv"), to_curves(runs).encode())
        with suppress(MissingExtraError):
            draw_curves(first, stem.with_suffix(".png"))


def _papers(preset: str, goal: float) -> str:
    """The paper's experiment of that name, if it went for the same goal; else none."""
    same = preset in preset_names() and load_preset(preset).run.target_accuracy == goal
    return preset if same else ""


def _runs_of(
    series: Series, config: Config, method: str, seeds: int, enough: Enough
) -> list[tuple[Config, Records]]:
    """The runs of a method at its best rate, one per seed."""
    rate, first = series.best_rate(config, method), config.run.seed
    cases = [make_case(config, method, rate, seed) for seed in range(first, first + seeds)]
    return [(c.config, records) for c in cases if (records := series.advance(c, enough))]
