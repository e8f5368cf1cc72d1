"""`anycostfl bench`: the matrix of evidence, run further or shown."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from anycostfl import methods
from anycostfl.cli._console import Json, emit_json, err, print_table, say
from anycostfl.cli._options import Overrides
from anycostfl.config import load_preset
from anycostfl.errors import ConfigError
from anycostfl.evaluation import bench as matrix_of
from anycostfl.evaluation.bench import Cell, Matrix
from anycostfl.evaluation.compare import Case, as_figure
from anycostfl.evaluation.equal import HEADER, compare_equally
from anycostfl.files import exclusive_lock
from anycostfl.records.round import Records

ACTIONS = ("run", "status", "show")


def bench(
    action: Annotated[str, Argument(help="run, status or show")] = "status",
    tasks: Annotated[str, Option(help="Presets, separated by commas; default: all five")] = "",
    method_names: Annotated[str, Option("--methods", help="Separated by commas")] = "",
    seeds: Annotated[int, Option(min=1, help="Seeds per method: 0, 1, …")] = matrix_of.SEEDS,
    set_: Overrides = None,
    out_dir: Annotated[Path | None, Option("--out", help="Folder of all runs")] = None,
    json: Json = False,
) -> None:
    """Every method under equal budgets on five tasks: one resumable matrix of runs.

    `run` takes it further until Ctrl-C, one run at a time, breadth first; `status` says what is
    done and how many hours are left; `show` prints and writes a table for every task and level.
    """
    if action not in ACTIONS:
        raise ConfigError([f"bench: given {action!r}, must be one of {', '.join(ACTIONS)}"])
    chosen = _names(method_names) or list(matrix_of.METHODS)
    for name in chosen:
        methods.load(name)
    wanted = _names(tasks) or list(matrix_of.TASKS)
    todo = list(matrix_of.cells(wanted, chosen, seeds))
    matrix = Matrix(out_dir or Path("runs", "bench"), _watch, action == "run", set_ or ())
    if action == "run":
        _run(matrix, todo)
    elif action == "status":
        _print_status(matrix, todo, json=json)
    else:
        _show(matrix, todo, json=json)


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _watch(case: Case, records: Records) -> None:
    if len(records) >= case.config.run.rounds:
        say(f"{case.name}: {len(records)} rounds")


def _run(matrix: Matrix, todo: list[Cell]) -> None:
    matrix.folder.mkdir(parents=True, exist_ok=True)
    try:
        with exclusive_lock(matrix.folder):
            matrix_of.advance(matrix, iter(todo), say)
    except KeyboardInterrupt:
        err.print("Stopped. The same command resumes.")
        raise Exit(130) from None


def _print_status(matrix: Matrix, todo: list[Cell], *, json: bool) -> None:
    states = matrix_of.states(matrix, todo)
    if json:
        emit_json({"folder": str(matrix.folder), "states": [asdict(one) for one in states]})
        return
    rows = [
        (s.task, s.level, s.done, s.begun, s.total - s.done - s.begun, _hours(s.hours_left))
        for s in states
    ]
    done, total = sum(s.done for s in states), sum(s.total for s in states)
    columns = ("task", "budgets", ">done", ">begun", ">missing", ">hours left")
    print_table(f"{matrix.folder}: {done} of {total} runs", columns, rows)


def _hours(hours: float | None) -> str:
    return "?" if hours is None else as_figure(hours, 1)


def _show(matrix: Matrix, todo: list[Cell], *, json: bool) -> None:
    documents = {}
    for task, level in dict.fromkeys((cell.task, cell.level) for cell in todo):
        runs = matrix_of.runs_of(matrix, task, level, todo)
        if not runs:
            continue
        finding = compare_equally(runs, load_preset(task, matrix.overrides))
        name = f"{Path(task).stem}-{level}"
        finding.write(matrix.folder / name)
        documents[name] = finding.document
        if not json:
            columns = [HEADER[0], *(f">{text}" for text in HEADER[1:])]
            print_table(f"{task}, {level} budgets", columns, finding.cells)
    if json:
        emit_json(documents)
