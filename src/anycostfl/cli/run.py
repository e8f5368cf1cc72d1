"""`anycostfl run`: simulate an experiment, watch it, stop it, go on with it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from anycostfl import methods
from anycostfl.cli._console import emit_json, err, out, table
from anycostfl.cli._flower import find_engine
from anycostfl.config import Config, load_preset, to_toml
from anycostfl.errors import ConfigError, MissingExtra
from anycostfl.experiment import settle
from anycostfl.fleet import draw_cohort
from anycostfl.records import PAGE, RunWriter, totals
from anycostfl.report import draw_curves, summarise, write_page
from anycostfl.runs import Snapshot, Turn, keep, take_up
from anycostfl.types import RoundRecord


def run(
    preset: Annotated[str, typer.Argument(help="A preset, or a .toml file")] = "demo",
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value")] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Run directory")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run directory")] = None,
    workers: Annotated[int, typer.Option(help="Processes; 0 is one per core")] = 0,
    engine: Annotated[str, typer.Option(help="Where devices run: own, or flower (Ray)")] = "own",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would happen")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document at the end")] = False,
) -> None:
    """Train a simulated fleet and show what it cost. Ctrl-C stops it cleanly; --resume goes on."""
    processes = check_workers(workers)
    find_engine(engine)
    if resume is not None:
        if set_ or out_dir or dry_run:
            raise ConfigError(["--resume takes the run as it is: no --set, --out or --dry-run"])
        before = take_up(resume)
        for remark in before.remarks:
            err.print(f"[yellow]note:[/] {escape(remark)}")
        config, writer = before.config, before.writer
        records, start = before.records, before.start
    else:
        config = settle(load_preset(preset, set_ or []))
        methods.load(config.run.method)
        if dry_run:
            _show_plan(config, json=json)
            return
        writer = RunWriter.create(out_dir or _free_folder(Path(preset).stem), to_toml(config))
        records, start = [], None
    stopped = _train(config, writer, records, start, processes, engine=engine, quiet=json)
    _conclude(config, writer.folder, records, stopped=stopped, json=json)
    if stopped:
        raise typer.Exit(130)


def check_workers(workers: int) -> int:
    """How many processes to use; 0 means one per core."""
    if workers < 0:
        raise ConfigError([f"--workers: given {workers}, allowed 0 (one per core) or more"])
    return workers or len(os.sched_getaffinity(0))


def _free_folder(name: str) -> Path:
    """runs/NAME-1, or the next number that is free."""
    number = 1
    while (folder := Path("runs", f"{name}-{number}")).exists():
        number += 1
    return folder


def _train(
    config: Config,
    writer: RunWriter,
    records: list[RoundRecord],
    start: Snapshot | None,
    workers: int,
    *,
    engine: str,
    quiet: bool,
) -> bool:
    """Play the rounds into the run directory; True if Ctrl-C stopped it."""
    turns = keep(find_engine(engine)(config, workers=workers, start=start), config, writer)
    next_page = 0.0
    try:
        for turn in _watched(turns, config, records, quiet=quiet):
            records.append(turn.record)
            if len(records) % config.run.checkpoint_every == 0 and len(records) >= next_page:
                _write_views(config, writer.folder, records, curves=False)
                next_page = 1.05 * len(records)  # so that pages of long runs cost little in all
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):
            turns.close()
        return True
    return False


def _watched(
    turns: Iterator[Turn], config: Config, records: Sequence[RoundRecord], *, quiet: bool
) -> Iterator[Turn]:
    """Show progress: a live line on a terminal, one line a round elsewhere."""
    if quiet:
        yield from turns
        return
    with _progress(config, len(records)) as show:
        done: list[RoundRecord] = list(records)
        before = time.monotonic()
        for turn in turns:
            done.append(turn.record)
            now = time.monotonic()
            show(done, now - before)
            before = now
            yield turn


Show = Callable[[Sequence[RoundRecord], float], None]
"""Shows the rounds done so far and how long the last one took."""


@contextmanager
def _progress(config: Config, first: int) -> Iterator[Show]:
    if not out.is_terminal:
        yield lambda done, seconds: out.print(_line(done, seconds), soft_wrap=True)
        return
    columns = (
        TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=20),
        TextColumn("{task.description}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=out) as bar:
        task = bar.add_task("starting", total=config.run.rounds, completed=first)

        def show(done: Sequence[RoundRecord], seconds: float) -> None:
            bar.update(task, completed=len(done), description=_line(done, seconds, short=True))

        yield show


def _line(done: Sequence[RoundRecord], seconds: float, *, short: bool = False) -> str:
    spent = totals(done)
    accuracy = next((r.accuracy for r in reversed(done) if r.accuracy is not None), None)
    shown = "  –  " if accuracy is None else f"{100 * accuracy:5.2f} %"
    line = (
        f"accuracy {shown}  {spent['latency_s'] / 60:6.2f} min  {spent['energy_j'] / 1e3:7.3f} kJ  "
        f"{spent['bytes_up'] / 1e6:7.1f} MB up  {seconds:5.1f} s/round"
    )
    return line if short else f"round {len(done):4d}  {line}"


def _conclude(
    config: Config, folder: Path, records: Sequence[RoundRecord], *, stopped: bool, json: bool
) -> None:
    summary = summarise(config.run.method, config.run.target_accuracy, records)
    _write_views(config, folder, records)
    if json:
        emit_json({"folder": str(folder), "stopped": stopped, **summary})
        return
    rows = [(key.replace("_", " "), _shown(value)) for key, value in summary.items()]
    out.print(table(f"{config.summary or folder.name}: {len(records)} rounds", ("", ">"), rows))
    out.print(f"Everything is in {folder}; to look at it, open {folder / PAGE}")
    if stopped:
        out.print(f"Stopped. Go on with: anycostfl run --resume {folder}")


def _write_views(
    config: Config, folder: Path, records: Sequence[RoundRecord], *, curves: bool = True
) -> None:
    """The page and the picture of a run; if they cannot be written, the run goes on without."""
    try:
        write_page([folder])
        with suppress(MissingExtra):
            if curves:
                draw_curves({config.run.method: records}, folder / "curves.png")
    except OSError as error:
        err.print(f"[yellow]note:[/] {escape(str(error))}")


def _shown(value: object) -> str:
    if value is None:
        return "not reached"
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in value.items()) or "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _show_plan(config: Config, *, json: bool) -> None:
    """What a run would cost, from the planner alone."""
    method, seed = methods.load(config.run.method), config.run.seed
    latency, energy, able = [], [], 0
    for number in range(min(20, config.run.rounds)):
        cohort = draw_cohort(config.fleet, seed=seed, round_index=number)
        planned = method.plan(cohort.devices, config.workload, config.limits_of(config.run.method))
        latency.append(float(planned.latency_s.max()))
        energy.append(float(planned.energy_j.sum()))
        able += int(planned.feasible.sum())
    rounds = config.run.rounds
    expected = {
        "rounds": rounds,
        "devices_per_round": able / len(latency),
        "simulated_minutes": rounds * sum(latency) / len(latency) / 60,
        "energy_kj": rounds * sum(energy) / len(energy) / 1e3,
    }
    if json:
        emit_json({"config": to_toml(config), "expected": expected})
        return
    sys.stdout.write(to_toml(config) + "\n")
    rows = [(key.replace("_", " "), _shown(value)) for key, value in expected.items()]
    out.print(table("expected, from the plans of the first rounds", ("", ">"), rows))
