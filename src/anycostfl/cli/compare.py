"""`anycostfl compare`: every method on equal terms, and the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Option

from anycostfl import methods
from anycostfl.cli import _series as shared
from anycostfl.cli._console import Json, note
from anycostfl.cli._options import Overrides, Preset, Workers, load_config
from anycostfl.cli._rounds import nothing_learnt
from anycostfl.config import Config, load_preset, preset_names
from anycostfl.errors import AnycostError, ConfigError
from anycostfl.evaluation import compare as evaluation
from anycostfl.evaluation.compare import Enough, Finding, Runs, Series, make_case
from anycostfl.evaluation.equal import compare_equally, validated_rate
from anycostfl.experiment import resolve
from anycostfl.records.round import Records

METHODS = f"all, or names separated by commas: {', '.join(methods.names())}"


def compare(
    preset: Preset,
    method_names: Annotated[str, Option("--methods", help=METHODS)] = "all",
    seeds: Annotated[int, Option(help="Seeds per method: run.seed, run.seed + 1, …")] = 1,
    target: shared.Target = None,
    rounds: shared.Rounds = None,
    rates: shared.Rates = "",
    trial: shared.Trial = None,
    full: Annotated[bool, Option("--full", help="Run all rounds, beyond the target")] = False,
    budgets: Annotated[str, Option(help="own, or strict: every method keeps them")] = "",
    set_: Overrides = None,
    out_dir: shared.Folder = None,
    workers: Workers = 0,
    background: shared.Background = False,
    only_show: shared.OnlyShow = False,
    json: Json = False,
) -> None:
    """Run every method to a target of the metric; what is done already is not repeated.

    With --learning-rates, each method is tried at every rate (all for a quarter of --trial rounds,
    the better half for half of it, and so on; larger ones too, while the largest is the best) and
    continues with the one that did best. With strict budgets, every method keeps those of every
    device, rates are chosen on a validation part of the training samples, and all rounds are run:
    targets are met by smoothed curves. Ctrl-C stops cleanly; the same command resumes. The table
    shows all methods that have runs in the folder.
    """
    if shared.sets_method(set_):
        raise ConfigError(["--set run.method: has no effect; --methods names the methods to run"])
    set_ = [*(set_ or []), *([f"run.budgets={budgets}"] if budgets else [])]
    config = resolve(load_config(preset, set_, rounds, target))
    strict = config.run.budgets == "strict"
    if seeds < 1:
        raise ConfigError([f"--seeds: given {seeds}, must be >= 1"])
    chosen, name = shared.methods_in(method_names), Path(preset).stem
    folder, goal = out_dir or Path("runs", f"compare-{name}"), config.run.target
    series = shared.open_series(folder, workers, rates, trial, only_show=only_show, quiet=json)
    enough = evaluation.lasted(config.run.rounds) if full or strict else evaluation.reached(config)

    def study() -> Finding:
        runs = _runs(series, config, chosen, seeds, enough)
        if not runs:
            raise evaluation.nothing_in(folder)
        for method, of_method in runs.items():
            for why in filter(None, (nothing_learnt(records) for _, records in of_method)):
                note(f"{method}: {why}")
        if strict:
            return compare_equally(runs, config)
        # The paper's experiment of that name, if it went for the same goal.
        same = preset in preset_names() and load_preset(preset).run.target == goal
        return evaluation.compare_runs(runs, config, preset if same else "")

    shared.conduct(
        study,
        series,
        "tuned" if len(series.rates) > 1 else "results",
        f"{config.summary or name}: cost {evaluation.goal_of(config)}",
        background=background,
        json=json,
    )


def _runs(
    series: Series, config: Config, chosen: Sequence[str], seeds: int, enough: Enough
) -> Runs:
    """The runs of the chosen methods, and what earlier commands ran for the same table."""

    def of_method(series: Series, method: str) -> list[tuple[Config, Records]]:
        first, strict = config.run.seed, config.run.budgets == "strict"
        rate = (
            validated_rate(series, config, method) if strict else series.best_rate(config, method)
        )
        cases = [make_case(config, method, rate, seed) for seed in range(first, first + seeds)]
        return [(c.config, records) for c in cases if (records := series.advance(c, enough))]

    found = {method: of_method(series, method) for method in chosen}
    for method in set(methods.names()) - set(chosen):
        with suppress(AnycostError):  # other settings, another table; or damaged
            found[method] = of_method(replace(series, play=False), method)
    order = dict.fromkeys((*methods.names(), *chosen))
    return {method: found[method] for method in order if found.get(method)}
