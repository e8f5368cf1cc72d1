"""Flower's simulation engine (Ray) as a place where simulated devices run.

The same server loop and the same device app as on real devices, on as many machines as a Ray
cluster has: set RAY_ADDRESS to use one, or Ray starts on this machine. A seeded run gives what
`simulate.play` gives. It needs the extra `cluster`.

Deviation: Flower calls `run_simulation` deprecated in favour of its command line, which would hide
the rounds from us; the versions of Flower that this package allows have it.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from queue import Queue

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from anycostfl.attacks import check_honest
from anycostfl.config import Config
from anycostfl.errors import AnycostError, MissingExtraError
from anycostfl.experiment import prepare
from anycostfl.flower import device, server
from anycostfl.flower.roster import Terms
from anycostfl.runs import Snapshot, Turn, Turns

DEADLINE_S = 24 * 3600.0  # simulated devices are never late


class EngineError(AnycostError):
    """Flower's simulation engine ended before the run did."""


def play(config: Config, *, workers: int = 1, start: Snapshot | None = None) -> Turns:
    """The rounds of an experiment on Flower's engine, with that many processes on this machine."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("--engine flower needs Ray: pip install 'anycostfl[cluster]'")
    check_honest(config.attack)
    prepare(config)  # so that bad data or a bad model fail here and at once
    return _play(config, workers, start)


def _play(config: Config, workers: int, start: Snapshot | None) -> Turns:
    """The rounds, as the engine's thread hands them over."""
    turns: Queue[Turn | BaseException | None] = Queue(maxsize=1)
    stopping = threading.Event()
    app = _server_app(config, start, turns, stopping)
    thread = threading.Thread(
        target=_simulate, args=(app, config.fleet.devices, workers, turns), daemon=True
    )
    thread.start()
    try:
        while (turn := turns.get()) is not None:
            if isinstance(turn, BaseException):
                raise EngineError(f"Flower's simulation engine failed: {turn}") from turn
            yield turn
    finally:
        stopping.set()
        while thread.is_alive():
            _empty(turns)
            thread.join(0.1)


def _server_app(
    config: Config,
    start: Snapshot | None,
    turns: Queue[Turn | BaseException | None],
    stopping: threading.Event,
) -> ServerApp:
    app = ServerApp()
    terms = Terms(deadline_s=DEADLINE_S, wait_for=config.fleet.devices)

    @app.main()
    def main(grid: Grid, _context: Context) -> None:
        for turn in server.play(config, grid, terms, start):
            turns.put(turn)
            if stopping.is_set():
                return

    return app


def _simulate(
    app: ServerApp, devices: int, workers: int, turns: Queue[Turn | BaseException | None]
) -> None:
    """Run the engine to its end; whatever ends it is told."""
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
    except BaseException as error:  # told to whoever waits for turns
        turns.put(error)
    turns.put(None)


def _empty(turns: Queue[Turn | BaseException | None]) -> None:
    while not turns.empty():
        turns.get_nowait()
