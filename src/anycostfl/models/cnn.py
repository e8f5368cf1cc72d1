"""The CNN of McMahan et al. for 28×28 grey images, 1,663,370 parameters (paper V-A)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl.models import ModelSpec


class Cnn(nn.Module):
    """Two 5×5 convolutions with pooling, then two fully connected layers."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * 7 * 7, 512)
        self.fc2 = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 1, 28, 28) to logits (batch, classes)."""
        # ReLU and max commute; pooling first leaves a quarter of the elements to ReLU.
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc2(x)
        return logits


MODEL = ModelSpec(
    build=Cnn,
    example=lambda batch: torch.randn(batch, 1, 28, 28),
    summary="McMahan CNN, 28×28 grey",
)
