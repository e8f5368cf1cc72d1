"""The CNN of McMahan et al. for 28×28 grey images, 1,663,370 parameters (paper V-A)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl.models import ModelSpec


class Cnn(nn.Module):
    """Two 5×5 convolutions with pooling, then two fully connected layers."""

    def __init__(self, classes: int = 10, *, width: float = 1.0) -> None:
        super().__init__()
        first, second, hidden = (int(width * channels) for channels in (32, 64, 512))
        self.conv1 = nn.Conv2d(1, first, 5, padding=2)
        self.conv2 = nn.Conv2d(first, second, 5, padding=2)
        self.fc1 = nn.Linear(second * 7 * 7, hidden)
        self.fc2 = nn.Linear(hidden, classes)

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
