"""Rounds as they finish, for TensorBoard, MLflow, Weights & Biases and Prometheus.

A tracker is a sink of `RoundRecord`s. Its package is imported when it is asked for, and nothing
leaves the machine unless the user's own settings say so: MLflow and W&B write into the run
directory unless MLFLOW_TRACKING_URI or WANDB_MODE name something else.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from anycostfl.errors import ConfigError, MissingExtraError
from anycostfl.metrics import MetricInfo
from anycostfl.records.round import Records, Status, total

Sink = Callable[[int, Mapping[str, float]], None]
"""The number of rounds that are done, and values by their names."""

METRIC = "metric/"


def values_of(records: Records, info: MetricInfo) -> dict[str, float]:
    """What the newest round reached, what all rounds cost so far, and what devices did in it."""
    newest, spent = records[-1], total(records)
    sent = [d for d in newest.devices if d.bytes_up]
    counts = Counter(d.status for d in newest.devices)
    values = {
        "cost/latency_s": spent.latency_s,
        "cost/energy_j": spent.energy_j,
        "cost/bytes_up": float(spent.bytes_up),
        "cost/bytes_down": float(spent.bytes_down),
        **{f"devices/{status}": float(counts[status]) for status in Status},
    }
    if newest.metric is not None:
        values |= {f"{METRIC}{info.name}": newest.metric}
        values |= {f"{METRIC}{name}": value for name, value in newest.others.items()}
    if sent:
        values["plan/mean_alpha"] = fmean(d.alpha for d in sent)
        values["plan/mean_beta"] = fmean(d.beta for d in sent)
    return values


def _import(package: str, extra: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError(
            f"--track {extra} needs its package: pip install 'anycostfl[{extra}]'"
        ) from error


@contextmanager
def _tensorboard(folder: Path, _config: Mapping[str, Any]) -> Iterator[Sink]:
    writer = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter(folder / "tensorboard")

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    with writer:
        yield log


@contextmanager
def _mlflow(folder: Path, config: Mapping[str, Any]) -> Iterator[Sink]:
    mlflow = _import("mlflow", "mlflow")
    if "MLFLOW_TRACKING_URI" not in os.environ:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow.set_tracking_uri((folder / "mlruns").resolve().as_uri())
    mlflow.set_experiment("anycostfl")

    def log(step: int, values: Mapping[str, float]) -> None:
        mlflow.log_metrics(dict(values), step=step)

    with mlflow.start_run(run_name=folder.name):
        mlflow.log_params({name: str(value)[:500] for name, value in flat(config).items()})
        yield log


@contextmanager
def _wandb(folder: Path, config: Mapping[str, Any]) -> Iterator[Sink]:
    wandb = _import("wandb", "wandb")
    mode = os.environ.get("WANDB_MODE", "offline")
    run = wandb.init(
        project="anycostfl", name=folder.name, dir=folder, mode=mode, config=flat(config)
    )
    with run:
        yield lambda step, values: run.log(dict(values), step=step)


TRACKERS = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}


@contextmanager
def _prometheus(address: str) -> Iterator[Sink]:
    """Gauges at http://ADDRESS/metrics; the address is a port of this machine, or HOST:PORT."""
    client = _import("prometheus_client", "prometheus")
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError([f"--metrics: given {address!r}, must be PORT or HOST:PORT"])
    registry = client.CollectorRegistry()
    rounds = client.Gauge("anycostfl_rounds", "Rounds that are done", registry=registry)
    gauges: dict[str, Any] = {}
    try:
        server, thread = client.start_http_server(int(port), host or "127.0.0.1", registry)
    except OSError as error:
        raise ConfigError([f"--metrics: cannot listen on {address}: {error}"]) from error

    def log(step: int, values: Mapping[str, float]) -> None:
        rounds.set(step)
        for name, value in values.items():
            if name not in gauges:
                legal = "".join(c if c.isalnum() else "_" for c in name)
                gauges[name] = client.Gauge(f"anycostfl_{legal}", name, registry=registry)
            gauges[name].set(value)

    try:
        yield log
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def tracking(
    names: Sequence[str], folder: Path, config: Mapping[str, Any], metrics: str = ""
) -> Iterator[Sequence[Sink]]:
    """Open the trackers of these names, and the metrics page if an address is given."""
    if unknown := [name for name in names if name not in TRACKERS]:
        known = ", ".join(TRACKERS)
        raise ConfigError([f"--track: given {', '.join(unknown)}, must be {known}"])
    with ExitStack() as stack:
        sinks = [stack.enter_context(TRACKERS[name](folder, config)) for name in names]
        if metrics:
            sinks.append(stack.enter_context(_prometheus(metrics)))
        yield sinks


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested table by dotted keys, without what is unset."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        elif value is not None:
            found[name] = value
    return found
