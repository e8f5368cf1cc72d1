"""FedRolex (Alam et al., 2022): the sub-model's window rolls over the channels, round by round.

    S_t = {t mod K, …, t + α_K·K − 1 mod K} of every hidden layer's K channels

Every channel is trained equally often, also those that a fixed prefix would leave to the strongest
devices. Here the channels move by one instead of the window, which is the same. Widths, coding and
Scaler are HeteroFL's (as in the authors' program, which builds on that one).
"""

from __future__ import annotations

from dataclasses import replace

from anycostfl.methods.heterofl import METHOD as HETEROFL
from anycostfl.methods.heterofl import STRICT

METHOD = replace(
    HETEROFL,
    summary="FedRolex: widths by computing capacity, from a window that rolls over the channels",
    rolls_channels=True,
    strict=replace(STRICT, rolls_channels=True),
)
