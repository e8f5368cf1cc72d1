"""How fast this machine trains the task's own model at several widths: a speed and an overhead.

The cost model says that time is W·α/f with one W for all widths (Sec. IV-A). Real time is nearer to
W·(α + o)/f: some work is there at every width, and narrow layers fill vector units less well. The
pair (W, o) is the one whose worst relative error of the predicted time is least (decision 0041).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from anycostfl import models
from anycostfl.config import Config
from anycostfl.device import train
from anycostfl.experiment import train_options
from anycostfl.shrink import ElasticModel

REPETITION_S = 0.5
"""How long one repetition at full width should take at least."""

OVERHEADS = np.concatenate([np.linspace(0.0, 0.5, 501), np.geomspace(0.5, 100.0, 1001)[1:]])
"""What is tried as the overhead; three digits are more than times on a real machine have.

Networks so small that calling a kernel takes longer than its arithmetic have overheads above 1.
"""


@dataclass(frozen=True, slots=True)
class Pace:
    """Training at one width: α, the FLOPs ratio it really has, seconds per sample."""

    alpha: float
    flops_ratio: float
    seconds_per_sample: float


@dataclass(frozen=True, slots=True)
class Speed:
    """FLOPs per second, the overhead o, and the worst relative error of times so predicted."""

    flops_per_second: float
    overhead: float
    worst_error: float

    def seconds(self, flops: float, share: float) -> float:
        """Predicted time of a sub-model that has this share of the full model's FLOPs."""
        return flops * (share + self.overhead) / self.flops_per_second


def elastic_model(config: Config) -> ElasticModel:
    """The task's own model."""
    spec = models.load(config.model.name)
    return ElasticModel(spec.build(), spec.example(2), rule=config.model.widths)


def measured_alphas(config: Config) -> tuple[float, ...]:
    """Full width, three quarters, a half, a quarter, and the narrowest that is ever planned."""
    least = config.limits.alpha_min
    return (*(alpha for alpha in (1.0, 0.75, 0.5, 0.25) if alpha > least), least)


def measure_paces(
    config: Config,
    net: ElasticModel,
    alphas: Sequence[float],
    repeats: int,
    *,
    between: Callable[[], None],
    clock: Callable[[], float],
) -> list[Pace]:
    """Train at all widths in turns on made-up data. `between` is called after each."""
    epochs = [local_epoch(config, net, alpha, clock) for alpha in alphas]
    batch, longest = config.training.batch, int(config.fleet.samples)
    epochs[0](2 * batch)  # the first call of a kernel finds out how to run it
    batches = math.ceil(REPETITION_S / max(epochs[0](batch), 1e-6))
    samples = min(max(2, batches) * batch, max(longest, batch))
    seen: list[list[float]] = [[] for _ in alphas]
    for _ in range(repeats + 1):
        for epoch, seconds in zip(epochs, seen, strict=True):
            seconds.append(epoch(samples) / samples)
            between()
    plans = [net.plan(alpha) for alpha in alphas]
    return [
        Pace(plan.alpha, plan.flops_ratio, typical(seconds[1:]))
        for plan, seconds in zip(plans, seen, strict=True)
    ]


def typical(seconds: Sequence[float]) -> float:
    """The lower quartile: whatever else runs on a machine only ever adds time."""
    return float(np.percentile(seconds, 25))


def local_epoch(
    config: Config,
    net: ElasticModel,
    alpha: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[int], float]:
    """A function that trains a sub-model on so many samples and says how many seconds it took."""
    module, spec, options = (
        net.shrink(alpha).module,
        models.load(config.model.name),
        train_options(config),
    )
    with torch.no_grad():
        classes = module(spec.example(2)).shape[-1]

    def run(samples: int) -> float:
        images, labels = spec.example(samples), torch.randint(classes, (samples,))
        start = clock()
        train(module, images, labels, options, torch.Generator().manual_seed(0))
        return (clock() - start) / options.epochs

    return run


def fit_speed(flops_per_sample: float, paces: Sequence[Pace]) -> Speed:
    """The speed and overhead with the least worst error.

    The planner predicts with α, the simulator charges the FLOPs ratio of the cut; both should hold.
    With a given overhead the best speed is the middle of the slowest and the fastest that was seen.
    """
    seen = [(share, p.seconds_per_sample) for p in paces for share in (p.alpha, p.flops_ratio)]
    shares, seconds = np.array(seen).T
    speeds = flops_per_sample * (shares + OVERHEADS[:, None]) / seconds
    low, high = speeds.min(axis=1), speeds.max(axis=1)
    worst = (high - low) / (high + low)
    best = int(np.argmin(worst))
    return Speed(float(low[best] + high[best]) / 2, float(OVERHEADS[best]), float(worst[best]))
