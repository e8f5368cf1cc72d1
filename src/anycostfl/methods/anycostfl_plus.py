"""AnycostFL with what came after the paper: low rank, error feedback, thin uploads, momentum.

Low rank keeps nearly all of an update in a few hundredths of what the paper's codec needs (decision
0011), and what a payload could not carry is sent later (decision 0012). So β stays below `THIN`
whatever the planner could afford, and time and energy go into computing: wider sub-models. Low rank
sends no mask, so every element of a sub-model counts in every round, and the server has momentum.

`anycostfl+/tuned` is what came out of trials under equal budgets (decision 0075): a momentum of
0.7, β up to `TUNED_BETA`, weights times samples, the model averaged over rounds, no sub-model below
`LEAST_WIDTH` (a device that affords less computes fewer steps at that width).
`anycostfl+/without-ems` is the same on full models, with as many steps as a device affords.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from anycostfl.methods._common import partial_work_at
from anycostfl.methods.anycostfl import METHOD as PAPERS
from anycostfl.methods.fednova import rescale
from anycostfl.planning.afford import affordable_upload, strategies_of
from anycostfl.planning.cost import Devices, Workload
from anycostfl.planning.planner import plan_strategies
from anycostfl.planning.strategy import Limits, Strategies

THIN = 1 / 400  # the largest β, where the limits allow so little
TUNED_BETA = 1 / 100  # the same of `anycostfl+/tuned`
LEAST_WIDTH = 0.375  # sub-models of a quarter of the FLOPs fall off
MOST_WORK = 2.0  # of the configured steps


def plan(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """AnycostFL's plan with thin uploads, and the gain of the codec."""
    most = max(min(limits.beta_max, THIN), limits.beta_min)
    return plan_strategies(devices, workload, replace(limits, beta_max=most))


def plan_tuned(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """The plan of `METHOD` with the caps of trials; partial work below the least width."""
    return plan_with_work(devices, workload, limits, most=1.0)


def plan_extra(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """The same, and further steps where a full model leaves slack."""
    return plan_with_work(devices, workload, limits, most=MOST_WORK)


def plan_with_work(
    devices: Devices, workload: Workload, limits: Limits, *, most: float
) -> Strategies:
    """Widths by the planner, then the work that budgets leave: below one, or above it at α = 1."""
    least = max(limits.alpha_min, LEAST_WIDTH)
    beta = max(min(limits.beta_max, TUNED_BETA), limits.beta_min)
    caps = replace(limits, alpha_min=least, beta_max=beta)
    planned = plan_strategies(devices, workload, caps)
    alpha = np.where(planned.feasible, planned.alpha, least)
    thinnest = affordable_upload(devices, workload, caps, least * beta)
    upload = np.where(planned.feasible, planned.alpha * planned.beta, thinnest)
    ceiling = np.where(alpha >= 1, most, 1.0)
    return strategies_of(devices, workload, caps, alpha=alpha, upload=upload, most_work=ceiling)


METHOD = replace(
    PAPERS,
    summary="AnycostFL+: low rank, error feedback, momentum, wider sub-models",
    plan=plan,
    codec="lowrank",
    feedback=True,
    momentum=0.5,
)

TUNED = replace(
    METHOD,
    summary="AnycostFL+ as tuned under equal budgets",
    plan=plan_tuned,
    by_samples=True,
    momentum=0.7,
    average=0.8,
)

VARIANTS = {
    "tuned": TUNED,
    "extra-work": replace(
        TUNED,
        summary="… with further local steps where a full model leaves slack",
        plan=plan_extra,
        rescale=rescale,
    ),
    "without-average": replace(TUNED, summary="… evaluated as it is", average=0.0),
    "without-samples": replace(TUNED, summary="… with Theorem 1's weights", by_samples=False),
    "without-momentum": replace(TUNED, summary="… without momentum", momentum=0.0),
    "without-ems": replace(
        TUNED,
        summary="… on full models, with the steps that a device affords",
        plan=partial_work_at(TUNED_BETA),
    ),
}
