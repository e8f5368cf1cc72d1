"""AnycostFL (Li et al., 2023): the best strategy that every device can afford, each round.

`VARIANTS` leave out one of its three parts (paper V-C): elastic model shrinking (EMS), flexible
gradient compression (FGC) or all-in-one aggregation (AIO). What a device would have uploaded or
computed otherwise stays as planned; what the missing part saved is paid, whatever the budgets say.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from anycostfl.codec import decode, encode
from anycostfl.methods import Method
from anycostfl.methods._common import (
    decode_dense,
    decode_unmasked,
    encode_dense,
    weigh_by_samples,
)
from anycostfl.planning.cost import Devices, Workload
from anycostfl.planning.planner import fixed_strategies, plan_strategies
from anycostfl.planning.strategy import Limits, Strategies
from anycostfl.server.aggregate import optimal_weights

METHOD = Method(
    summary="AnycostFL: sub-models, compressed kernels and clocks planned under budgets",
    plan=plan_strategies,
    encode=encode,
    decode=decode,
    weigh=optimal_weights,
    sorts_channels=True,
    plans_alone=True,
    takes_upload_ratio=False,
)


def plan_full_width(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """The planned upload of everyone, but full models."""
    planned = plan_strategies(devices, workload, limits)
    share = np.where(planned.feasible, planned.alpha * planned.beta, limits.beta_min)
    everyone = np.ones(len(devices))
    return fixed_strategies(devices, workload, alpha=everyone, beta=share, limits=limits)


def plan_uncompressed(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """The planned widths of everyone, but 32 bits for each element."""
    planned = plan_strategies(devices, workload, limits)
    alpha = np.where(planned.feasible, planned.alpha, limits.alpha_min)
    return fixed_strategies(devices, workload, alpha=alpha, beta=np.ones(len(devices)))


VARIANTS = {
    "without-ems": replace(
        METHOD, summary="AnycostFL with full models", plan=plan_full_width, plans_alone=False
    ),
    "without-fgc": replace(
        METHOD,
        summary="AnycostFL without compression",
        plan=plan_uncompressed,
        plans_alone=False,
        encode=encode_dense,
        decode=decode_dense,
    ),
    "without-aio": replace(
        METHOD,
        summary="AnycostFL with plain averaging",
        decode=decode_unmasked,
        weigh=weigh_by_samples,
    ),
}
