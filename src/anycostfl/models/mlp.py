"""A perceptron for rows of a table: 13 numbers, two classes."""

from __future__ import annotations

import torch
from torch import nn

from anycostfl.models import ModelSpec


def build(inputs: int = 13, classes: int = 2, width: int = 32) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, classes),
    )


MODEL = ModelSpec(
    build=build,
    example=lambda batch: torch.randn(batch, 13),
    summary="perceptron, 13 numbers",
)
