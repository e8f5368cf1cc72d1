"""`anycostfl sweep`: the paper's Fig. 4 (a) to (d) and what attackers do, from our runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from anycostfl.cli import _series as shared
from anycostfl.cli._console import Json
from anycostfl.cli._options import Overrides, Preset, Workers, load_config
from anycostfl.errors import ConfigError
from anycostfl.evaluation.compare import Finding
from anycostfl.evaluation.sweep import SPREADS, ablation, attacks, heterogeneity, widths
from anycostfl.experiment import resolve

KINDS = ("ablation", "compute", "radio", "widths", "attacks")
METHODS = "anycostfl,heterofl,stc"
FOR = {  # which sweeps look at an option
    "--methods": ("compute", "radio", "widths"),
    "--values": ("compute", "radio"),
    "--target": ("ablation", "compute", "radio"),
    "--learning-rates": ("ablation", "compute", "radio", "widths"),
    "--set run.method": ("attacks",),
}


def sweep(
    kind: Annotated[str, Argument(help="ablation, compute, radio, widths or attacks")],
    preset: Preset,
    method_names: Annotated[
        str, Option("--methods", help=f"For compute, radio and widths; default: {METHODS}")
    ] = "",
    values: Annotated[str, Option(help="Spreads for compute and radio, separated by commas")] = "",
    target: shared.Target = None,
    rounds: shared.Rounds = None,
    rates: shared.Rates = "",
    trial: shared.Trial = None,
    set_: Overrides = None,
    out_dir: shared.Folder = None,
    workers: Workers = 0,
    background: shared.Background = False,
    only_show: shared.OnlyShow = False,
    json: Json = False,
) -> None:
    """What mechanisms buy, what heterogeneity costs, what sub-models and attackers can do.

    Runs share the folder of `anycostfl compare` and are not repeated. Ctrl-C stops cleanly.
    """
    if kind not in KINDS:
        raise ConfigError([f"sweep: given {kind!r}, must be one of {', '.join(KINDS)}"])
    given = {
        "--methods": method_names,
        "--values": values,
        "--target": target is not None,
        "--learning-rates": rates,
        "--set run.method": shared.sets_method(set_),
    }
    if ignored := [name for name, value in given.items() if value and kind not in FOR[name]]:
        raise ConfigError([f"{name}: only for {', '.join(FOR[name])}" for name in ignored])
    config = resolve(load_config(preset, set_, rounds, target))
    names = shared.methods_in(method_names or METHODS)
    spreads = shared.numbers_in(values, "--values") or SPREADS.get(kind, ())
    folder = out_dir or Path("runs", f"compare-{Path(preset).stem}")
    series = shared.open_series(folder, workers, rates, trial, only_show=only_show, quiet=json)

    def study() -> Finding:
        if kind == "ablation":
            return ablation(series, config)
        if kind == "widths":
            return widths(series, config, names)
        if kind == "attacks":
            return attacks(series, config)
        return heterogeneity(series, config, kind, names, spreads)

    title = f"{config.summary or preset}: {kind}"
    shared.conduct(study, series, kind, title, background=background, json=json)
