"""What `compare` and `sweep` share: options, runs, progress, what becomes of a finding."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from typer import Exit, Option

from anycostfl import methods
from anycostfl.cli._console import emit_json, err, print_table, say
from anycostfl.cli._rounds import last_metric
from anycostfl.errors import ConfigError
from anycostfl.evaluation.compare import TRIAL, Case, CompareError, Finding, Series
from anycostfl.files import exclusive_lock, open_nofollow, writing_to
from anycostfl.records.round import Records
from anycostfl.records.run import ELSEWHERE
from anycostfl.simulate import count_workers

EVERY = 10  # rounds between two lines of progress

Target = Annotated[float | None, Option(help="Value of the metric to reach; default: the preset's")]
Rounds = Annotated[int | None, Option(help="Most rounds of a run; default: the preset's")]
Rates = Annotated[
    str, Option("--learning-rates", "--rates", help="Learning rates to try, separated by commas")
]
Trial = Annotated[
    int | None,
    Option(min=1, help=f"Rounds to judge each of --learning-rates by; default: {TRIAL}"),
]
Folder = Annotated[Path | None, Option("--out", help="Folder of all runs")]
Background = Annotated[bool, Option("--background", help="Return at once, run in the background")]
OnlyShow = Annotated[bool, Option("--show", help="Only show the results so far")]


def sets_method(overrides: Sequence[str] | None) -> bool:
    """Whether --set names a method; a command that runs several has no use for one."""
    return any(item.partition("=")[0].strip() == "run.method" for item in overrides or [])


def methods_in(text: str) -> list[str]:
    """The methods in a list separated by commas, or all; an unknown one is an error."""
    given = [name for part in text.split(",") if (name := part.strip())]
    chosen = methods.names() if text == "all" else given
    if not chosen:
        raise ConfigError([f"--methods: given {text!r}, must be all, or names separated by commas"])
    for name in chosen:
        methods.load(name)
    return chosen


def numbers_in(text: str, option: str) -> list[float]:
    """The numbers in a list separated by commas."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        problem = f"{option}: given {text!r}, must be numbers separated by commas"
        raise ConfigError([problem]) from error


def open_series(
    folder: Path, workers: int, rates: str, trial: int | None, *, only_show: bool, quiet: bool
) -> Series:
    """The runs of a folder as the options ask."""
    chosen = numbers_in(rates, "--learning-rates")
    if trial is not None and not chosen:
        raise ConfigError(["--trial: only with --learning-rates"])
    if wrong := [rate for rate in chosen if not 0 < rate < math.inf]:
        raise ConfigError([f"--learning-rates: given {rate:g}, must be > 0" for rate in wrong])

    def watch(case: Case, records: Records) -> None:
        if not quiet and len(records) % EVERY == 0:
            shown = last_metric(records, case.config.metric)
            say(f"{case.name:34} round {len(records):4d}  {shown}")

    processes, trial = count_workers(workers), trial or TRIAL
    return Series(folder, processes, watch, play=not only_show, rates=chosen, trial=trial)


def conduct(
    study: Callable[[], Finding],
    series: Series,
    name: str,
    title: str,
    *,
    background: bool,
    json: bool,
) -> None:
    """Do what a study does, here or in the background; write what it finds, and show it."""
    if background:
        _run_in_background(series, json=json)
        return
    if not series.play and not series.folder.is_dir():
        raise CompareError(f"there are no runs in {series.folder} yet; without --show they are run")
    try:
        with writing_to(series.folder, ELSEWHERE):
            series.folder.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(series.folder) if series.play else nullcontext():
            found = study()
            if series.play:
                found.write(series.folder / name)
    except KeyboardInterrupt:
        err.print("Stopped. The same command resumes.")
        raise Exit(130) from None
    if json:
        emit_json({"folder": str(series.folder), **found.document})
        return
    print_table(title, [found.header[0], *(f">{text}" for text in found.header[1:])], found.cells)
    if series.play:
        files = ", ".join((".md", *found.numbers, ".png"))
        say(f"Everything is in {series.folder}: {name}{files}, and one folder a run")


def _run_in_background(series: Series, *, json: bool) -> None:
    """Start the same command without --background, detached, its output in a file."""
    if not series.play:
        raise ConfigError(["--background: not with --show, which runs nothing"])
    path = series.folder / "log.txt"
    with writing_to(series.folder, ELSEWHERE):
        series.folder.mkdir(parents=True, exist_ok=True)
        log = open(path, "a", opener=open_nofollow)  # noqa: SIM115 - closed below
    again = [word for word in sys.argv[1:] if word != "--background"]
    with log:
        process = subprocess.Popen(  # noqa: S603 - this very program
            [sys.executable, "-P", "-m", "anycostfl", *again],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    if json:
        emit_json({"process": process.pid, "log": str(path)})
    else:
        err.print(f"Process {process.pid} runs in the background; see {path}")
