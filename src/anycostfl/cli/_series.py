"""What `compare` and `sweep` share: options, lists, progress, going on alone."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from anycostfl.cli._console import emit_json, err, out, say, table
from anycostfl.config import Config, load_preset
from anycostfl.errors import ConfigError
from anycostfl.evaluation.compare import TRIAL, Case, CompareError, Series
from anycostfl.experiment import resolve
from anycostfl.files import exclusive_lock, open_nofollow, writing_to
from anycostfl.records.round import Records
from anycostfl.simulate import count_workers

EVERY = 10  # rounds between two lines of progress
OTHERWISE, AGAIN = "Choose another --out", "The same command tries again"

Target = Annotated[float | None, typer.Option(help="Accuracy to reach; default: the preset's")]
Rounds = Annotated[int | None, typer.Option(help="Most rounds of a run; default: the preset's")]
Rates = Annotated[
    str,
    typer.Option("--learning-rates", "--rates", help="Learning rates to try, separated by commas"),
]
Trial = Annotated[
    int | None,
    typer.Option(min=1, help=f"Rounds to judge each of --learning-rates by; default: {TRIAL}"),
]
OutDir = Annotated[Path | None, typer.Option("--out", help="Folder of all runs")]
Workers = Annotated[int, typer.Option(help="Processes; 0: one per core")]
Background = Annotated[
    bool, typer.Option("--background", help="Return at once, run in the background")
]
OnlyShow = Annotated[bool, typer.Option("--show", help="Only show the results so far")]


def asked(
    preset: str, overrides: Sequence[str] | None, target: float | None, rounds: int | None
) -> Config:
    """The preset with what the options say instead."""
    changes = list(overrides or [])
    changes += [f"run.target_accuracy={target}"] if target is not None else []
    changes += [f"run.rounds={rounds}"] if rounds is not None else []
    return resolve(load_preset(preset, changes))


def sets_method(overrides: Sequence[str] | None) -> bool:
    """Whether --set names a method; a command that runs several has no use for one."""
    return any(item.partition("=")[0].strip() == "run.method" for item in overrides or [])


def series_in(
    folder: Path, workers: int, tried: tuple[str, int | None], *, only_show: bool, quiet: bool
) -> Series:
    """The runs of a folder as the options ask; `tried` are --learning-rates and --trial."""
    rates, trial = numbers_of(tried[0], "--learning-rates"), tried[1]
    if trial is not None and not rates:
        raise ConfigError(["--trial: only with --learning-rates"])
    if wrong := [rate for rate in rates if not 0 < rate < math.inf]:
        raise ConfigError([f"--learning-rates: given {rate:g}, must be > 0" for rate in wrong])
    return Series(
        folder,
        count_workers(workers),
        progress(quiet=quiet),
        play=not only_show,
        rates=rates,
        trial=TRIAL if trial is None else trial,
    )


def names_of(text: str, known: Sequence[str], load: Callable[[str], object]) -> list[str]:
    """The names in a list separated by commas, or all; an unknown one is an error."""
    given = [name for part in text.split(",") if (name := part.strip())]
    chosen = list(known) if text == "all" else given
    if not chosen:
        raise ConfigError([f"--methods: given {text!r}, must be all, or names separated by commas"])
    for name in chosen:
        load(name)
    return chosen


def numbers_of(text: str, option: str) -> list[float]:
    """The numbers in a list separated by commas."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(
            [f"{option}: given {text!r}, must be numbers separated by commas"]
        ) from error


def progress(*, quiet: bool) -> Callable[[Case, Records], None]:
    """Say where a run is, every few rounds."""

    def watch(case: Case, records: Records) -> None:
        if quiet or len(records) % EVERY:
            return
        seen = [r.accuracy for r in records if r.accuracy is not None]
        shown = f"{100 * seen[-1]:5.2f} %" if seen else "  –  "
        say(f"{case.name:34} round {len(records):4d}  accuracy {shown}")

    return watch


@contextmanager
def working_on(series: Series) -> Iterator[None]:
    """Keep other processes away while running; Ctrl-C ends with how to resume."""
    folder = series.folder
    if not series.play and not folder.is_dir():
        raise CompareError(f"there are no runs in {folder} yet; without --show they are run")
    try:
        with writing_to(folder, OTHERWISE):
            folder.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(folder) if series.play else nullcontext():
            yield
    except KeyboardInterrupt:
        err.print("Stopped. The same command resumes.")
        raise typer.Exit(130) from None


def run_in_background(series: Series, *, json: bool) -> None:
    """Start the same command without --background, detached, its output in a file."""
    if not series.play:
        raise ConfigError(["--background: not with --show, which runs nothing"])
    folder = series.folder
    with writing_to(folder, OTHERWISE):
        folder.mkdir(parents=True, exist_ok=True)
        log = open(folder / "log.txt", "a", opener=open_nofollow)  # noqa: SIM115 - closed below
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
        emit_json({"process": process.pid, "log": str(folder / "log.txt")})
    else:
        err.print(f"Process {process.pid} runs in the background; see {folder / 'log.txt'}")


def show(title: str, header: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print a table whose figures are aligned to the right."""
    out.print(table(title, [header[0], *(f">{name}" for name in header[1:])], cells))
