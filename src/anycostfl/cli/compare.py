"""`anycostfl compare`: every method on equal terms, and the paper's figures beside ours."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from anycostfl import methods
from anycostfl.cli._console import emit_json, out
from anycostfl.cli._series import (
    go_on_alone,
    names_of,
    numbers_of,
    progress,
    show,
    stopping_cleanly,
)
from anycostfl.cli.run import check_workers
from anycostfl.compare import (
    HEADER,
    Row,
    Series,
    as_cells,
    lasted,
    make_case,
    make_row,
    only_one,
    reached,
    to_csv,
    to_markdown,
)
from anycostfl.config import Config, load_preset
from anycostfl.errors import ConfigError, MissingExtra
from anycostfl.report import draw_curves
from anycostfl.types import RoundRecord


def compare(
    preset: Annotated[str, typer.Argument(help="A preset, or a .toml file")],
    method_names: Annotated[
        str, typer.Option("--methods", help="all, or names with commas")
    ] = "all",
    seeds: Annotated[int, typer.Option(help="Runs of each method: seeds 0, 1, …")] = 1,
    target: Annotated[float | None, typer.Option(help="Accuracy to reach [preset's]")] = None,
    rounds: Annotated[int | None, typer.Option(help="At most so many [preset's]")] = None,
    rates: Annotated[str, typer.Option(help="Learning rates to choose from [preset's]")] = "",
    trial: Annotated[int, typer.Option(help="Rounds after which a rate is judged")] = 30,
    full: Annotated[bool, typer.Option("--full", help="Go on beyond the target")] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value")] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder of all runs")] = None,
    workers: Annotated[int, typer.Option(help="Processes; 0 is one per core")] = 0,
    background: Annotated[
        bool, typer.Option("--background", help="Return at once, go on alone")
    ] = False,
    only_show: Annotated[bool, typer.Option("--show", help="Only show what is done")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document at the end")] = False,
) -> None:
    """Run every method to a target accuracy; what is done already is not repeated.

    With --rates, each method is tried at every rate for --trial rounds (seed 0) and goes on with
    the one that did best. Ctrl-C stops cleanly; the same command goes on.
    """
    config = _asked(load_preset(preset, set_ or []), target, rounds)
    if seeds < 1:
        raise ConfigError([f"--seeds: given {seeds}, allowed 1 or more"])
    chosen = names_of(method_names, methods.names(), methods.load)
    grid = numbers_of(rates, "--rates") or [config.training.learning_rate]
    name = Path(preset).stem
    folder = out_dir or Path("runs", f"compare-{name}")
    if background:
        go_on_alone(folder)
        return
    goal = config.run.target_accuracy
    enough = lasted(config.run.rounds) if full else reached(goal)
    rows: list[Row] = []
    curves: dict[str, list[RoundRecord]] = {}
    with only_one(folder), stopping_cleanly():
        series = Series(folder, check_workers(workers), progress(quiet=json), play=not only_show)
        for method in chosen:
            rate = series.best_rate(config, method, grid, trial)
            cases = [make_case(config, method, rate, seed) for seed in range(seeds)]
            runs = [(c.config, r) for c in cases if (r := series.advance(c, enough))]
            if runs:
                rows.append(make_row(method, runs, goal))
                curves[method] = list(runs[0][1])
    cells = as_cells(rows, name)
    stem = folder / ("tuned" if len(grid) > 1 else "results")
    stem.with_suffix(".md").write_text(to_markdown(HEADER, cells))
    stem.with_suffix(".csv").write_text(to_csv(rows))
    with suppress(MissingExtra):
        draw_curves(curves, stem.with_suffix(".png"))
    if json:
        emit_json({"folder": str(folder), "target": goal, "rows": [asdict(row) for row in rows]})
        return
    show(f"{config.summary or name}: cost to {100 * goal:g} %", HEADER, cells)
    out.print(f"Everything is in {folder}: {stem.name}.md, .csv and .png, and one folder a run")


def _asked(config: Config, target: float | None, rounds: int | None) -> Config:
    run = config.run
    return replace(
        config,
        run=replace(
            run,
            target_accuracy=run.target_accuracy if target is None else target,
            rounds=run.rounds if rounds is None else rounds,
        ),
    )
