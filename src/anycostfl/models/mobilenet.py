"""A small MobileNetV2 (Sandler et al., 2018) for 32×32 RGB images: depthwise convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl.models import ModelSpec


class InvertedResidual(nn.Module):
    """Expand with a 1×1, filter each channel by itself, project with a 1×1 (no activation)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels_in * expansion
        self.expand = nn.Conv2d(channels_in, hidden, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(hidden)
        self.depthwise = nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False)
        self.norm2 = nn.BatchNorm2d(hidden)
        self.project = nn.Conv2d(hidden, channels_out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(channels_out)
        self.residual = stride == 1 and channels_in == channels_out

    def forward(self, x: Tensor) -> Tensor:
        """One block, with its shortcut where shapes allow."""
        hidden = F.relu6(self.norm1(self.expand(x)))
        hidden = F.relu6(self.norm2(self.depthwise(hidden)))
        y: Tensor = self.norm3(self.project(hidden))
        return x + y if self.residual else y


class MobileNet(nn.Module):
    """A stem, seven inverted residual blocks, a 1×1 head."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        plan = [(32, 1), (32, 1), (48, 2), (48, 1), (64, 2), (64, 1), (96, 2)]  # channels, stride
        channels_in = [32, *(channels for channels, _ in plan)]
        self.blocks = nn.Sequential(
            *(
                InvertedResidual(before, channels, stride, expansion=4)
                for before, (channels, stride) in zip(channels_in, plan, strict=False)
            )
        )
        self.last = nn.Conv2d(96, 256, 1, bias=False)
        self.last_norm = nn.BatchNorm2d(256)
        self.head = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 3, 32, 32) to logits (batch, classes)."""
        x = self.blocks(F.relu6(self.norm(self.stem(x))))
        x = F.relu6(self.last_norm(self.last(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


MODEL = ModelSpec(
    build=MobileNet,
    example=lambda batch: torch.randn(batch, 3, 32, 32),
    summary="small MobileNetV2, 32×32, 3 channels",
)
