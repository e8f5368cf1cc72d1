"""A 1-D CNN for windows of six sensor channels, 32,614 parameters: small enough for a watch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl.models import ModelSpec


class HarCnn(nn.Module):
    """Three convolutions along time, the mean over time, one linear layer."""

    def __init__(self, channels: int = 6, classes: int = 6) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(channels, 32, 7, padding=3)
        self.conv2 = nn.Conv1d(32, 64, 5, padding=2)
        self.conv3 = nn.Conv1d(64, 64, 5, padding=2)
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map windows (batch, channel, time) to logits (batch, classes)."""
        x = F.max_pool1d(F.relu(self.conv1(x)), 2)
        x = F.max_pool1d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.conv3(x))
        logits: Tensor = self.head(x.mean(2))
        return logits


MODEL = ModelSpec(
    build=HarCnn,
    example=lambda batch: torch.randn(batch, 6, 128),
    summary="1-D CNN, 6 sensor channels × 128",
)
