"""VGG-9 for 32×32 RGB images, 3,491,530 parameters, no BatchNorm (paper V-A, CIFAR-10).

Without BatchNorm the initial weights decide how soon it trains: with PyTorch's own, signals shrink
from layer to layer until all images look alike to the last one. So convolutions begin as in He et
al., "Delving deep into rectifiers" (2015), by what they take in; linear layers as PyTorch has them.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl.models import ModelSpec


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    nn.init.zeros_(conv.get_parameter("bias"))
    return conv


class Vgg9(nn.Module):
    """Three pairs of 3×3 convolutions, each pair followed by pooling, then three linear layers."""

    def __init__(self, classes: int = 10, *, width: float = 1.0) -> None:
        super().__init__()
        widths = [3, *(int(width * channels) for channels in (32, 64, 128, 128, 256, 256))]
        hidden = int(width * 512)
        self.convs = nn.ModuleList(_convolution(i, o) for i, o in pairwise(widths))
        self.fc1 = nn.Linear(widths[-1] * 4 * 4, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 3, 32, 32) to logits (batch, classes)."""
        for first, second in zip(self.convs[::2], self.convs[1::2], strict=True):
            x = F.relu(first(x))
            x = F.relu(F.max_pool2d(second(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        logits: Tensor = self.fc3(x)
        return logits


MODEL = ModelSpec(
    build=Vgg9,
    example=lambda batch: torch.randn(batch, 3, 32, 32),
    summary="VGG-9, 32×32, 3 channels",
)
