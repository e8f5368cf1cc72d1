"""Experiments side by side (Sec. V): many runs under one folder, each going on where it stopped.

A case is one run: a method, a learning rate, a seed, a fleet. `Series.advance` runs a case until
it is enough; what is done already is read, not repeated. Costs to a target accuracy become rows,
and rows a table beside the paper's.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, fields, replace
from importlib import resources
from pathlib import Path

import numpy as np

from anycostfl.config import Config, fingerprint, parse_config, profiles_of, to_toml
from anycostfl.errors import AnycostError
from anycostfl.loop import Rounds
from anycostfl.planning.draw import Profile, draw_cohort
from anycostfl.records.round import (
    Records,
    RoundRecord,
    Status,
    Totals,
    rounds_to,
    running_totals,
    total,
)
from anycostfl.records.run import CONFIG, read_config, read_journal
from anycostfl.rounds import charge, is_evaluated
from anycostfl.runs import begin, check_files, journal, resume
from anycostfl.simulate import simulate

SLACK = 1 + 1e-6  # a budget that is used up is not exceeded
TRIAL = 30  # rounds after which a learning rate is judged, if nothing else is said


class CompareError(AnycostError):
    """Runs that do not belong together."""


def nothing_in(folder: Path) -> CompareError:
    """That there is nothing to show."""
    return CompareError(f"{folder} holds no run of this; without --show they are run")


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a comparison: its directory's name and what it does."""

    name: str
    config: Config


def make_case(config: Config, method: str, rate: float, seed: int) -> Case:
    """The experiment with another method, learning rate and seed."""
    name = f"{method.replace('/', '-')}-lr{rate:g}-seed{seed}"
    changed = replace(
        config,
        run=replace(config.run, method=method, seed=seed),
        training=replace(config.training, learning_rate=rate),
    )
    return Case(name, changed)


# --- running --------------------------------------------------------------------------------------

Enough = Callable[[Records], bool]


@dataclass(frozen=True, slots=True)
class Series:
    """A folder of runs, how to run them, and who is told about each round."""

    folder: Path
    workers: int
    watch: Callable[[Case, Records], None]
    play: bool = True  # otherwise existing runs are only read
    rates: Sequence[float] = ()  # learning rates to choose from, by method
    trial: int = TRIAL  # rounds of the trial that chooses

    def advance(self, case: Case, enough: Enough) -> Records:
        """Run a case until it is enough or its rounds are over; resume what is there."""
        home = self.folder / case.name
        done: Records = ()
        if (home / CONFIG).exists():
            _check_same(case, home)
            done, _ = read_journal(home, growing=not self.play)
            done = done[: case.config.run.rounds]  # more were run for another comparison
            done = tuple(_if_due(record, case.config) for record in done)
        if not self.play or enough(done) or len(done) >= case.config.run.rounds:
            return done
        before, rounds = _open(case, home, self.workers)
        records = [_if_due(record, case.config) for record in before]
        with closing(rounds):
            for result in rounds:
                records.append(result.record)
                self.watch(case, records)
                if enough(records):
                    break
        return records

    def best_rate(self, config: Config, method: str) -> float:
        """The learning rate at which a method is most accurate in a trial; without, its own.

        By halving: all rates run a quarter of the trial, the better half of them half of it, and
        the better half of those, but at least two, all of it. While the largest rate of all is the
        best, one twice as large is tried too.
        """
        rates = self.rates or [config.training.learning_rate]
        if len(rates) == 1:
            return rates[0]
        quarter, half, whole = (_evaluated(config, self.trial / parts) for parts in (4, 2, 1))
        best = self._ranked(config, method, rates, quarter)[: max(2, -(-len(rates) // 2))]
        best = self._ranked(config, method, best, half)[: max(2, -(-len(best) // 2))]
        best = self._ranked(config, method, best, whole)
        largest = max(rates)
        while best[0] == largest:
            largest *= 2
            best = self._ranked(config, method, [best[0], largest], whole)
        return best[0]

    def _ranked(
        self, config: Config, method: str, rates: Sequence[float], rounds: int
    ) -> list[float]:
        """Learning rates, the one that is most accurate after that many rounds first."""
        cases = [make_case(config, method, rate, config.run.seed) for rate in rates]
        scores = [score(self.advance(case, lasted(rounds)), rounds) for case in cases]
        return [rates[i] for i in sorted(range(len(rates)), key=lambda i: -scores[i])]


def _evaluated(config: Config, rounds: float) -> int:
    """At least that many rounds, ending with an evaluation, but no more than there are."""
    every = config.run.evaluate_every
    return min(every * math.ceil(rounds / every), config.run.rounds)


def _if_due(record: RoundRecord, config: Config) -> RoundRecord:
    """Without the accuracy of what was the last round once, when fewer were asked for."""
    return record if is_evaluated(config.run, record.round) else replace(record, accuracy=None)


def _open(case: Case, home: Path, workers: int) -> tuple[list[RoundRecord], Rounds]:
    """The rounds done so far, and those to come; a start that fails leaves nothing behind."""
    config = case.config
    if not (home / CONFIG).exists():
        rounds = simulate(config, workers=workers)
        return [], journal(rounds, config, begin(home, config))
    before = resume(home)
    rounds = simulate(config, workers=workers, start=before.saved)
    before.writer.reconfigure(to_toml(config))
    return before.records, journal(rounds, config, before.writer)


def _check_same(case: Case, home: Path) -> None:
    """A run counts only as the experiment it began as, though perhaps with another end."""
    check_files(home, case.config)
    if fingerprint(parse_config(read_config(home), str(home))) != fingerprint(case.config):
        raise CompareError(
            f"{case.name} was begun with other settings; choose another --out, or remove it"
        )


def reached(target: float) -> Enough:
    """Whether the target accuracy has been seen."""
    return lambda records: rounds_to(target, records) is not None


def lasted(rounds: int) -> Enough:
    """Whether that many rounds are over."""
    return lambda records: len(records) >= rounds


def score(records: Records, rounds: int) -> float:
    """How good a learning rate is: mean accuracy over the last quarter of the rounds."""
    late = [
        r.accuracy
        for r in records[:rounds]
        if r.accuracy is not None and r.round >= 0.75 * rounds - 1
    ]
    return statistics.fmean(late) if late else 0.0


# --- costs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """What it took to get somewhere; FLOPs are two per multiply-add."""

    rounds: float
    energy_kj: float
    latency_min: float
    tflops: float
    gigabytes: float


def cost_of(spent: Totals, config: Config) -> Cost:
    """What rounds cost, in the units of the paper's table."""
    per_sample = config.workload.epochs * config.workload.flops_per_sample
    return Cost(
        rounds=spent.rounds,
        energy_kj=spent.energy_j / 1e3,
        latency_min=spent.latency_s / 60,
        tflops=spent.passes * per_sample / 1e12,
        gigabytes=spent.bytes_up / 1e9,
    )


@dataclass(frozen=True, slots=True)
class Spent:
    """What was spent until the target accuracy was first seen, or in vain."""

    cost: Cost
    reached: bool


def cost_to(records: Records, config: Config, target: float) -> Spent:
    """What it cost until the target accuracy was first seen, else all of it."""
    rounds = rounds_to(target, records)
    return Spent(cost_of(total(records[:rounds]), config), reached=rounds is not None)


def over_budget(records: Records, config: Config) -> float:
    """The share of those asked to train who took more energy or time than they had for it."""
    asked = [d for r in records for d in r.devices if d.compute_s]
    latency_s = config.fleet.latency_s
    over = sum(d.energy_j > SLACK * d.budget_j or d.latency_s > SLACK * latency_s for d in asked)
    return over / len(asked) if asked else 0.0


def recost(records: Records, config: Config) -> Records | None:
    """The same training paid for by another fleet; None if it would have been planned otherwise.

    Methods that fix α and β train alike whatever the fleet, so heterogeneity changes only what they
    pay. Bytes stay as they were encoded.
    """
    profiles = profiles_of(config.fleet)
    again = [_recost_round(record, config, profiles) for record in records]
    paid = [record for record in again if record is not None]
    return paid if len(paid) == len(again) else None


def _recost_round(
    record: RoundRecord, config: Config, profiles: Mapping[str, Profile]
) -> RoundRecord | None:
    taking_part = [d.device for d in record.devices]
    suspended = any(d.status is Status.SUSPENDED for d in record.devices)
    if suspended or max(taking_part, default=0) >= config.fleet.devices:
        return None
    samples = np.ones(config.fleet.devices)
    samples[taking_part] = [d.samples for d in record.devices]
    cohort = draw_cohort(
        config.fleet,
        seed=config.run.seed,
        round_index=record.round,
        samples=samples,
        profiles=profiles,
    )
    if taking_part != cohort.index.tolist():
        return None
    planned = config.plan(cohort.devices)
    paid = []
    for i, was in enumerate(record.devices):
        chosen = planned[i]
        if not np.allclose((was.alpha, was.beta), (chosen.alpha, chosen.beta)):
            return None
        if not chosen.alpha:  # sits out in both fleets
            paid.append(was)
            continue
        moved = replace(
            was,
            rate_bps=float(cohort.devices.rate_bps[i]),
            distance_m=float(cohort.distance_m[i]),
            frequency_hz=chosen.frequency_hz,
        )
        paid.append(charge(moved, cohort.devices, i, config.workload))
    return RoundRecord(record.round, record.accuracy, tuple(paid))


# --- tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: the mean over seeds."""

    label: str
    rate: float
    seeds: int
    rounds: int  # of the longest run
    cost: Cost  # to the target, or of all rounds
    reached: bool  # the target, by every seed
    whole: bool  # all rounds were run, not only those to the target
    over: float  # share of the devices asked, round by round, that paid more than their budgets
    best: float
    spread: float | None  # standard deviation of the best accuracies; one seed has none


def make_row(label: str, runs: Sequence[tuple[Config, Records]], target: float) -> Row:
    """Summarise the runs of one method, one per seed."""
    spent = [cost_to(records, config, target) for config, records in runs]
    best = [max((r.accuracy or 0.0 for r in records), default=0.0) for _, records in runs]
    return Row(
        label=label,
        rate=runs[0][0].training.learning_rate,
        seeds=len(runs),
        rounds=max(len(records) for _, records in runs),
        cost=_mean([each.cost for each in spent]),
        reached=all(each.reached for each in spent),
        whole=all(len(records) >= config.run.rounds for config, records in runs),
        over=statistics.fmean(over_budget(records, config) for config, records in runs),
        best=statistics.fmean(best),
        spread=statistics.stdev(best) if len(best) > 1 else None,
    )


def _mean(costs: Sequence[Cost]) -> Cost:
    columns = zip(*(astuple(c) for c in costs), strict=True)
    return Cost(*(statistics.fmean(column) for column in columns))


def papers_rows(preset: str) -> Mapping[str, Sequence[float]]:
    """The paper's own figures for a preset, by method; none if it has no such experiment."""
    text = resources.files("anycostfl").joinpath("evaluation", "papers_table.toml").read_text()
    rows: Mapping[str, Sequence[float]] = tomllib.loads(text).get(preset, {})
    return rows


COSTS = ("rounds", "energy kJ", "latency min", "TFLOP", "GB")
HEADER = ("method", "rate", "seeds", *COSTS, "over budget %", "best %")


def as_cells(rows: Sequence[Row], preset: str) -> list[list[str]]:
    """Rows as text, with the ratio to AnycostFL in brackets and the paper's line below each."""
    paper = papers_rows(preset)
    base = next((row.cost for row in rows if row.label == "anycostfl" and row.reached), None)
    cells = []
    for row in rows:
        spread = f" ± {100 * row.spread:.2f}" if row.spread is not None else ""
        figures = _cost_cells(row.cost, base if row.reached else None)
        cells.append(
            [
                row.label,
                f"{row.rate:g}",
                str(row.seeds),
                *as_bounds(figures, reached=row.reached),
                as_figure(100 * row.over, 0),
                f"{'' if row.whole else '≥ '}{100 * row.best:.2f}{spread}",
            ]
        )
        if row.label in paper:
            *costs, best, std = paper[row.label]
            figures = _cost_cells(Cost(*costs), Cost(*paper["anycostfl"][:-2]))
            cells.append(["  paper", "", "3", *figures, "", f"{best:.2f} ± {std:.2f}"])
    return cells


def as_bounds(figures: Sequence[str], *, reached: bool) -> list[str]:
    """What did not get to the target costs more than was spent."""
    return [figure if reached else f"> {figure}" for figure in figures]


def _cost_cells(cost: Cost, base: Cost | None) -> list[str]:
    """Every figure, and its ratio to the base where that has one."""
    texts = []
    for name, digits in (
        ("rounds", 0),
        ("energy_kj", 2),
        ("latency_min", 2),
        ("tflops", 1),
        ("gigabytes", 3),
    ):
        value, beside = getattr(cost, name), getattr(base, name, 0)
        texts.append(as_figure(value, digits) + (_times(value / beside) if beside else ""))
    return texts


def _times(ratio: float) -> str:
    """A ratio to three digits, so that large ones are not folded in a table."""
    return f" ({ratio:.{2 - (ratio >= 10) - (ratio >= 100)}f}×)"


def as_figure(value: float, digits: int) -> str:
    """A cost with that many digits after the point; tiny costs keep significant digits."""
    few = 0 < value < 10.0 ** (1 - digits)
    return f"{value:.2g}" if few else f"{value:.{digits}f}"


def to_markdown(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def to_csv(rows: Sequence[Row]) -> str:
    """One line per method, figures unrounded."""
    out = io.StringIO()
    writer = csv.writer(out)
    names = [item.name for item in fields(Cost)]
    writer.writerow(["method", "rate", "seeds", "played", "reached", *names, "over", "best", "std"])
    for row in rows:
        figures = [*astuple(row.cost), row.over, row.best, "" if row.spread is None else row.spread]
        writer.writerow([row.label, row.rate, row.seeds, row.rounds, row.reached, *figures])
    return out.getvalue()


def to_curves(runs: Mapping[str, Sequence[tuple[Config, Records]]]) -> str:
    """One line per run and evaluation: the accuracy, and what had been spent by then."""
    out = io.StringIO()
    writer = csv.writer(out)
    spent = [item.name for item in fields(Cost) if item.name != "rounds"]
    writer.writerow(["method", "rate", "seed", "round", "accuracy", *spent])
    for method, of_method in runs.items():
        for config, records in of_method:
            known = config.training.learning_rate, config.run.seed
            for record, spent_by_then in zip(records, running_totals(records)[1:], strict=True):
                if record.accuracy is not None:
                    number, cost = record.round + 1, cost_of(spent_by_then, config)
                    values = (f"{getattr(cost, name):.6g}" for name in spent)
                    writer.writerow([method, *known, number, record.accuracy, *values])
    return out.getvalue()
