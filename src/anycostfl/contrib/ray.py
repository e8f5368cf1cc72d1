"""Flower's simulation engine (Ray) as a fleet of simulated devices.

The same loop and the same device app as on real devices, on as many machines as a Ray cluster has:
set RAY_ADDRESS to use one, or Ray starts on this machine. A seeded run gives what `simulate` gives.
It needs the extra `cluster`.

Deviation: Flower calls `run_simulation` deprecated in favour of its command line, which would hide
the rounds from us; the versions of Flower that this package allows have it. The Grid exists only
inside a callback of the engine, so a thread keeps that callback open while the fleet is.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterable, Mapping
from queue import Queue
from typing import Self

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from anycostfl.config import Config
from anycostfl.device import Reply
from anycostfl.errors import AnycostError, MissingExtraError
from anycostfl.experiment import Experiment
from anycostfl.flower import device
from anycostfl.flower.fleet import FlowerFleet, RoundPolicy
from anycostfl.flower.server import server_experiment
from anycostfl.loop import Rounds, run_rounds
from anycostfl.records.run import SavedRun
from anycostfl.rounds import Offers, RoundPlan, ServerState, first_state, restored_state
from anycostfl.server.suspensions import Suspensions
from anycostfl.state import State

DEADLINE_S = 24 * 3600.0  # simulated devices are never late


class EngineError(AnycostError):
    """Flower's simulation engine ended before the run did."""


class RayFleet:
    """A Flower fleet whose devices the engine simulates."""

    def __init__(self, experiment: Experiment, start: ServerState, workers: int) -> None:
        self._experiment, self._start, self._workers = experiment, start, workers
        self._ready: Queue[Grid | BaseException] = Queue()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._simulate, daemon=True)
        self._fleet: FlowerFleet

    def __enter__(self) -> Self:
        self._thread.start()
        grid = self._ready.get()
        if isinstance(grid, BaseException):
            raise EngineError(f"Flower's simulation engine failed: {grid}") from grid
        devices = self._experiment.config.fleet.devices
        policy = RoundPolicy(deadline_s=DEADLINE_S, wait_for=devices)
        self._fleet = FlowerFleet(grid, self._experiment, policy, start=self._start)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def offers(self, number: int, suspensions: Suspensions) -> Offers:
        """The cohort of a round."""
        return self._fleet.offers(number, suspensions)

    def perform(self, plan: RoundPlan) -> Iterable[Reply]:
        """What devices make of their assignments."""
        return self._fleet.perform(plan)

    def evaluate(self, weights: State) -> float | None:
        """The accuracy of a model."""
        return self._fleet.evaluate(weights)

    def memory(self) -> Mapping[int, State]:
        """Nothing: devices keep it."""
        return self._fleet.memory()

    def _simulate(self) -> None:
        """Run the engine until the fleet is closed; whatever ends it before is passed on."""
        app = ServerApp()

        @app.main()
        def main(grid: Grid, _context: Context) -> None:
            self._ready.put(grid)
            self._done.wait()

        here = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": self._workers}
        try:
            run_simulation(
                server_app=app,
                client_app=device.app,
                num_supernodes=self._experiment.config.fleet.devices,
                backend_config={
                    "init_args": {**here, "log_to_driver": False, "logging_level": "ERROR"},
                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                },
            )
        except BaseException as error:  # raised again where the fleet is opened
            self._ready.put(error)


def simulate(config: Config, *, workers: int = 1, start: SavedRun | None = None) -> Rounds:
    """The rounds of an experiment on Flower's engine, with that many processes on this machine."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("--engine flower needs Ray: pip install 'anycostfl[cluster]'")
    experiment = server_experiment(config)
    point = start.checkpoint if start else None
    state = restored_state(experiment, point, start.records) if start and point else None
    fleet = RayFleet(experiment, state or first_state(experiment), workers)
    return run_rounds(experiment, fleet, state)
