"""McMahan's CNN at half its widths, for comparisons that have to run on two cores."""

from __future__ import annotations

from functools import partial

import torch

from anycostfl.models import ModelSpec
from anycostfl.models.cnn import Cnn

MODEL = ModelSpec(
    build=partial(Cnn, width=0.5),
    example=lambda batch: torch.randn(batch, 1, 28, 28),
    summary="McMahan CNN at half width, 28×28 grey",
)
