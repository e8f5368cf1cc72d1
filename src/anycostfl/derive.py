"""What a person leaves out, derived from a task and a model: fleet, budgets, how to train.

The fleet is the demo's, scaled: budgets grow with the work of a round and with a device's own
samples, and the radio with the size of an update. So widths differ from device to device as there,
whatever the model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from anycostfl.config import Config, Model, Run, load_preset
from anycostfl.data.samples import Dataset, Samples
from anycostfl.data.split import Data
from anycostfl.device import Training, measure, train
from anycostfl.errors import ConfigError
from anycostfl.experiment import Experiment
from anycostfl.metrics import Metric
from anycostfl.planning.cost import Workload
from anycostfl.planning.draw import FleetSpec
from anycostfl.planning.strategy import Caps
from anycostfl.registry import IN_MEMORY
from anycostfl.shrink import ElasticModel
from anycostfl.tasks import Task

Given = Mapping[str, Any] | None

DEVICES = 20  # where samples have no owners
COHORT = (10, 50)  # devices of a round, of a quarter of all
STEPS = 24  # of a device in a round, at least
BATCHES = (8, 32)
CLIP_NORM = 1.0  # of gradients: a learning rate then suits more tasks
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # learning rates to try
FIRST = 0.3
NEARLY = 0.05  # of the fall of the loss
TRIAL_STEPS, TRIAL_SAMPLES = 100, 512
UPLOAD_BYTES = 4096  # a payload that holds what a small model has learnt
LEAST_BYTES = 1024  # all that a payload may have, of models smaller than 15 kB


def derive_config(
    task: Task,
    net: ElasticModel,
    dataset: Dataset,
    *,
    run: Run,
    fleet: FleetSpec | Given = None,
    budgets: Given = None,
    training: Training | Given = None,
) -> Config:
    """A configuration for a task and a model; what is given is taken as it is."""
    samples = dataset.train
    by_owner = samples.owners is not None
    owners = len(torch.unique(samples.owners)) if by_owner else min(DEVICES, len(samples))
    asked = {} if isinstance(fleet, FleetSpec) or fleet is None else dict(fleet)
    devices = fleet.devices if isinstance(fleet, FleetSpec) else asked.get("devices", owners)
    sizes = _sizes(samples.owners, len(samples), devices)
    how = _training(training, sizes)
    epochs = max(1, math.ceil(STEPS * how.batch / float(np.median(sizes))))
    work = Workload(net.training_flops, net.size_bits, min(epochs, STEPS))
    limits = _limits(work)
    spec = fleet if isinstance(fleet, FleetSpec) else _fleet(work, limits, sizes, asked, budgets)
    return Config(
        fleet=spec,
        workload=work,
        training=how,
        data=Data(IN_MEMORY, partition="owner" if by_owner else "iid"),
        model=Model(IN_MEMORY, widths="fast"),
        run=run,
        limits=limits,
        metric=task.metrics[0].info,
        summary=task.summary or f"{type(net.module).__name__} on {devices} devices",
    )


def _sizes(owners: torch.Tensor | None, count: int, devices: int) -> np.ndarray[Any, Any]:
    """About how many samples devices hold."""
    if owners is None or devices != len(torch.unique(owners)):
        return np.full(devices, count / devices)
    counts: np.ndarray[Any, Any] = torch.unique(owners, return_counts=True)[1].double().numpy()
    return counts


def _training(given: Training | Given, sizes: np.ndarray[Any, Any]) -> Training:
    """How devices train; a learning rate that was not given is the first to try."""
    if isinstance(given, Training):
        return given
    low, high = BATCHES
    batch = int(min(max(np.median(sizes) // STEPS, low), high))
    known: dict[str, Any] = {"learning_rate": FIRST, "batch": batch, "clip_norm": CLIP_NORM}
    return Training(**({**known, "schedule": "cosine"} | dict(given or {})))


def _limits(work: Workload) -> Caps:
    """Uploads as small as the codec allows; of a very small model, enough for a payload's frame."""
    room = min(8 * LEAST_BYTES / work.size_bits, 1.0)
    most = max(room, Caps().beta_max)
    least = min(max(8 * UPLOAD_BYTES / work.size_bits, 0.01), most)
    return Caps(
        beta_min=least, beta_max=most, upload_ratio=room if room > Caps().beta_max else None
    )


def _fleet(
    work: Workload, limits: Caps, sizes: np.ndarray[Any, Any], asked: Given, budgets: Given
) -> FleetSpec:
    """The demo's fleet at the scale of this work and of its uploads."""
    demo, devices = load_preset("demo"), len(sizes)
    before = demo.workload.flops_per_sample * demo.fleet.samples * demo.workload.epochs
    scale = work.flops_per_sample * float(sizes.mean()) * work.epochs / before
    low, high = COHORT
    cohort = min(devices, max(low, min(high, math.ceil(devices / 4))))
    each = demo.fleet.bandwidth_hz / demo.fleet.cohort  # Hz
    uploads = work.size_bits * (limits.beta_max + limits.beta_min)  # twice, if none can be less
    wider = uploads / (demo.workload.size_bits * demo.limits.beta_max) / scale
    derived = {
        "devices": devices,
        "cohort": cohort,
        "samples": float(sizes.mean()),
        "latency_s": scale * demo.fleet.latency_s,
        "energy_min_j": scale * demo.fleet.energy_min_j,
        "energy_max_j": scale * demo.fleet.energy_max_j,
        "bandwidth_hz": cohort * each * wider,
        # As much noise in the wider or narrower channel, so that its quality stays.
        "noise_dbm_per_hz": demo.fleet.noise_dbm_per_hz - 10 * math.log10(wider),
        "budgets_per_sample": True,
    }
    return replace(demo.fleet, **{**derived, **_known(FleetSpec, asked), **_budgets(budgets)})


def _known(kind: type, given: Given) -> dict[str, Any]:
    names = [item.name for item in fields(kind)]
    if unknown := sorted(set(given or {}) - set(names)):
        raise ConfigError([f"{n}: unknown, must be one of {', '.join(names)}" for n in unknown])
    return dict(given or {})


def _budgets(given: Given) -> dict[str, Any]:
    """Budgets by name: `latency_s`, and `energy_j` as one number or the ends of a range."""
    if unknown := sorted(set(given or {}) - {"latency_s", "energy_j"}):
        raise ConfigError([f"budgets: {n} unknown, must be latency_s or energy_j" for n in unknown])
    found: dict[str, Any] = {"budgets_per_sample": False} if given else {}
    for name, value in (given or {}).items():
        if name == "latency_s":
            found[name] = value
        else:
            low, high = value if isinstance(value, tuple | list) else (value, value)
            found |= {"energy_min_j": low, "energy_max_j": high}
    return found


# --- a learning rate that trains ------------------------------------------------------------------


def find_learning_rate(experiment: Experiment, dataset: Dataset) -> float:
    """The learning rate that trains the model best on a mix of all owners' training samples.

    It climbs from `FIRST`, up or else down, as long as the loss falls; up also where it falls by
    nearly as much, for a larger one is better later on. A mix tells rates apart within a few steps;
    the loss after a few rounds of devices with few classes each is mostly noise. Nothing is
    measured on test samples.
    """
    task, training = experiment.task, experiment.runtime.training
    seen, others, epochs = _mix(dataset.train, TRIAL_STEPS * training.batch)
    loss = Metric.mean("loss", task.loss, higher_is_better=False)

    @cache
    def loss_at(place: int | None) -> float:
        experiment.net.load(experiment.initial_weights)
        module = copy.deepcopy(experiment.net.module)
        if place is not None:
            train(module, seen, task, training, 0, epochs=epochs, rate=RATES[place])
        (sums,) = measure(module, others, [loss], training)
        value = float(loss.value(sums[0]))
        return math.inf if math.isnan(value) else value

    def is_better(other: int, place: int) -> bool:
        margin = NEARLY * max(loss_at(None) - loss_at(place), 0.0) if other > place else 0.0
        return loss_at(other) < loss_at(place) + margin

    place = first = RATES.index(FIRST)
    for step in (1, -1):
        while 0 <= place + step < len(RATES) and is_better(place + step, place):
            place += step
        if place != first:
            break
    return RATES[place]


def _mix(samples: Samples, count: int) -> tuple[Samples, Samples, int]:
    """Some samples to train on, others to measure on, and how many epochs make up the count."""
    samples = Samples(samples.inputs, samples.targets)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
    held = min(TRIAL_SAMPLES, len(samples) // 4)
    seen = order[held : held + count] if held else order
    return samples.take(seen), samples.take(order[: held or None]), math.ceil(count / len(seen))
