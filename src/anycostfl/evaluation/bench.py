"""The matrix of evidence: every method on every task, at three budget levels, seed by seed.

Breadth first: all methods and tasks at one level and one seed, then the other levels, then further
seeds. A cell is a run in a folder of its own; a run that is there is read, a run that was stopped
is resumed, so one command at a time takes the matrix further.

Every method chooses its learning rate from the same number of rates, by the same number of rounds
on a validation part of the training samples, at the paper's budgets and the first seed. The test
samples see the chosen rate alone.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anycostfl.config import Config, load_preset
from anycostfl.data.files import DataMissingError
from anycostfl.evaluation.compare import Case, Runs, Series, lasted, make_case
from anycostfl.evaluation.equal import validated_rate
from anycostfl.experiment import resolve
from anycostfl.records.round import Records
from anycostfl.records.run import CONFIG, read_journal

TASKS = ("bench-fmnist", "bench-digits", "bench-har", "bench-shakespeare", "bench-cifar")
"""The cheapest and surest to learn first."""
LEVELS = {"paper": 1.0, "tight": 0.3, "loose": 3.0}
"""What the energy budgets of a preset are multiplied by."""
METHODS = (
    *("anycostfl+/tuned", "fedavgm", "anycostfl+/without-ems", "fednova", "heterofl", "stc"),
    *("anycostfl", "fedrolex", "fjord", "fedavg", "fedadam", "fedhq", "fedprox", "fedyogi"),
    *("fedavg/one-width", "fedavg/the-able", "qsgd", "uveqfed", "anycostfl+"),
)
SEEDS = 3
RATES = (0.5, 1.0, 2.0)  # times the preset's
TRIAL = 0.25  # of the rounds


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the matrix."""

    task: str
    level: str
    method: str
    seed: int


def cells(tasks: Sequence[str], methods: Sequence[str], seeds: int) -> Iterator[Cell]:
    """Every cell, in the order in which they are run."""
    for seed in range(seeds):
        for level in LEVELS:
            for task in tasks:
                for method in methods:
                    yield Cell(task, level, method, seed)


def config_of(cell: Cell, overrides: Sequence[str] = ()) -> Config:
    """What a cell runs, but for its learning rate."""
    config = resolve(load_preset(cell.task, overrides))
    fleet, factor = config.fleet, LEVELS[cell.level]
    low, high = factor * fleet.energy_min_j, factor * fleet.energy_max_j
    return replace(
        config,
        fleet=replace(fleet, energy_min_j=low, energy_max_j=high),
        run=replace(config.run, method=cell.method, seed=cell.seed),
    )


@dataclass(frozen=True, slots=True)
class Matrix:
    """Where the cells are, how they are run, and who is told about each round."""

    folder: Path
    watch: Callable[[Case, Records], None]
    play: bool = True
    overrides: Sequence[str] = ()

    def run(self, cell: Cell) -> tuple[Config, Records]:
        """The configuration and rounds of a cell, run or resumed if need be."""
        config = config_of(cell, self.overrides)
        case = make_case(config, cell.method, self._rate(cell), cell.seed)
        series = self._series(self.folder / Path(cell.task).stem / cell.level)
        return case.config, series.advance(case, lasted(config.run.rounds))

    def _rate(self, cell: Cell) -> float:
        """The learning rate that a method chose on validation samples."""
        config = config_of(replace(cell, level="paper", seed=0), self.overrides)
        rates = [factor * config.training.learning_rate for factor in RATES]
        trial = max(1, round(TRIAL * config.run.rounds))
        series = self._series(self.folder / Path(cell.task).stem)
        return validated_rate(replace(series, rates=rates, trial=trial), config, cell.method)

    def _series(self, folder: Path) -> Series:
        if self.play:
            folder.mkdir(parents=True, exist_ok=True)
        return Series(folder, 1, self.watch, play=self.play)


def advance(matrix: Matrix, todo: Iterator[Cell], tell: Callable[[str], None]) -> None:
    """Run cell after cell; a task whose data is not at hand is told and left out."""
    missing: set[str] = set()
    for cell in todo:
        if cell.task in missing:
            continue
        try:
            matrix.run(cell)
        except DataMissingError as error:
            missing.add(cell.task)
            tell(f"{cell.task} is left out: {error}")


# --- how far it is --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class State:
    """How far one task is at one level: runs that are done and begun, and hours that are left."""

    task: str
    level: str
    done: int
    begun: int
    total: int
    hours_left: float | None


def runs_of(matrix: Matrix, task: str, level: str, todo: Sequence[Cell]) -> Runs:
    """The runs of a task and level that are done, by method."""
    found: dict[str, list[tuple[Config, Records]]] = {}
    reader = replace(matrix, play=False)
    for cell in todo:
        if (cell.task, cell.level) != (task, level) or not _is_begun(matrix, cell):
            continue
        config, records = reader.run(cell)
        if len(records) >= config.run.rounds:
            found.setdefault(cell.method, []).append((config, records))
    return found


def states(matrix: Matrix, todo: Sequence[Cell]) -> list[State]:
    """How far every task is at every level."""
    pace = {
        task: _seconds_a_round(matrix.folder / Path(task).stem) for task in {c.task for c in todo}
    }
    found = []
    for task, level in dict.fromkeys((cell.task, cell.level) for cell in todo):
        here = [cell for cell in todo if (cell.task, cell.level) == (task, level)]
        rounds = load_preset(task, matrix.overrides).run.rounds
        played = [_rounds(matrix, cell) for cell in here]
        left, seconds = sum(max(rounds - n, 0) for n in played), pace[task]
        found.append(
            State(
                task=task,
                level=level,
                done=sum(n >= rounds for n in played),
                begun=sum(0 < n < rounds for n in played),
                total=len(here),
                hours_left=None if seconds is None else left * seconds / 3600,
            )
        )
    return found


def _homes(matrix: Matrix, cell: Cell) -> list[Path]:
    """The run directories of a cell, at whatever rate."""
    name = f"{cell.method.replace('/', '-')}-lr*-seed{cell.seed}"
    return sorted((matrix.folder / Path(cell.task).stem / cell.level).glob(name))


def _is_begun(matrix: Matrix, cell: Cell) -> bool:
    return any((home / CONFIG).exists() for home in _homes(matrix, cell))


def _rounds(matrix: Matrix, cell: Cell) -> int:
    homes = [home for home in _homes(matrix, cell) if (home / CONFIG).exists()]
    return max((len(read_journal(home, growing=True)[0]) for home in homes), default=0)


def _seconds_a_round(folder: Path) -> float | None:
    """The median wall time of a round of these runs; None without any."""
    files = [path.read_text().split("\n") for path in folder.rglob("timing.jsonl")]
    lines = [line for whole in files for line in whole[:-1]]  # the last may be half-written
    seconds = [float(json.loads(line)["seconds"]) for line in lines]
    return statistics.median(seconds) if seconds else None
