"""VGG-9 at half its widths, for comparisons that have to run on two cores."""

from __future__ import annotations

from functools import partial

import torch

from anycostfl.models import ModelSpec
from anycostfl.models.vgg9 import Vgg9

MODEL = ModelSpec(
    build=partial(Vgg9, width=0.5),
    example=lambda batch: torch.randn(batch, 3, 32, 32),
    summary="VGG-9 at half width, 32×32, 3 channels",
)
