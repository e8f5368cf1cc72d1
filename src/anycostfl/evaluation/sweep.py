"""The paper's Fig. 4: what each mechanism buys, what heterogeneity costs, what sub-models can do.

(a) ablation: AnycostFL and its variants, cost to a target.
(b) compute: cost to the target over the spread of ε around its mean.
(c) radio: cost to the target over the spread of distances around 400 m.
(d) widths: the metric of every width cut from the trained model, never trained again.

Beyond the paper, attacks: the metric with a share of attackers, as the paper aggregates and
defended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from anycostfl import methods
from anycostfl.config import Config
from anycostfl.evaluation.compare import (
    Case,
    CompareError,
    Finding,
    Series,
    Spent,
    as_bounds,
    as_figure,
    cost_to,
    goal_of,
    lasted,
    make_case,
    mean_late,
    nothing_in,
    reached,
    recost,
)
from anycostfl.export import cut, least_alpha, metric_of, open_trained
from anycostfl.fleets.attackers import ATTACKS
from anycostfl.metrics import MetricInfo
from anycostfl.records.checkpoint import checkpoints
from anycostfl.records.round import Records
from anycostfl.records.run import read_run
from anycostfl.report import draw_bars, draw_lines
from anycostfl.runs import resume
from anycostfl.server.robust import DEFENCE, OPEN, Robustness

SPREADS: Mapping[str, Sequence[float]] = {
    "compute": (0.0, 1e-27, 2e-27, 3e-27, 4e-27),  # standard deviation of ε; the mean is 7.5e-27
    "radio": (0.0, 50.0, 100.0, 150.0, 200.0),  # standard deviation of the distance, metres
}
MEAN_DISTANCE_M = 400.0
WIDTHS = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
QUANTITIES = {"energy, kJ": "energy_kj", "latency, min": "latency_min", "uploaded, GB": "gigabytes"}
NUMBERS = ("reached", "rounds", *QUANTITIES.values())


def _best_case(series: Series, config: Config, method: str) -> Case:
    """A method's run at its best learning rate of those that the series tries."""
    return make_case(config, method, series.best_rate(config, method), config.run.seed)


# --- costs to a target ----------------------------------------------------------------------------


def ablation(series: Series, config: Config) -> Finding:
    """AnycostFL whole and without each of its parts, to the target."""
    found: dict[str, Spent] = {}
    for name in ("anycostfl", *methods.variants("anycostfl")):
        case = _best_case(series, config, name)
        found[name] = cost_to(series.advance(case, reached(case.config)), case.config)
    _check_any(series, found.values())
    bars = [  # one that did not get to the target would be higher
        name.removeprefix("anycostfl/") + ("" if spent.reached else ", not reached")
        for name, spent in found.items()
    ]
    panels = {q: [spent.cost[key] for spent in found.values()] for q, key in QUANTITIES.items()}
    numbers = {name: _numbers(spent) for name, spent in found.items()}
    rows = [[name, *each.values()] for name, each in numbers.items()]
    return Finding(
        header=[goal_of(config), "rounds", *QUANTITIES],
        cells=[[name, *_cells(spent)] for name, spent in found.items()],
        document={"ablation": numbers},
        numbers={".csv": [["method", *NUMBERS], *rows]},
        draw=partial(draw_bars, bars, panels),
    )


def heterogeneity(
    series: Series, config: Config, kind: str, names: Sequence[str], values: Sequence[float]
) -> Finding:
    """Cost to the target of each method over the spread of ε (`compute`) or distance (`radio`)."""
    for value in values:
        spread_over(config, kind, value)  # a mistake is told before hours of rounds
    points: list[tuple[str, float, Spent]] = []
    for name in names:
        plain = _best_case(series, config, name)
        for value in values:
            case = Case(f"{plain.name}-{kind}{value:g}", spread_over(plain.config, kind, value))
            records = _trained_or_paid(series, plain, case)
            points.append((name, value, cost_to(records, case.config)))
    _check_any(series, (spent for _, _, spent in points))
    label, scale = "standard deviation of the distance, m", 1.0
    if kind == "compute":
        label, scale = "standard deviation of ε, 1e-27", 1e27

    def curve(name: str, key: str) -> tuple[list[float], list[float]]:
        there = [(x, spent.cost) for n, x, spent in points if n == name and spent.reached]
        return [scale * x for x, _ in there], [cost[key] for _, cost in there]

    panels = {q: {name: curve(name, key) for name in names} for q, key in QUANTITIES.items()}
    rows = [[name, value, *_numbers(spent).values()] for name, value, spent in points]
    return Finding(
        header=["method", "spread", "rounds", *QUANTITIES],
        cells=[[name, f"{value:g}", *_cells(spent)] for name, value, spent in points],
        document={
            kind: {n: [(x, _numbers(spent)) for m, x, spent in points if m == n] for n in names}
        },
        numbers={".csv": [["method", "spread", *NUMBERS], *rows]},
        draw=partial(draw_lines, panels, label),
    )


def spread_over(config: Config, kind: str, value: float) -> Config:
    """The same experiment with a fleet that differs more, or less."""
    if kind == "compute":
        return replace(config, fleet=replace(config.fleet, energy_coefficient_std=value))
    fleet = replace(config.fleet, distance_mean_m=MEAN_DISTANCE_M, distance_std_m=value)
    return replace(config, fleet=fleet)


def _trained_or_paid(series: Series, plain: Case, case: Case) -> Records:
    """A method that fixes α and β trains once; another fleet only pays differently."""
    enough = reached(case.config)
    first = series.advance(plain, lasted(1))
    if recost(first[:1], case.config) is not None:
        paid = recost(series.advance(plain, enough), case.config)
        if paid is not None:
            return paid
    return series.advance(case, enough)


def _check_any(series: Series, found: Iterable[Spent]) -> None:
    if not any(spent.cost["rounds"] for spent in found):
        raise nothing_in(series.folder)


def _cells(spent: Spent) -> list[str]:
    figures = (as_figure(spent.cost[key], 3) for key in QUANTITIES.values())
    return as_bounds([f"{spent.cost['rounds']:.0f}", *figures], reached=spent.reached)


def _numbers(spent: Spent) -> dict[str, float | bool]:
    return {"reached": spent.reached, **{key: spent.cost[key] for key in NUMBERS[1:]}}


# --- the metric -----------------------------------------------------------------------------------


def widths(series: Series, config: Config, names: Sequence[str]) -> Finding:
    """The metric at every width of `WIDTHS`, by method, after all rounds (or as far as it got).

    None where the model has no sub-model as narrow.
    """
    info, found = config.metric, dict[str, list[float | None]]()
    for name in names:
        case = _best_case(series, config, name)
        home = series.folder / case.name
        records = series.advance(case, lasted(config.run.rounds))
        if records and series.play and _saved(home) < len(records):
            resume(home)  # its last checkpoint is lost: the rounds since the one before go again
            records = series.advance(case, lasted(config.run.rounds))
        if not records or not checkpoints(home):
            continue
        if _saved(home) != len(records):
            raise CompareError(
                f"{case.name} has {len(records)} rounds of the {config.run.rounds} asked for, and "
                f"a checkpoint of {_saved(home)}; ask for that many --rounds, or another --out"
            )
        trained = open_trained(home)
        least = least_alpha(trained.net)
        found[name] = [
            metric_of(trained, cut(trained, alpha).module) if alpha >= least else None
            for alpha in WIDTHS
        ]
    if not found:
        raise nothing_in(series.folder)
    lines = {
        name: (WIDTHS, [math.nan if v is None else info.factor * v for v in values])
        for name, values in found.items()
    }
    rows = [[name, *values] for name, values in found.items()]
    return Finding(
        header=["method", *(f"α = {alpha:g}" for alpha in WIDTHS)],
        cells=[[name, *map(info.figure, values)] for name, values in found.items()],
        document={"widths": {"alpha": list(WIDTHS), **found}},
        numbers={".csv": [["method", *WIDTHS], *rows]},
        draw=partial(draw_lines, {f"test {info.title}": lines}, "width factor α"),
    )


def _saved(home: Path) -> int:
    """How many rounds the newest whole checkpoint has."""
    point = read_run(home).checkpoint
    return point.rounds if point else 0


def attacks(series: Series, config: Config) -> Finding:
    """The metric by kind of attack, also without any, and by defence; None where rounds lack.

    It is the mean over the last quarter of the rounds. The defence is the configuration's, if it
    changes one, else `DEFENCE`.
    """
    rules = config.aggregation
    defences = {"open": OPEN, "defended": DEFENCE if rules == Robustness() else rules}
    plain = make_case(config, config.run.method, config.training.learning_rate, config.run.seed)
    info, found = config.metric, dict[str, dict[str, float | None]]()
    for kind in ("none", *ATTACKS):
        attack = replace(config.attack, kind=kind)
        found[kind] = {}
        for name, rules in defences.items():
            changed = replace(plain.config, attack=attack, aggregation=rules)
            case = Case(f"{plain.name}-attack-{kind}-{name}", changed)
            records = series.advance(case, lasted(config.run.rounds))
            whole = len(records) >= config.run.rounds
            found[kind][name] = mean_late(records, config.run.rounds) if whole else None
    if all(value is None for by in found.values() for value in by.values()):
        raise nothing_in(series.folder)
    clean, rows = found["none"]["open"], [[kind, *by.values()] for kind, by in found.items()]
    panels = {
        f"{defence}: {info.title}": [info.factor * (by[defence] or 0.0) for by in found.values()]
        for defence in defences
    }
    return Finding(
        header=["attack", f"open, {info.title}", "change", f"defended, {info.title}", "change"],
        cells=[
            [kind, *_against(clean, by["open"], info), *_against(clean, by["defended"], info)]
            for kind, by in found.items()
        ],
        document={"attacks": found},
        numbers={".csv": [["attack", *defences], *rows]},
        draw=partial(draw_bars, list(found), panels),
    )


def _against(clean: float | None, value: float | None, info: MetricInfo) -> list[str]:
    """A value, and how far it is from the clean run's."""
    if clean is None or value is None:
        return ["–", "–"]
    return [info.figure(value), f"{info.factor * (value - clean):+.3g}"]
