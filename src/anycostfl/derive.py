"""What a person leaves out, derived from a task and a model: fleet, budgets, how to train.

The fleet is the demo's, scaled: budgets grow with the work of a round and with a device's own
samples, and the radio with the size of an update. So widths differ from device to device as there,
whatever the model.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
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
from anycostfl.simulate import simulate_on
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
TRIAL_ROUNDS, TRIAL_DEVICES = 6, 24
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
    """The learning rate that trains best in a few rounds, by the loss on training samples.

    A few steps of one module on a mix of all owners' samples find where to begin. A few rounds of
    some devices then decide: averaging dilutes what only few devices know, so the best rate there
    may be ten times the mix's. Where so few rounds lower no loss, it is three times the mix's.
    Nothing is measured on test samples.
    """
    mix = _mix(dataset.train, TRIAL_STEPS * experiment.runtime.training.batch)
    before = _loss_of_steps(experiment, mix, None)
    start = _climb(RATES.index(FIRST), before, lambda i: _loss_of_steps(experiment, mix, RATES[i]))
    trial, few = _trial(experiment, replace(dataset, test=mix.others))

    @cache
    def loss_at(place: int) -> float:
        return _loss_of_rounds(trial.with_training(learning_rate=RATES[place]), few)

    place = _climb(start, before, loss_at)
    return RATES[place if loss_at(place) < before else min(start + 1, len(RATES) - 1)]


def _climb(first: int, before: float, loss_at: Callable[[int], float]) -> int:
    """Where the loss is least: up from the first place, or else down, as long as it falls.

    Up also where it falls by nearly as much, for a larger rate is better later on.
    """
    known = cache(loss_at)

    def is_better(other: int, place: int) -> bool:
        margin = NEARLY * max(before - known(place), 0.0) if other > place else 0.0
        return known(other) < known(place) + margin

    place = first
    for step in (1, -1):
        while 0 <= place + step < len(RATES) and is_better(place + step, place):
            place += step
        if place != first:
            break
    return place


@dataclass(frozen=True, slots=True, eq=False)
class Mix:
    """Samples of all owners to train on for some epochs, and others to measure on."""

    samples: Samples
    others: Samples
    epochs: int


def _mix(samples: Samples, count: int) -> Mix:
    samples = Samples(samples.inputs, samples.targets)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
    held = min(TRIAL_SAMPLES, len(samples) // 4)
    seen = order[held : held + count] if held else order
    others = samples.take(order[: held or None])
    return Mix(samples.take(seen), others, math.ceil(count / len(seen)))


def _loss_of_steps(experiment: Experiment, mix: Mix, rate: float | None) -> float:
    """The loss after some steps of one module on a mix; without a rate, of the untrained one."""
    task, training = experiment.task, experiment.runtime.training
    experiment.net.load(experiment.initial_weights)
    module = copy.deepcopy(experiment.net.module)
    if rate is not None:
        train(module, mix.samples, task, training, 0, epochs=mix.epochs, rate=rate)
    loss = _loss_of(task)
    (sums,) = measure(module, mix.others, [loss], training)
    return _number(float(loss.value(sums[0])))


def _trial(experiment: Experiment, dataset: Dataset) -> tuple[Experiment, Dataset]:
    """The experiment for a few rounds of some devices, measured by its loss."""
    config, runtime = experiment.config, experiment.runtime
    shorter = replace(
        config,
        fleet=replace(config.fleet, cohort=min(config.fleet.cohort, TRIAL_DEVICES)),
        run=replace(config.run, rounds=TRIAL_ROUNDS, evaluate_every=1),
    )
    task = replace(experiment.task.without_data(), metric=_loss_of(experiment.task))
    trial = replace(
        experiment, config=shorter, runtime=replace(runtime, task=task), test=dataset.test
    )
    return trial.with_training(schedule="constant"), dataset


def _loss_of_rounds(trial: Experiment, dataset: Dataset) -> float:
    """The mean over the later half of the rounds, for the loss swings where devices differ."""
    losses = [_number(result.record.metric) for result in simulate_on(trial, dataset)]
    return statistics.fmean(losses[len(losses) // 2 :])


def _loss_of(task: Task) -> Metric:
    return Metric.mean("loss", task.loss, higher_is_better=False)


def _number(loss: float | None) -> float:
    return math.inf if loss is None or math.isnan(loss) else loss
