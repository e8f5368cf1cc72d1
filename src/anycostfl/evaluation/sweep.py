"""The paper's Fig. 4: what each mechanism buys, what heterogeneity costs, what sub-models can do.

(a) ablation: AnycostFL and its variants, cost to a target accuracy.
(b) compute: cost to the target over the spread of ε around its mean.
(c) radio: cost to the target over the spread of distances around 400 m.
(d) widths: accuracy of every width cut from the trained model, never trained again.

Beyond the paper, attacks: accuracy with a share of attackers, as the paper aggregates and defended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from anycostfl import methods
from anycostfl.config import Config
from anycostfl.evaluation.compare import (
    Case,
    CompareError,
    Enough,
    Series,
    Spent,
    cost_to,
    lasted,
    make_case,
    reached,
    recost,
    score,
)
from anycostfl.export import accuracy_of, cut, least_alpha, open_trained
from anycostfl.fleets.attackers import ATTACKS
from anycostfl.records.checkpoint import checkpoints
from anycostfl.records.round import Records
from anycostfl.records.run import read_run
from anycostfl.runs import resume
from anycostfl.server.robust import DEFENCE, OPEN, Robustness

KINDS = ("ablation", "compute", "radio", "widths", "attacks")
SPREADS: Mapping[str, Sequence[float]] = {
    "compute": (0.0, 1e-27, 2e-27, 3e-27, 4e-27),  # standard deviation of ε; the mean is 7.5e-27
    "radio": (0.0, 50.0, 100.0, 150.0, 200.0),  # standard deviation of the distance, metres
}
MEAN_DISTANCE_M = 400.0
WIDTHS = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)

Curves = Mapping[str, Sequence[tuple[float, Spent]]]


def ablation(series: Series, config: Config) -> dict[str, tuple[Config, Records]]:
    """AnycostFL whole and without each of its parts, to the target."""
    enough = reached(config.run.target_accuracy)
    found = {}
    for name in ("anycostfl", *methods.variants("anycostfl")):
        case = _best_case(series, config, name)
        found[name] = case.config, series.advance(case, enough)
    return found


def _best_case(series: Series, config: Config, method: str) -> Case:
    """A method's run at its best learning rate of those that the series tries."""
    return make_case(config, method, series.best_rate(config, method), config.run.seed)


def spread_over(config: Config, kind: str, value: float) -> Config:
    """The same experiment with a fleet that differs more, or less."""
    if kind == "compute":
        return replace(config, fleet=replace(config.fleet, energy_coefficient_std=value))
    fleet = replace(config.fleet, distance_mean_m=MEAN_DISTANCE_M, distance_std_m=value)
    return replace(config, fleet=fleet)


def heterogeneity(
    series: Series, config: Config, kind: str, names: Sequence[str], values: Sequence[float]
) -> Curves:
    """Cost to the target of each method over the spread."""
    target = config.run.target_accuracy
    for value in values:
        spread_over(config, kind, value)  # a mistake is told before hours of rounds
    curves: dict[str, list[tuple[float, Spent]]] = {}
    for name in names:
        plain = _best_case(series, config, name)
        curves[name] = []
        for value in values:
            spread = spread_over(plain.config, kind, value)
            case = Case(f"{plain.name}-{kind}{value:g}", spread)
            records = _trained_or_paid(series, plain, case, reached(target))
            curves[name].append((value, cost_to(records, spread, target)))
    return curves


def _trained_or_paid(series: Series, plain: Case, case: Case, enough: Enough) -> Records:
    """A method that fixes α and β trains once; another fleet only pays differently."""
    first = series.advance(plain, lasted(1))
    if recost(first[:1], case.config) is None:
        return series.advance(case, enough)
    paid = recost(series.advance(plain, enough), case.config)
    return paid if paid is not None else series.advance(case, enough)


def widths(series: Series, config: Config, names: Sequence[str]) -> dict[str, list[float | None]]:
    """Accuracy at every width of `WIDTHS`, by method, after all rounds (or as far as it got).

    None where the model has no sub-model as narrow.
    """
    found = {}
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
            accuracy_of(trained, cut(trained, alpha)) if alpha >= least else None
            for alpha in WIDTHS
        ]
    return found


def _saved(home: Path) -> int:
    """How many rounds the newest whole checkpoint has."""
    point = read_run(home).checkpoint
    return point.rounds if point else 0


def attacks(series: Series, config: Config) -> dict[str, dict[str, float | None]]:
    """Accuracy by kind of attack, also without any, and by defence; None where rounds are missing.

    It is the mean over the last quarter of the rounds. The defence is the configuration's, if it
    changes one, else `DEFENCE`.
    """
    rules = config.aggregation
    defences = {"open": OPEN, "defended": DEFENCE if rules == Robustness() else rules}
    plain = make_case(config, config.run.method, config.training.learning_rate, config.run.seed)
    found: dict[str, dict[str, float | None]] = {}
    for kind in ("none", *ATTACKS):
        attack = replace(config.attack, kind=kind)
        found[kind] = {}
        for name, rules in defences.items():
            changed = replace(plain.config, attack=attack, aggregation=rules)
            case = Case(f"{plain.name}-attack-{kind}-{name}", changed)
            records = series.advance(case, lasted(config.run.rounds))
            whole = len(records) >= config.run.rounds
            found[kind][name] = score(records, config.run.rounds) if whole else None
    return found
