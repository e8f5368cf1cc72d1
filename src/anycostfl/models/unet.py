"""A small U-Net (Ronneberger et al., 2015) for grey pictures: one of six classes for each pixel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl.models import ModelSpec


def double(channels_in: int, channels_out: int) -> nn.Sequential:
    """Two 3×3 convolutions."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels_out, channels_out, 3, padding=1),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Down twice, up twice, with shortcuts."""

    def __init__(self, classes: int = 6, width: int = 16) -> None:
        super().__init__()
        self.down1 = double(1, width)
        self.down2 = double(width, 2 * width)
        self.bottom = double(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.merge2 = double(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge1 = double(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map pictures (batch, 1, height, width) to logits (batch, classes, height, width)."""
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.bottom(F.max_pool2d(second, 2))
        x = self.merge2(torch.cat([second, self.up2(x)], dim=1))
        x = self.merge1(torch.cat([first, self.up1(x)], dim=1))
        logits: Tensor = self.head(x)
        return logits


MODEL = ModelSpec(
    build=UNet,
    example=lambda batch: torch.randn(batch, 1, 48, 48),
    summary="small U-Net, pixels of 48×48 grey",
)
