"""Simulated experiments: the round loop on a fleet that lives on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

from anycostfl.config import Config
from anycostfl.device import cores
from anycostfl.errors import ConfigError
from anycostfl.experiment import build_experiment, load_data, resolve, split
from anycostfl.fleets.pool import Pool
from anycostfl.fleets.simulated import Holdings, SimulatedFleet
from anycostfl.loop import Rounds, run_rounds
from anycostfl.records.round import RoundRecord
from anycostfl.records.run import SavedRun
from anycostfl.rounds import start_state


def run(config: Config, *, workers: int = 1) -> Iterator[RoundRecord]:
    """Simulate an experiment, one record per round."""
    for result in simulate(config, workers=workers):
        yield result.record


def simulate(config: Config, *, workers: int = 1, start: SavedRun | None = None) -> Rounds:
    """The rounds of a simulated experiment; data and model are loaded at once, before any round."""
    workers, config = count_workers(workers), resolve(config)
    dataset = load_data(config)
    experiment = build_experiment(config, dataset)
    parts = split(config.data, config.fleet.devices, config.run.seed, dataset)
    state = start_state(experiment, start)
    fleet = SimulatedFleet(
        experiment,
        Holdings.of(dataset, parts),
        memories=state.memories,
        executor=partial(Pool, config, workers) if workers > 1 else nullcontext,
    )
    return run_rounds(experiment, fleet, state)


def count_workers(asked: int) -> int:
    """How many processes to use; 0 means one per core."""
    if asked < 0:
        raise ConfigError([f"workers: given {asked}, must be 0 (one per core) or more"])
    return asked or cores()
