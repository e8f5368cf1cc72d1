"""Simulated experiments: the round loop on a fleet that lives on this machine."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from anycostfl.config import Config
from anycostfl.data.samples import Dataset
from anycostfl.device import cores
from anycostfl.errors import ConfigError
from anycostfl.experiment import Experiment, build_experiment, load_data, resolve, split
from anycostfl.fleets.pool import Pool
from anycostfl.fleets.simulated import Holdings, SimulatedFleet
from anycostfl.loop import Rounds, run_rounds
from anycostfl.records.run import SavedRun
from anycostfl.rounds import start_state


def simulate(config: Config, *, workers: int = 1, start: SavedRun | None = None) -> Rounds:
    """The rounds of a simulated experiment; data and model are loaded at once, before any round."""
    config = resolve(config)
    dataset = load_data(config)
    return simulate_on(build_experiment(config, dataset), dataset, workers=workers, start=start)


def simulate_on(
    experiment: Experiment, dataset: Dataset, *, workers: int = 1, start: SavedRun | None = None
) -> Rounds:
    """The rounds of an experiment that was built, on its prepared dataset."""
    config, workers = experiment.config, count_workers(workers)
    state = start_state(experiment, start)
    fleet = SimulatedFleet(
        experiment,
        Holdings.of(dataset, split(config, dataset.train)),
        memories=state.memories,
        executor=partial(Pool, config, workers) if workers > 1 else nullcontext,
    )
    return run_rounds(experiment, fleet, state)


def count_workers(asked: int) -> int:
    """How many processes to use; 0 means one per core."""
    if asked < 0:
        raise ConfigError([f"workers: given {asked}, must be 0 (one per core) or more"])
    return asked or cores()
