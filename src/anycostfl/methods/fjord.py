"""FjORD (Horváth et al., 2021): ordered dropout; local steps train nested widths in turn.

    each local step: p ~ {levels up to the device's own}, train the first channels for p

A device's own level follows from what it can afford; sub-models are nested from the first channel
on, never sorted, and averaged over those who hold an element. What is charged is the mean over the
levels, so a device affords a wider level than it could train in every step.

Deviations: levels are shares of the FLOPs, not of the channels; steps take the levels in random
turns instead of drawing each anew, so that the charged mean is what is computed; the distillation
that the authors add for devices with slack is left out. The upload is coded as HeteroFL's is.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from anycostfl.checks import FloatArray
from anycostfl.methods._common import CODED
from anycostfl.methods.heterofl import METHOD as HETEROFL
from anycostfl.methods.heterofl import STRICT
from anycostfl.methods.heterofl import plan as plan_by_capacity
from anycostfl.planning.afford import affordable_cycles, affordable_upload, strategies_of
from anycostfl.planning.cost import Devices, Workload, widest_in_memory
from anycostfl.planning.planner import fixed_strategies
from anycostfl.planning.strategy import Limits, Strategies

LEVELS = (0.25, 0.5, 0.75, 1.0)


def mean_level(level: FloatArray, least: float) -> FloatArray:
    """What a step of a device at that level takes, in the mean over its levels."""
    held = np.array(levels(least))
    below: FloatArray = np.array([held[held <= x].mean() for x in level])
    return below


def levels(least: float) -> list[float]:
    """The levels that are no narrower than the limits allow."""
    return sorted({max(level, least) for level in LEVELS})


def plan(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """HeteroFL's widths, down to a level; no device's budget decides."""
    planned = plan_by_capacity(devices, workload, limits)
    alpha = _down(planned.alpha, np.array(levels(limits.alpha_min)))
    beta = np.minimum(1.0, planned.beta * planned.alpha / alpha)
    return fixed_strategies(devices, workload, alpha=alpha, beta=beta, limits=limits)


def plan_strictly(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """The widest level whose mean step is affordable; below the least one, less work."""
    upload = affordable_upload(devices, workload, limits, limits.upload_ratio or CODED)
    held = np.array(levels(limits.alpha_min))
    means = mean_level(held, limits.alpha_min)
    cycles = affordable_cycles(devices, workload, upload) - devices.overhead
    alpha = held[np.maximum(np.searchsorted(means, cycles, side="right") - 1, 0)]
    alpha = np.minimum(alpha, _down(widest_in_memory(devices), held))
    part = mean_level(alpha, limits.alpha_min) / alpha
    upload = np.minimum(upload, alpha)
    return strategies_of(devices, workload, limits, alpha=alpha, upload=upload, part=part)


def _down(alpha: FloatArray, held: FloatArray) -> FloatArray:
    found: FloatArray = held[np.maximum(np.searchsorted(held, alpha, side="right") - 1, 0)]
    return found


METHOD = replace(
    HETEROFL,
    summary="FjORD: ordered dropout, nested widths in every device's steps",
    plan=plan,
    prepare=None,
    levels=LEVELS,
    strict=replace(STRICT, plan=plan_strictly, prepare=None, levels=LEVELS),
)
