"""A 1-D CNN that predicts one number from 24 hours of 13 measurements."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl.models import ModelSpec


class AirCnn(nn.Module):
    """Two convolutions along time, then two fully connected layers."""

    def __init__(self, channels: int = 13, hours: int = 24) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(channels, 32, 3, padding=1)
        self.conv2 = nn.Conv1d(32, 32, 3, padding=1, stride=2)
        self.fc1 = nn.Linear(32 * hours // 2, 64)
        self.fc2 = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map windows (batch, channel, hour) to one number each (batch, 1)."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        number: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return number


MODEL = ModelSpec(
    build=AirCnn,
    example=lambda batch: torch.randn(batch, 13, 24),
    summary="1-D CNN, 13 measurements × 24 hours",
)
