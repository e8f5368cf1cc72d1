"""FedYogi (Reddi et al., 2021): FedAvg, and a server that is Yogi.

w ← w − η·m / (√v + τ), as `server.adaptive` has it
"""

from __future__ import annotations

from dataclasses import replace

from anycostfl.methods.fedavg import METHOD as FEDAVG
from anycostfl.methods.fedavg import STRICT

MOMENTUM = 0.9
STEP = 0.02  # η, relative to an adaptive optimizer's own scale

METHOD = replace(
    FEDAVG,
    summary="FedYogi: FedAvg with Yogi on the server",
    momentum=MOMENTUM,
    server="yogi",
    step=STEP,
    strict=replace(STRICT, momentum=MOMENTUM, server="yogi", step=STEP),
)
