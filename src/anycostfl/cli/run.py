"""`anycostfl run`: simulate an experiment, watch it, stop it, resume it."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from anycostfl.cli._console import Json, emit_json, note, say
from anycostfl.cli._engine import find_engine
from anycostfl.cli._options import MaybePreset, Overrides
from anycostfl.cli._rounds import WHAT_WOULD_DO, conclude, follow, free_folder, resume_run, spent
from anycostfl.config import Config, load_preset, profiles_of, to_toml
from anycostfl.data import DataMissingError
from anycostfl.experiment import build_experiment, load_data, resolve, split
from anycostfl.loop import Rounds
from anycostfl.planning.draw import draw_cohort
from anycostfl.records.round import RoundRecord
from anycostfl.runs import begin, journal
from anycostfl.simulate import count_workers


def run(
    preset: MaybePreset = None,
    set_: Overrides = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Run directory")] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume this run directory")] = None,
    workers: Annotated[int, typer.Option(help="Processes; 0: one per core")] = 0,
    engine: Annotated[str, typer.Option(help="Where devices run: own, or flower (Ray)")] = "own",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the configuration and its cost")
    ] = False,
    json: Json = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Total rounds; default: as in the preset or run")
    ] = None,
) -> None:
    """Train a simulated fleet and show what it cost. Ctrl-C stops it; --resume resumes it."""
    processes = count_workers(workers)
    simulate = find_engine(engine)
    if resume is not None:
        besides = {"a preset": preset, "--set": set_, "--out": out_dir, "--dry-run": dry_run}
        before = resume_run(resume, rounds, besides, simulated=engine == "own")
        config, writer, records = before.config, before.writer, before.records
        results = simulate(config, workers=processes, start=before.saved)
        if rounds is not None:
            writer.reconfigure(to_toml(config))
    else:
        name = preset or "demo"
        changes = [f"run.rounds={rounds}"] if rounds is not None else []
        config = resolve(load_preset(name, [*(set_ or []), *changes]))
        if dry_run:
            _show_plan(config, json=json)
            return
        results = simulate(config, workers=processes)  # first: if this fails, no folder is left
        writer = begin(out_dir or free_folder(Path(name).stem), config)
        records = []
    stopped = _train(journal(results, config, writer), records, config, writer.folder, quiet=json)
    conclude(config, writer.folder, records, stopped=stopped, json=json)
    if stopped:
        if not json:
            how = "" if engine == "own" else f" --engine {engine}"
            say(f"Stopped. Resume with: anycostfl run --resume {writer.folder}{how}")
        raise typer.Exit(130)


def _train(
    results: Rounds, records: list[RoundRecord], config: Config, folder: Path, *, quiet: bool
) -> bool:
    """Run the rounds; True if Ctrl-C stopped them."""
    rounds = (result.record for result in results)
    try:
        follow(rounds, records, config, folder, quiet=quiet)
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):
            results.close()
        return True
    return False


def _show_plan(config: Config, *, json: bool) -> None:
    """What a run would cost, from the planner alone; whether it could start, from a try."""
    samples = None
    try:
        dataset = load_data(config)
        build_experiment(config, dataset)
        samples = np.array(
            [
                len(part)
                for part in split(config.data, config.fleet.devices, config.run.seed, dataset)
            ]
        )
    except DataMissingError as error:
        note(str(error))
    profiles, seed = profiles_of(config.fleet), config.run.seed
    latency, energy, able = [], [], 0
    for number in range(min(20, config.run.rounds)):
        cohort = draw_cohort(
            config.fleet, seed=seed, round_index=number, samples=samples, profiles=profiles
        )
        planned = config.plan(cohort.devices)
        latency.append(float(planned.latency_s.max()))
        energy.append(float(planned.energy_j.sum()))
        able += int(planned.feasible.sum())
    if not able:
        note(f"no device can afford to take part; {WHAT_WOULD_DO}")
    rounds = config.run.rounds
    expected = {
        "rounds": rounds,
        "devices_per_round": able / len(latency),
        "simulated_minutes": rounds * sum(latency) / len(latency) / 60,
        "energy_kj": rounds * sum(energy) / len(energy) / 1e3,
    }
    if json:
        emit_json({"config": to_toml(config), "expected": expected})
        return
    cost = spent(expected["simulated_minutes"], expected["energy_kj"])
    sys.stdout.write(  # whole, it is a preset again
        f"{to_toml(config)}\n# expected, from the plans of the first rounds:\n"
        f"# {rounds} rounds, with {expected['devices_per_round']:g} devices each; {cost}\n"
    )
