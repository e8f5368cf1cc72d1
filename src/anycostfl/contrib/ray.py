"""Flower's simulation engine (Ray) as a fleet of simulated devices; needs the extra `cluster`.

The same loop and the same device app as on real devices, on as many machines as a Ray cluster has:
set RAY_ADDRESS to use one, or Ray starts on this machine. A seeded run gives what `simulate` gives.

Deviation: Flower calls `run_simulation` deprecated in favour of its command line, which would hide
the rounds from us; the versions of Flower that this package allows have it. The Grid exists only
inside a callback of the engine, so a thread keeps that callback open while the fleet is.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from anycostfl.config import Config
from anycostfl.errors import AnycostError, MissingExtraError
from anycostfl.experiment import Experiment
from anycostfl.flower import device
from anycostfl.flower.fleet import FlowerFleet, RoundPolicy
from anycostfl.flower.server import server_experiment
from anycostfl.loop import Rounds, run_rounds
from anycostfl.records.run import SavedRun
from anycostfl.rounds import ServerState, start_state

DEADLINE_S = 24 * 3600.0  # simulated devices are never late


@contextmanager
def open_fleet(experiment: Experiment, start: ServerState, workers: int) -> Iterator[FlowerFleet]:
    """A Flower fleet whose devices the engine simulates."""
    devices = experiment.config.fleet.devices
    ready: Queue[Grid | BaseException] = Queue()
    done, app = threading.Event(), ServerApp()

    @app.main()
    def main(grid: Grid, _context: Context) -> None:
        ready.put(grid)
        done.wait()

    def run_engine() -> None:
        here = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": workers}
        try:
            run_simulation(
                server_app=app,
                client_app=device.app,
                num_supernodes=devices,
                backend_config={
                    "init_args": {**here, "log_to_driver": False, "logging_level": "ERROR"},
                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                },
            )
        except BaseException as error:  # raised again where the fleet is opened
            ready.put(error)

    thread = threading.Thread(target=run_engine, daemon=True)
    thread.start()
    grid = ready.get()
    if isinstance(grid, BaseException):
        raise AnycostError(f"Flower's simulation engine failed: {grid}") from grid
    policy = RoundPolicy(deadline_s=DEADLINE_S, wait_for=devices)
    try:
        yield FlowerFleet(grid, experiment, policy, start=start)
    finally:
        done.set()
        thread.join()


def simulate(config: Config, *, workers: int = 1, start: SavedRun | None = None) -> Rounds:
    """The rounds of an experiment on Flower's engine, with that many processes on this machine."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("--engine flower needs Ray: pip install 'anycostfl[cluster]'")
    experiment = server_experiment(config)
    state = start_state(experiment, start)
    return run_rounds(experiment, open_fleet(experiment, state, workers), state)
