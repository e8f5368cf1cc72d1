"""FedAvgM (Hsu et al., 2019): FedAvg, and a server that has momentum.

v ← μv + ũ,   w ← w − ηv
"""

from __future__ import annotations

from dataclasses import replace

from anycostfl.methods.fedavg import METHOD as FEDAVG
from anycostfl.methods.fedavg import STRICT

MOMENTUM = 0.9

METHOD = replace(
    FEDAVG,
    summary="FedAvgM: FedAvg with momentum on the server",
    momentum=MOMENTUM,
    strict=replace(STRICT, momentum=MOMENTUM),
)
