"""`anycostfl run`: simulate an experiment, watch it, stop it, resume it."""

from __future__ import annotations

import importlib.util
import logging
import statistics
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

import numpy as np
from typer import Exit, Option

from anycostfl.cli import _options as shared
from anycostfl.cli._console import Json, emit_json, note, say
from anycostfl.cli._flower import hush_flower, need_flower
from anycostfl.cli._rounds import WHAT_WOULD_DO, conclude, follow, open_folder, resume_run, spent
from anycostfl.config import Config, profiles_of, to_toml
from anycostfl.data.files import DataMissingError
from anycostfl.errors import ConfigError, MissingExtraError
from anycostfl.experiment import build_experiment, load_data, resolve, split
from anycostfl.loop import Rounds
from anycostfl.planning.draw import draw_cohort
from anycostfl.report.trackers import tracking
from anycostfl.runs import journal
from anycostfl.simulate import count_workers, simulate


def run(
    preset: shared.MaybePreset = None,
    set_: shared.Overrides = None,
    out_dir: shared.RunFolder = None,
    resume: shared.Resume = None,
    workers: shared.Workers = 0,
    engine: Annotated[str, Option(help="Where devices run: own, or flower (Ray)")] = "own",
    dry_run: Annotated[
        bool, Option("--dry-run", help="Only show the configuration and its cost")
    ] = False,
    track: shared.Track = None,
    json: Json = False,
    rounds: shared.TotalRounds = None,
) -> None:
    """Train a simulated fleet and show what it cost. Ctrl-C stops it; --resume resumes it."""
    processes, simulator = count_workers(workers), find_engine(engine)
    before, name = None, preset or "demo"
    if resume is not None:
        besides = {"a preset": preset, "--set": set_, "--out": out_dir, "--dry-run": dry_run}
        before = resume_run(resume, rounds, besides, simulated=engine == "own")
    config = before.config if before else resolve(shared.load_config(name, set_, rounds))
    if dry_run:
        _show_plan(config, json=json)
        return
    # Before the folder: if this fails, none is left.
    results = simulator(config, workers=processes, start=before.saved if before else None)
    writer = open_folder(before, out_dir, name, config)
    results, records = journal(results, config, writer), before.records if before else []
    finished = (result.record for result in results)
    with tracking(track or (), writer.folder, asdict(config)) as sinks:
        stopped = follow(finished, records, config, writer.folder, quiet=json, sinks=sinks)
    if stopped:
        with suppress(KeyboardInterrupt):
            results.close()  # saves a checkpoint
    conclude(config, writer.folder, records, stopped=stopped, json=json)
    if stopped:
        if not json:
            how = "" if engine == "own" else f" --engine {engine}"
            say(f"Stopped. Resume with: anycostfl run --resume {writer.folder}{how}")
        raise Exit(130)


def find_engine(name: str) -> Callable[..., Rounds]:
    """The simulator, or the same rounds on Flower's engine."""
    if name == "own":
        return simulate
    if name != "flower":
        raise ConfigError([f"--engine: given {name!r}, must be own or flower"])
    if importlib.util.find_spec("flwr") is None or importlib.util.find_spec("ray") is None:
        raise MissingExtraError(
            "--engine flower needs Flower and Ray: pip install 'anycostfl[cluster]'"
        )
    need_flower()
    hush_flower(logging.ERROR)
    from anycostfl.contrib import ray  # noqa: PLC0415 - optional

    return ray.simulate


def _show_plan(config: Config, *, json: bool) -> None:
    """What a run would cost, from the planner alone; whether it could start, from a try."""
    seed, rounds, samples = config.run.seed, config.run.rounds, None
    try:
        dataset = load_data(config)
        build_experiment(config, dataset)
        parts = split(config, dataset.train)
        samples = np.array([len(part) for part in parts])
    except DataMissingError as error:
        note(str(error))
    profiles, plans = profiles_of(config.fleet), []
    for number in range(min(20, rounds)):
        cohort = draw_cohort(
            config.fleet, seed=seed, round_index=number, samples=samples, profiles=profiles
        )
        plans.append(config.plan(cohort.devices))
    able = sum(int(plan.feasible.sum()) for plan in plans)
    if not able:
        note(f"no device can afford to take part; {WHAT_WOULD_DO}")
    latency_s = statistics.fmean(float(plan.latency_s.max()) for plan in plans)
    energy_j = statistics.fmean(float(plan.energy_j.sum()) for plan in plans)
    expected = {
        "rounds": rounds,
        "devices_per_round": able / len(plans),
        "simulated_minutes": rounds * latency_s / 60,
        "energy_kj": rounds * energy_j / 1e3,
    }
    if json:
        emit_json({"config": to_toml(config), "expected": expected})
        return
    cost = spent(expected["simulated_minutes"], expected["energy_kj"])
    sys.stdout.write(  # whole, it is a preset again
        f"{to_toml(config)}\n# expected, from the plans of the first rounds:\n"
        f"# {rounds} rounds, with {expected['devices_per_round']:g} devices each; {cost}\n"
    )
