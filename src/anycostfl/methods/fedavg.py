"""FedAvg (McMahan et al., 2017): full width, nothing compressed, weights by sample count.

It knows no budgets: every device takes part and pays what it costs, at the clock that finishes
computing within the latency budget if there is one.
"""

from __future__ import annotations

import numpy as np

from anycostfl.methods import Method
from anycostfl.methods._common import decode_dense, encode_dense, weigh_by_samples
from anycostfl.planning.cost import Devices, Workload
from anycostfl.planning.planner import fixed_strategies
from anycostfl.planning.strategy import Limits, Strategies


def plan(devices: Devices, workload: Workload, limits: Limits) -> Strategies:
    """α = β = 1 for everyone, whatever it costs."""
    del limits
    ones = np.ones(len(devices))
    return fixed_strategies(devices, workload, alpha=ones, beta=ones)


METHOD = Method(
    summary="FedAvg: full models, uncompressed updates, no budgets",
    plan=plan,
    encode=encode_dense,
    decode=decode_dense,
    weigh=weigh_by_samples,
    sorts_channels=False,
    by_samples=True,
    takes_upload_ratio=False,
)
