"""The server as a Flower ServerApp: the round loop on the devices behind Flower's Grid.

Flower's `Strategy.start` is not used: it waits in steps of three seconds and cannot be resumed
(docs/decisions/0050). `strategy.AnycostStrategy` offers the same rounds to it.
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext, suppress
from dataclasses import asdict
from logging import ERROR, INFO, WARNING, Formatter, StreamHandler, getLogger
from pathlib import Path

from flwr.app import Context, UserConfig
from flwr.serverapp import Grid, ServerApp

from anycostfl.config import Config
from anycostfl.errors import AnycostError
from anycostfl.experiment import Experiment, build_experiment, load_data
from anycostfl.files import atomic_write, exclusive_lock, open_nofollow
from anycostfl.flower._internal import log, reduce_polling
from anycostfl.flower.fleet import FlowerFleet, RoundPolicy
from anycostfl.loop import Rounds, run_rounds
from anycostfl.processes import end_with_parent
from anycostfl.records.run import SavedRun
from anycostfl.rounds import start_state
from anycostfl.runs import check_engine, journal, resume

LOG = "flower/server.log"  # output of the SuperLink and the server app
LOCK = "server.lock"  # held by the server app
FAILURE = "failure.txt"  # why the server app gave up

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Resume the run of a run directory."""
    reduce_polling()
    # Flower would keep trying to reach a dead SuperLink for minutes.
    end_with_parent(lambda: os._exit(1), os.getppid())
    folder = Path(str(context.run_config["run-dir"]))
    log_to(folder / LOG)
    with exclusive_lock(folder, name=LOCK, mark=lock_owner(context.run_id)):
        try:
            run = resume(folder)
            check_engine(run, simulated=False)
            for remark in run.saved.remarks:
                log(WARNING, "%s", remark)
            policy = RoundPolicy(**json.loads(str(context.run_config["policy"])))
            rounds = serve_rounds(run.config, grid, policy, run.saved, folder=folder)
            for result in journal(rounds, run.config, run.writer):
                log(INFO, "round %d is done", result.record.round + 1)
        except AnycostError as error:
            with suppress(OSError):  # a full disk, perhaps
                atomic_write(folder / FAILURE, str(error).encode())
            raise
        except Exception:
            log(ERROR, "the server app died", exc_info=True)
            raise


def serve_rounds(
    config: Config,
    grid: Grid,
    policy: RoundPolicy,
    start: SavedRun | None = None,
    *,
    folder: Path | None = None,
) -> Rounds:
    """The rounds of an experiment on the devices behind a Grid."""
    experiment = server_experiment(config)
    state = start_state(experiment, start)
    fleet = FlowerFleet(grid, experiment, policy, start=state, folder=folder)
    return run_rounds(experiment, nullcontext(fleet), state, min_replies=policy.min_replies)


def server_experiment(config: Config) -> Experiment:
    """The experiment with what the server itself holds: test data, or none if devices evaluate."""
    dataset = load_data(config) if config.data.evaluate == "server" else None
    return build_experiment(config, dataset)


def run_config(folder: Path, policy: RoundPolicy) -> UserConfig:
    """What the server app is told, as Flower's run configuration."""
    return {"run-dir": str(folder.resolve()), "policy": json.dumps(asdict(policy))}


def lock_owner(run_id: int) -> str:
    """What the lock of a run directory holds while Flower's run of this id works on it."""
    return f"Flower's run {run_id}"


def log_to(path: Path) -> None:
    """Log to a file: Flower shows nobody what a server app prints."""
    handler = StreamHandler(open(path, "a", opener=open_nofollow))  # noqa: SIM115 - for good
    handler.setFormatter(Formatter("%(asctime)s %(levelname)s %(message)s"))
    getLogger("flwr").addHandler(handler)
