"""Training speed at several widths: FLOPs per second and an overhead that no width saves.

The cost model has T = W·α/f with one W for all widths (Sec. IV-A). Measured time is closer to
T = W·(α + o)/f: some work does not shrink, and narrow layers fill vector units less well. (W, o)
minimises the worst relative error of the predicted time (docs/decisions/0041).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from anycostfl import models
from anycostfl.config import Config
from anycostfl.data.samples import Samples, Tree
from anycostfl.device import train
from anycostfl.experiment import resolve_training
from anycostfl.metrics import main_output
from anycostfl.shrink import ElasticModel
from anycostfl.tasks import Task, no_data

REPETITION_S = 0.5  # at least, at full width
# Candidates for the overhead; above 1 for networks so small that kernel launches dominate.
OVERHEADS = np.concatenate([np.linspace(0.0, 0.5, 501), np.geomspace(0.5, 100.0, 1001)[1:]])


@dataclass(frozen=True, slots=True)
class WidthTiming:
    """Measured training time at one width."""

    alpha: float
    flops_ratio: float
    seconds_per_sample: float


@dataclass(frozen=True, slots=True)
class SpeedFit:
    """FLOPs per second, the overhead o, and the worst relative error of the predicted times."""

    flops_per_second: float
    overhead: float
    worst_error: float

    def seconds(self, flops: float, share: float) -> float:
        """Predicted time of a sub-model with this share of the full model's FLOPs."""
        return flops * (share + self.overhead) / self.flops_per_second


def elastic_model(config: Config) -> ElasticModel:
    """The model of a configuration."""
    spec = models.load(config.model.name)
    return ElasticModel(spec.build(), spec.example(2), rule=config.model.widths)


def time_widths(
    config: Config,
    net: ElasticModel,
    repeats: int,
    *,
    after_each: Callable[[], None],
    clock: Callable[[], float],
) -> list[WidthTiming]:
    """Train on random data at α = 1, ¾, ½, ¼ and α^min, round-robin; one extra pass warms up.

    Times are lower quartiles, because other processes only ever add time.
    """
    least = config.limits.alpha_min
    alphas = (*(alpha for alpha in (1.0, 0.75, 0.5, 0.25) if alpha > least), least)
    epochs = [timed_epoch(config, net, alpha, clock) for alpha in alphas]
    batch = config.training.batch
    epochs[0](2 * batch)  # the first call of a kernel selects its implementation
    batches = max(2, math.ceil(REPETITION_S / max(epochs[0](batch), 1e-6)))
    samples = max(batch, min(batches * batch, int(config.fleet.samples)))
    seconds = np.empty((repeats + 1, len(alphas)))
    for row in seconds:
        for column, epoch in enumerate(epochs):
            row[column] = epoch(samples) / samples
            after_each()
    quartiles = np.percentile(seconds[1:], 25, axis=0).tolist()
    plans = zip(map(net.plan, alphas), quartiles, strict=True)
    return [WidthTiming(plan.alpha, plan.flops_ratio, quartile) for plan, quartile in plans]


def _mean_square(outputs: Tree, _targets: Tree) -> Tensor:
    """A loss of any output: what is timed does not depend on which loss it is."""
    return main_output(outputs).float().square().mean()


def timed_epoch(
    config: Config,
    net: ElasticModel,
    alpha: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[int], float]:
    """A function that trains a sub-model on N random samples and returns the seconds it took."""
    module, epochs = net.shrink(alpha).module, config.workload.epochs
    training = resolve_training(config.training)
    spec, task = models.load(config.model.name), Task(load=no_data, loss=_mean_square)

    def run(samples: int) -> float:
        drawn = Samples(spec.example(samples), ())
        start = clock()
        train(module, drawn, task, training, 0, epochs=epochs)
        return (clock() - start) / epochs

    return run


def fit_speed(flops_per_sample: float, timings: Sequence[WidthTiming]) -> SpeedFit:
    """The speed and overhead whose worst relative error is smallest.

    Both shares should predict the time: the planner uses α, the simulator the cut's FLOPs ratio.
    For a given overhead the best speed is midway between the slowest and the fastest observed.
    """
    pairs = [(x, t.seconds_per_sample) for t in timings for x in (t.alpha, t.flops_ratio)]
    shares, seconds = np.array(pairs).T
    speeds = flops_per_sample * (shares + OVERHEADS[:, None]) / seconds
    low, high = speeds.min(axis=1), speeds.max(axis=1)
    worst = (high - low) / (high + low)
    best = int(np.argmin(worst))
    return SpeedFit(float(low[best] + high[best]) / 2, float(OVERHEADS[best]), float(worst[best]))
