"""Experiments side by side (Sec. V): many runs under one folder, each resumed where it stopped.

A case is one run: a method, a learning rate, a seed, a fleet. `Series.advance` runs a case until
it is enough; what is done already is read, not repeated. Costs to a target become rows,
and rows a table beside the paper's.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path

import numpy as np

from anycostfl.config import Config, fingerprint, parse_config, profiles_of, to_toml
from anycostfl.errors import AnycostError, MissingExtraError
from anycostfl.files import atomic_write, writing_to
from anycostfl.metrics import MetricInfo
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
from anycostfl.report import draw_curves
from anycostfl.rounds import charge, is_evaluated
from anycostfl.runs import begin, check_files, journal, resume
from anycostfl.simulate import simulate

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
    changed = replace(
        config,
        run=replace(config.run, method=method, seed=seed),
        training=replace(config.training, learning_rate=rate),
    )
    return Case(f"{method.replace('/', '-')}-lr{rate:g}-seed{seed}", changed)


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

    def advance(self, case: Case, enough: Enough) -> list[RoundRecord]:
        """Run a case until it is enough or its rounds are over; resume what is there."""
        home, config = self.folder / case.name, case.config
        begun = (home / CONFIG).exists()
        done: list[RoundRecord] = []
        if begun:
            _check_same(case, home)
            records, _ = read_journal(home, growing=not self.play)
            done = _as_due(records[: config.run.rounds], config)  # more for another comparison
        if not self.play or enough(done) or len(done) >= config.run.rounds:
            return done
        before = resume(home) if begun else None
        # Before anything is written: a start that fails leaves nothing behind.
        rounds = simulate(config, workers=self.workers, start=before.saved if before else None)
        writer = before.writer if before else begin(home, config)
        writer.reconfigure(to_toml(config))
        done = _as_due(before.records, config) if before else []
        with closing(journal(rounds, config, writer)) as results:
            for result in results:
                done.append(result.record)
                self.watch(case, done)
                if enough(done):
                    break
        return done

    def best_rate(self, config: Config, method: str) -> float:
        """The learning rate at which a method is best in a trial; without, its own.

        By halving: all rates run a quarter of the trial, the better half of them half of it, and
        the better half of those, but at least two, all of it. While the largest rate of all is the
        best, one twice as large is tried too.
        """
        best = list(self.rates) or [config.training.learning_rate]
        if len(best) == 1:
            return best[0]
        for parts in (4, 2, 1):
            best = self._ranked(config, method, best, self.trial / parts)
            best = best[: max(2, math.ceil(len(best) / 2))]
        largest = max(self.rates)
        while best[0] == largest:
            largest *= 2
            best = self._ranked(config, method, [best[0], largest], self.trial)
        return best[0]

    def _ranked(
        self, config: Config, method: str, rates: Sequence[float], rounds: float
    ) -> list[float]:
        """Learning rates, the best first after that many rounds, up to an evaluation."""
        every = config.run.evaluate_every
        end = min(every * math.ceil(rounds / every), config.run.rounds)
        scores = {}
        for rate in rates:
            case = make_case(config, method, rate, config.run.seed)
            late = mean_late(self.advance(case, lasted(end)), end)
            better = 1 if config.metric.higher_is_better else -1
            scores[rate] = -math.inf if late is None else better * late
        return sorted(rates, key=lambda rate: -scores[rate])


def _as_due(records: Records, config: Config) -> list[RoundRecord]:
    """Without the metrics of what was the last round once, when fewer were asked for."""
    return [
        r if is_evaluated(config.run, r.round) else replace(r, metric=None, others={})
        for r in records
    ]


def _check_same(case: Case, home: Path) -> None:
    """A run counts only as the experiment it began as, though perhaps with another end."""
    check_files(home, case.config)
    if fingerprint(parse_config(read_config(home), str(home))) != fingerprint(case.config):
        raise CompareError(
            f"{case.name} was begun with other settings; choose another --out, or remove it"
        )


def reached(config: Config) -> Enough:
    """Whether the target has been reached."""
    target, info = config.run.target, config.metric
    return lambda records: rounds_to(target, info, records) is not None


def lasted(rounds: int) -> Enough:
    """Whether that many rounds are over."""
    return lambda records: len(records) >= rounds


def mean_late(records: Records, rounds: int) -> float | None:
    """The mean metric over the last quarter of the rounds; None if a run diverged there."""
    late = (r.metric for r in records[:rounds] if r.round >= 0.75 * rounds - 1)
    seen = [value for value in late if value is not None]
    return statistics.fmean(seen) if seen and all(map(math.isfinite, seen)) else None


def goal_of(config: Config) -> str:
    """What runs are for, in words."""
    target = config.run.target
    return "all rounds" if target is None else f"to {config.metric.show(target)}"


# --- costs ----------------------------------------------------------------------------------------


COSTS = {  # name, title and digits in a table
    "rounds": ("rounds", 0),
    "energy_kj": ("energy kJ", 2),
    "latency_min": ("latency min", 2),
    "tflops": ("TFLOP", 1),  # two FLOPs per multiply-add
    "gigabytes": ("GB", 3),
}
Cost = Mapping[str, float]
"""What it took to get somewhere, by the names above."""


def cost_of(spent: Totals, config: Config) -> Cost:
    """What rounds cost, in the units of the paper's table."""
    per_sample = config.workload.epochs * config.workload.flops_per_sample
    return {
        "rounds": float(spent.rounds),
        "energy_kj": spent.energy_j / 1e3,
        "latency_min": spent.latency_s / 60,
        "tflops": spent.passes * per_sample / 1e12,
        "gigabytes": spent.bytes_up / 1e9,
    }


@dataclass(frozen=True, slots=True)
class Spent:
    """What was spent until the target was first reached, or in vain."""

    cost: Cost
    reached: bool


def cost_to(records: Records, config: Config) -> Spent:
    """What it cost until the target was first reached, else all of it."""
    rounds = rounds_to(config.run.target, config.metric, records)
    return Spent(cost_of(total(records[:rounds]), config), reached=rounds is not None)


def over_budget(records: Records, config: Config) -> float:
    """The share of those asked to train who took more energy or time than they had for it."""
    asked = [d for r in records for d in r.devices if d.compute_s]
    slack = 1 + 1e-6  # a budget that is used up is not exceeded
    over = sum(
        d.energy_j > slack * d.budget_j
        or d.latency_s > slack * (d.budget_s or config.fleet.latency_s)
        for d in asked
    )
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
    return replace(record, devices=tuple(paid), step_bytes=0)


# --- findings -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """What runs show: a table for people, the same as JSON and as rows of CSV files, a figure."""

    header: Sequence[str]
    cells: Sequence[Sequence[str]]
    document: Mapping[str, object]
    numbers: Mapping[str, Sequence[Sequence[object]]]  # by suffix; the first row has the names
    draw: Callable[[Path], None]

    def write(self, stem: Path) -> None:
        """Write the table, its numbers and, where matplotlib is there, the figure."""
        with writing_to(stem.parent, "The same command tries again"):
            atomic_write(stem.with_suffix(".md"), self.markdown().encode())
            for suffix, rows in self.numbers.items():
                text = io.StringIO(newline="")
                csv.writer(text).writerows(rows)
                atomic_write(stem.with_suffix(suffix), text.getvalue().encode())
            with suppress(MissingExtraError):
                self.draw(stem.with_suffix(".png"))

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [self.header, ["---"] * len(self.header), *self.cells]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def as_bounds(figures: Sequence[str], *, reached: bool) -> list[str]:
    """What did not get to the target costs more than was spent."""
    return [figure if reached else f"> {figure}" for figure in figures]


def as_figure(value: float, digits: int) -> str:
    """A cost with that many digits after the point; tiny costs keep significant digits."""
    few = 0 < value < 10.0 ** (1 - digits)
    return f"{value:.2g}" if few else f"{value:.{digits}f}"


# --- methods side by side -------------------------------------------------------------------------

Runs = Mapping[str, Sequence[tuple[Config, Records]]]
"""The runs of every method, one per seed."""


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
    best: float | None  # value of the metric
    spread: float | None  # standard deviation of the best values; one seed has none


def make_row(label: str, runs: Sequence[tuple[Config, Records]]) -> Row:
    """Summarise the runs of one method, one per seed."""
    spent = [cost_to(records, config) for config, records in runs]
    found = (_best(records, config.metric) for config, records in runs)
    best = [value for value in found if value is not None]
    return Row(
        label=label,
        rate=runs[0][0].training.learning_rate,
        seeds=len(runs),
        rounds=max(len(records) for _, records in runs),
        cost={name: statistics.fmean(each.cost[name] for each in spent) for name in COSTS},
        reached=all(each.reached for each in spent),
        whole=all(len(records) >= config.run.rounds for config, records in runs),
        over=statistics.fmean(over_budget(records, config) for config, records in runs),
        best=statistics.fmean(best) if best else None,
        spread=statistics.stdev(best) if len(best) > 1 else None,
    )


def _best(records: Records, info: MetricInfo) -> float | None:
    return info.best([r.metric for r in records if r.metric is not None])


def papers_rows(preset: str) -> Mapping[str, Sequence[float]]:
    """The paper's own figures for a preset, by method; none if it has no such experiment."""
    text = resources.files("anycostfl").joinpath("evaluation", "papers_table.toml").read_text()
    rows: Mapping[str, Sequence[float]] = tomllib.loads(text).get(preset, {})
    return rows


def compare_runs(runs: Runs, config: Config, preset: str) -> Finding:
    """What every method cost to the target, beside the paper's figures for a preset."""
    rows, info = [make_row(method, of_method) for method, of_method in runs.items()], config.metric
    titles = [title for title, _ in COSTS.values()]
    best = f"best {info.unit}".rstrip()
    return Finding(
        header=["method", "rate", "seeds", *titles, "over budget %", best],
        cells=as_cells(rows, papers_rows(preset), info),
        document={
            "metric": info.name,
            "target": config.run.target,
            "rows": [asdict(row) for row in rows],
        },
        numbers={".csv": rows_as_numbers(rows), ".curves.csv": curves(runs, info)},
        draw=partial(draw_curves, {method: of[0][1] for method, of in runs.items()}, info),
    )


def as_cells(
    rows: Sequence[Row], paper: Mapping[str, Sequence[float]], info: MetricInfo
) -> list[list[str]]:
    """Rows as text, with the ratio to AnycostFL in brackets and the paper's line below each."""
    base = next((row.cost for row in rows if row.label == "anycostfl" and row.reached), None)
    cells = []
    for row in rows:
        costs = as_bounds(_cost_cells(row.cost, base if row.reached else None), reached=row.reached)
        best = f"{'' if row.whole else info.bound}{info.figure(row.best)}"
        best += f" ± {info.figure(row.spread)}" if row.spread is not None else ""
        over = as_figure(100 * row.over, 0)
        cells.append([row.label, f"{row.rate:g}", str(row.seeds), *costs, over, best])
        if row.label in paper:
            *figures, mean, std = paper[row.label]
            its_base = dict(zip(COSTS, paper["anycostfl"][:-2], strict=True))
            costs = _cost_cells(dict(zip(COSTS, figures, strict=True)), its_base)
            cells.append(["  paper", "", "3", *costs, "", f"{mean:.2f} ± {std:.2f}"])
    return cells


def _cost_cells(cost: Cost, base: Cost | None) -> list[str]:
    """Every figure, and its ratio to the base where that has one."""
    texts = []
    for name, (_, digits) in COSTS.items():
        times = _times(cost[name] / base[name]) if base and base[name] else ""
        texts.append(as_figure(cost[name], digits) + times)
    return texts


def _times(ratio: float) -> str:
    """A ratio to three digits, so that large ones are not folded in a table."""
    return f" ({ratio:.{2 - (ratio >= 10) - (ratio >= 100)}f}×)"


def rows_as_numbers(rows: Sequence[Row]) -> list[Sequence[object]]:
    """One line per method, figures unrounded."""
    names = ["method", "rate", "seeds", "played", "reached", *COSTS, "over", "best", "std"]
    lines: list[Sequence[object]] = [names]
    for row in rows:
        known = [row.label, row.rate, row.seeds, row.rounds, row.reached]
        lines.append([*known, *row.cost.values(), row.over, row.best, row.spread])
    return lines


def curves(runs: Runs, info: MetricInfo) -> list[Sequence[object]]:
    """One line per run and evaluation: the metric, and what had been spent by then."""
    costs = [name for name in COSTS if name != "rounds"]
    lines: list[Sequence[object]] = [["method", "rate", "seed", "round", info.name, *costs]]
    for method, of_method in runs.items():
        for config, records in of_method:
            known = [method, config.training.learning_rate, config.run.seed]
            for record, spent_by_then in zip(records, running_totals(records)[1:], strict=True):
                if record.metric is not None:
                    cost = cost_of(spent_by_then, config)
                    figures = (f"{cost[name]:.6g}" for name in costs)
                    lines.append([*known, record.round + 1, record.metric, *figures])
    return lines
