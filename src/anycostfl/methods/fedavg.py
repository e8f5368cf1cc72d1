"""FedAvg (McMahan et al., 2017): full width, nothing compressed, weights by sample count.

It knows no budgets: every device takes part and pays what it costs, at the clock that finishes
computing within the latency budget if there is one. With strict budgets a device computes the
steps that it can afford, and its update is coded by ours, with error feedback; `VARIANTS` are two
other ways to keep budgets, in `run.budgets = "strict"` only.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from anycostfl.methods import Method
from anycostfl.methods._common import (
    CODED,
    decode_at_rate,
    encode_at_rate,
    partial_work_at,
    weigh_by_samples,
)
from anycostfl.planning.afford import affordable_cycles, affordable_upload, strategies_of
from anycostfl.planning.cost import Devices, Workload, widest_in_memory
from anycostfl.planning.planner import fixed_strategies
from anycostfl.planning.strategy import Limits, Strategies


def plan(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """α = β = 1 for everyone, whatever it costs."""
    del limits
    ones = np.ones(len(devices))
    return fixed_strategies(devices, workload, alpha=ones, beta=ones)


def plan_one_width(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """One width a round: the widest that the whole cohort affords, but never the least one."""
    upload = affordable_upload(devices, workload, limits, limits.upload_ratio or CODED)
    widest = affordable_cycles(devices, workload, upload) - devices.overhead
    widest = np.minimum(widest, widest_in_memory(devices))
    least = np.clip(widest.min(initial=1.0), limits.alpha_min, 1.0)
    alpha = np.full(len(devices), least)
    return strategies_of(devices, workload, limits, alpha=alpha, upload=np.minimum(upload, alpha))


def plan_the_able(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """Full models and all epochs, of the devices that can afford them; the others sit out."""
    planned = partial_work_at(CODED)(devices, workload, limits)
    able = planned.feasible & (planned.work >= 1)
    return fixed_strategies(
        devices,
        workload,
        alpha=np.ones(len(devices)),
        beta=np.where(able, planned.beta, 1.0),
        frequency_hz=planned.frequency_hz,
        limits=limits,
        feasible=able,
    )


METHOD = Method(
    summary="FedAvg: full models, uncompressed updates, no budgets",
    plan=plan,
    encode=encode_at_rate,
    decode=decode_at_rate,
    weigh=weigh_by_samples,
    sorts_channels=False,
    by_samples=True,
    takes_upload_ratio=False,
)
STRICT = replace(METHOD, plan=partial_work_at(CODED), codec="lowrank", feedback=True)
METHOD = replace(METHOD, strict=STRICT)

VARIANTS = {
    "one-width": replace(
        METHOD,
        summary="FedAvg on one width that the whole cohort affords, channels sorted",
        sorts_channels=True,
        strict=replace(STRICT, plan=plan_one_width, sorts_channels=True),
    ),
    "the-able": replace(
        METHOD,
        summary="FedAvg without the devices that cannot afford the full model",
        strict=replace(STRICT, plan=plan_the_able),
    ),
}
