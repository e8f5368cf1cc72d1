"""Methods under equal budgets: crossings of smoothed curves, areas, paired ratios over seeds.

smoothed metric     mean of the last `WINDOW` evaluations
area                mean of the smoothed metric over log cost, between costs that all reach
paired ratio        exp(mean ± t·s/√n) of log(cost of one / cost of the other), seed by seed
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from anycostfl.config import Config
from anycostfl.evaluation.compare import Finding, Runs, Series, over_budget
from anycostfl.evaluation.compare import curves as curve_lines
from anycostfl.metrics import MetricInfo
from anycostfl.records.round import Records, Totals, running_totals
from anycostfl.report import draw_curves

WINDOW = 3  # evaluations
REFERENCE = "anycostfl+/tuned"  # whose energy to the target others are compared with
START = 0.2  # of the smallest final cost: where areas begin
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for a two-sided 95 % interval, by degrees of freedom from one on."""

COSTS: Mapping[str, Callable[[Totals], float]] = {
    "rounds": lambda spent: float(spent.rounds),
    "energy_j": lambda spent: spent.energy_j,
    "latency_s": lambda spent: spent.latency_s,
    "bytes_up": lambda spent: float(spent.bytes_up),
    "bytes_down": lambda spent: float(spent.bytes_down),
}


def validated_rate(series: Series, config: Config, method: str) -> float:
    """The learning rate at which a method is best on a validation part of the training samples."""
    trials = replace(series, folder=series.folder / "trials")
    if series.play and len(series.rates) > 1:
        trials.folder.mkdir(parents=True, exist_ok=True)
    held_out = replace(config, data=replace(config.data, validation=True))
    return trials.best_rate(held_out, method)


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """The smoothed metric of a run where it was evaluated, and what had been spent by then."""

    metric: npt.NDArray[np.float64]
    spent: Sequence[Totals]

    def costs(self, name: str) -> npt.NDArray[np.float64]:
        """One cost at every evaluation."""
        return np.array([COSTS[name](spent) for spent in self.spent])


def curve_of(records: Records) -> Curve:
    """A run's smoothed curve; before `WINDOW` evaluations, the mean of those there are."""
    totals = running_totals(records)[1:]
    seen = [(r.metric, t) for r, t in zip(records, totals, strict=True) if r.metric is not None]
    values = [value for value, _ in seen]
    smooth = [statistics.fmean(values[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(values))]
    return Curve(np.array(smooth), [spent for _, spent in seen])


def crossing(curve: Curve, info: MetricInfo, target: float | None) -> Totals | None:
    """What had been spent when the smoothed curve first reached the target; None if never."""
    if target is None:
        return None
    pairs = zip(curve.metric.tolist(), curve.spent, strict=True)
    return next((spent for value, spent in pairs if info.reaches(value, target)), None)


def area(curve: Curve, cost: str, ends: tuple[float, float]) -> float:
    """The mean of the metric over log cost between two costs; linear between evaluations."""
    spent = np.log(curve.costs(cost))
    low, high = np.log(ends)
    inside = spent[(spent > low) & (spent < high)]
    at = np.concatenate([[low], inside, [high]])
    values = np.interp(at, spent, curve.metric)
    return float(np.trapezoid(values, at) / (high - low)) if high > low else math.nan


def common_ends(curves: Sequence[Curve], cost: str) -> tuple[float, float]:
    """From a fifth of the least final cost, or where the last curve begins, to that cost."""
    last = min(float(curve.costs(cost)[-1]) for curve in curves)
    first = max(float(curve.costs(cost)[0]) for curve in curves)
    return max(START * last, min(first, last)), last


def paired_ratio(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of one / other and its 95 % interval, seed by seed; NaN ends of one seed.

    More than ten seeds count as ten for the interval, which errs on the wide side.
    """
    logs = [math.log(a / b) for a, b in zip(one, other, strict=True)]
    mean, count = statistics.fmean(logs), len(logs)
    if count < 2:
        return math.exp(mean), math.nan, math.nan
    half = T_95[min(count, 10) - 2] * statistics.stdev(logs) / math.sqrt(count)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


@dataclass(frozen=True, slots=True)
class Standing:
    """How a method stands: means over its seeds.

    Costs are those to the target, of all rounds where a seed never reached it; `reached` counts
    the seeds that did.
    """

    label: str
    rate: float
    seeds: int
    reached: int
    final: float  # smoothed, after all rounds
    area: float  # over log energy
    worst: float | None  # worst tenth of the owners, in the last evaluations
    taking_part: float  # share of the devices asked that computed anything
    over: float  # share of them that exceeded a budget
    cost: Mapping[str, float]
    times: tuple[float, float, float] | None = None  # the reference's energy, with its interval


def standings(runs: Runs, target: float | None) -> list[Standing]:
    """Every method, the best area first."""
    curves = {
        method: [curve_of(records) for _, records in of if _is_evaluated(records)]
        for method, of in runs.items()
    }
    whole = [curve for of in curves.values() for curve in of]
    if not whole:
        return []
    ends = common_ends(whole, "energy_j")
    found = [_standing(m, runs[m], of, target, ends) for m, of in curves.items() if of]
    if REFERENCE in runs:
        found = [
            replace(one, times=paired_to(runs, one.label, REFERENCE, target, "energy_j"))
            for one in found
        ]
    info = next(iter(runs.values()))[0][0].metric
    better = -1 if info.higher_is_better else 1
    return sorted(found, key=lambda one: better * one.area)


def _is_evaluated(records: Records) -> bool:
    return any(record.metric is not None for record in records)


def _standing(
    label: str,
    runs: Sequence[tuple[Config, Records]],
    curves: Sequence[Curve],
    target: float | None,
    ends: tuple[float, float],
) -> Standing:
    config, asked = runs[0][0], [d for _, records in runs for r in records for d in r.devices]
    crossed = [crossing(curve, config.metric, target) for curve in curves]
    spent = [there or curve.spent[-1] for there, curve in zip(crossed, curves, strict=True)]
    worst = [value for _, records in runs if (value := _worst(records)) is not None]
    return Standing(
        label=label,
        rate=config.training.learning_rate,
        seeds=len(curves),
        reached=sum(there is not None for there in crossed),
        final=statistics.fmean(float(curve.metric[-1]) for curve in curves),
        area=statistics.fmean(area(curve, "energy_j", ends) for curve in curves),
        worst=statistics.fmean(worst) if worst else None,
        taking_part=sum(d.compute_s > 0 for d in asked) / max(len(asked), 1),
        over=statistics.fmean(over_budget(records, config) for config, records in runs),
        cost={name: statistics.fmean(map(of, spent)) for name, of in COSTS.items()},
    )


def _worst(records: Records) -> float | None:
    """The mean of the last evaluations' metric of the worst tenth of the owners."""
    seen = [
        value for r in records for name, value in r.others.items() if name.endswith("worst tenth")
    ]
    return statistics.fmean(seen[-WINDOW:]) if seen else None


def paired_to(
    runs: Runs, one: str, other: str, target: float | None, cost: str
) -> tuple[float, float, float] | None:
    """The ratio of two methods' costs to the target over the seeds where both reach it."""
    by_seed = [
        {
            config.run.seed: crossing(curve_of(records), config.metric, target)
            for config, records in runs[m]
        }
        for m in (one, other)
    ]
    both = [seed for seed in by_seed[0] if by_seed[0][seed] and by_seed[1].get(seed)]
    if not both:
        return None
    pairs = [[COSTS[cost](there) for seed in both if (there := by[seed])] for by in by_seed]
    return paired_ratio(pairs[0], pairs[1])


HEADER = (
    *(
        "method",
        "rate",
        "seeds",
        "final",
        "area",
        "worst tenth",
        "reached",
        "rounds",
        "kJ",
        "times",
    ),
    *("min", "MB up", "MB down", "taking part %", "over %"),
)


def as_row(one: Standing, info: MetricInfo) -> list[str]:
    """A standing as cells; costs of all rounds, where the target was missed, as bounds."""
    cost = one.cost
    figures = [f"{cost['rounds']:.0f}", f"{cost['energy_j'] / 1e3:.3g}"]
    figures += [_times(one.times), f"{cost['latency_s'] / 60:.3g}"]
    figures += [f"{cost[name] / 1e6:.3g}" for name in ("bytes_up", "bytes_down")]
    if one.reached < one.seeds:
        figures = [f"> {figure}" if figure else "" for figure in figures]
    shown = [info.figure(value) for value in (one.final, one.area)]
    worst = info.figure(one.worst) if one.worst is not None else ""
    ends = [f"{100 * one.taking_part:.0f}", f"{100 * one.over:.0f}"]
    reached = f"{one.reached}/{one.seeds}"
    return [one.label, f"{one.rate:g}", str(one.seeds), *shown, worst, reached, *figures, *ends]


def _times(found: tuple[float, float, float] | None) -> str:
    """A ratio with its interval, if there are seeds enough for one."""
    if found is None:
        return ""
    ratio, low, high = found
    return f"{ratio:.2f}" if math.isnan(low) else f"{ratio:.2f} ({low:.2f} to {high:.2f})"


def compare_equally(runs: Runs, config: Config) -> Finding:
    """The table of methods under equal budgets, its numbers and the curves of the first seeds."""
    found, info = standings(runs, config.run.target), config.metric
    return Finding(
        header=HEADER,
        cells=[as_row(one, info) for one in found],
        document={
            "metric": info.name,
            "target": config.run.target,
            "rows": [asdict(one) for one in found],
        },
        numbers={".curves.csv": curve_lines(runs, info)},
        draw=partial(draw_curves, {one.label: runs[one.label][0][1] for one in found}, info),
    )
