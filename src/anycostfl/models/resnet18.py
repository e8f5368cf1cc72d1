"""ResNet-18 for 32×32 RGB images (He et al., 2016), with the norm layer of your choice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl.models import ModelSpec

NormLayer = Callable[[int], nn.Module]


def conv3x3(channels_in: int, channels_out: int, stride: int = 1) -> nn.Conv2d:
    """A 3×3 convolution that keeps the size at stride 1."""
    return nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, norm: NormLayer) -> None:
        super().__init__()
        self.conv1 = conv3x3(channels_in, channels_out, stride)
        self.norm1 = norm(channels_out)
        self.conv2 = conv3x3(channels_out, channels_out)
        self.norm2 = norm(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            project = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, norm(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        """One residual step."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """A 3×3 stem, four stages of two blocks each, global pooling, one linear layer."""

    def __init__(self, classes: int = 10, norm: NormLayer = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv3x3(3, 64), norm(64), nn.ReLU())
        widths = [64, 64, 128, 256, 512]
        self.stages = nn.ModuleList(
            nn.Sequential(
                BasicBlock(widths[i], widths[i + 1], 1 if i == 0 else 2, norm),
                BasicBlock(widths[i + 1], widths[i + 1], 1, norm),
            )
            for i in range(4)
        )
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 3, 32, 32) to logits (batch, classes)."""
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def spec(norm: NormLayer, summary: str) -> ModelSpec:
    """The entry of one ResNet-18 variant."""
    return ModelSpec(
        build=partial(ResNet18, norm=norm),
        example=lambda batch: torch.randn(batch, 3, 32, 32),
        summary=summary,
    )


MODEL = spec(nn.BatchNorm2d, "ResNet-18 with BatchNorm, 32×32, 3 channels")
