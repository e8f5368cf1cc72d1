"""AnycostFL with what came after the paper: low rank, error feedback, thin uploads, momentum.

Low rank keeps nearly all of an update in a few hundredths of what the paper's codec needs (decision
0011), and what a payload could not carry is sent later (decision 0012). So β stays below `THIN`
whatever the planner could afford, and time and energy go into computing: wider sub-models. Low rank
sends no mask, so every element of a sub-model counts in every round, and the server has momentum.
"""

from __future__ import annotations

from dataclasses import replace

from anycostfl.methods.anycostfl import METHOD as PAPERS
from anycostfl.planning.cost import Devices, Workload
from anycostfl.planning.planner import plan_strategies
from anycostfl.planning.strategy import Limits, Strategies

THIN = 1 / 400  # the largest β, where the limits allow so little


def plan(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """AnycostFL's plan with thin uploads, and the gain of the codec."""
    most = max(min(limits.beta_max, THIN), limits.beta_min)
    return plan_strategies(devices, workload, replace(limits, beta_max=most))


METHOD = replace(
    PAPERS,
    summary="AnycostFL+: low rank, error feedback, momentum, wider sub-models",
    plan=plan,
    codec="lowrank",
    feedback=True,
    momentum=0.5,
)
