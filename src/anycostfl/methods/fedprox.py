"""FedProx (Li et al., 2020): FedAvg with a proximal term, and work as each device can afford it.

    min over w of F_i(w) + μ/2·‖w − w_t‖²

The term keeps local models near the global one, so that unequal numbers of local steps do less
harm. `training.proximal` sets μ; the authors choose it from 0.001, 0.01, 0.1 and 1 by task.
"""

from __future__ import annotations

from dataclasses import replace

from anycostfl.methods.fedavg import METHOD as FEDAVG
from anycostfl.methods.fedavg import STRICT

MU = 0.01

METHOD = replace(
    FEDAVG,
    summary="FedProx: FedAvg with a proximal term, partial work",
    proximal=MU,
    strict=replace(STRICT, proximal=MU),
)
