"""ResNet-18 with GroupNorm (Wu and He, 2018): no running statistics to disagree about."""

from __future__ import annotations

from functools import partial

from torch import nn

from anycostfl.models.resnet18 import spec

MODEL = spec(partial(nn.GroupNorm, 32), "ResNet-18 with GroupNorm(32), 32×32, 3 channels")
