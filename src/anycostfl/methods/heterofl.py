"""HeteroFL (Diao et al., 2021): widths by computing capacity, averaged over their holders.

A device's width follows from its processor and its data, never from its own radio or budget: the
widest sub-model whose computing, in the time that the cohort's average radio leaves, costs the
cohort's average energy budget. Sub-models are nested from the first channel on, never sorted; while
training, each cut layer's output is scaled up by one over the width that is left (the Scaler).
Every device uploads at one rate whatever its channel, so those with less than the average radio are
late, and those with less than the average budget exceed it.

Deviations: the original does not compress; here the payload is our kernel codec's, at the rate
recovered from the paper's table, and elements that were not sent count as zero. Widths are
continuous instead of five classes. Left out: the original's clipping of gradients (for all methods
alike it is `training.clip_norm`); for non-IID data its loss over a device's own classes alone, and
its averaging of the last layer's rows over those who have the class; its static BatchNorm
(docs/decisions/0003 says what is done instead).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
from torch import Tensor, nn

from anycostfl.codec import encode
from anycostfl.methods import Method
from anycostfl.methods._common import (
    CODED,
    affordable_widths_at,
    average,
    decode_unmasked,
    weigh_by_samples,
)
from anycostfl.planning import cost
from anycostfl.planning.cost import Devices, Workload
from anycostfl.planning.planner import fixed_strategies
from anycostfl.planning.strategy import Limits, Strategies

RATE = 1 / 41  # αβ on average, recovered from the paper's table


def plan(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """α from ε·(αC)³ / t² = mean energy budget, t being what an average upload leaves."""
    rate = limits.upload_ratio or RATE
    upload = rate * workload.size_bits / average(devices.rate_bps, limits.claims)
    left = np.maximum(devices.latency_s - upload, 0.1 * devices.latency_s)
    cycles = cost.compute_cycles(devices, workload)
    budget = average(devices.energy_j, limits.claims)
    widest = np.cbrt(budget * left**2 / devices.energy_coefficient) / cycles
    alpha = np.clip(widest - devices.overhead, limits.alpha_min, 1.0)
    beta = np.minimum(1.0, rate / average(alpha)) * np.ones(len(devices))
    frequency = cost.sub_model_cycles(devices, workload, alpha) / left
    return fixed_strategies(
        devices, workload, alpha=alpha, beta=beta, frequency_hz=frequency, limits=limits
    )


def prepare(module: nn.Module, whole: nn.Module) -> None:
    """Scale the output of every layer that was cut by one over its remaining width, in training."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            full = cast("nn.Linear", whole.get_submodule(name)).weight.shape[0]
            if layer.weight.shape[0] < full:
                layer.register_forward_hook(partial(_scale, full / layer.weight.shape[0]))


def _scale(factor: float, layer: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    return output * factor if layer.training else output


METHOD = Method(
    summary="HeteroFL: nested widths by computing capacity, averaged where they overlap",
    plan=plan,
    encode=encode,
    decode=decode_unmasked,
    weigh=weigh_by_samples,
    sorts_channels=False,
    prepare=prepare,
)
STRICT = replace(METHOD, plan=affordable_widths_at(CODED), codec="lowrank", feedback=True)
METHOD = replace(METHOD, strict=STRICT)

VARIANTS = {
    "without-scaler": replace(
        METHOD,
        summary="HeteroFL without its Scaler",
        prepare=None,
        strict=replace(STRICT, prepare=None),
    ),
}
