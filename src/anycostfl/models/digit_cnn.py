"""A CNN for spectrograms of 32 × 32, 33,932 parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl.models import ModelSpec


class DigitCnn(nn.Module):
    """Three 3×3 convolutions with pooling, then two fully connected layers."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 38)
        self.fc2 = nn.Linear(38, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map spectrograms (batch, 1, 32, 32) to logits (batch, classes)."""
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.relu(F.max_pool2d(conv(x), 2))
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


MODEL = ModelSpec(
    build=DigitCnn,
    example=lambda batch: torch.randn(batch, 1, 32, 32),
    summary="small CNN, spectrograms 32×32",
)
