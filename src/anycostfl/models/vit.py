"""A small vision transformer (Dosovitskiy et al., 2021) for 32×32 RGB images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl.models import ModelSpec


class Attention(nn.Module):
    """Multi-head self-attention whose head size follows from the weights, so it can be narrowed."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over tokens (batch, token, width)."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (batch, token, 3, head, size)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each on the normalised stream."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer of the transformer."""
        x = x + self.attention(self.norm1(x))
        stream: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return stream


class Vit(nn.Module):
    """4×4 patches, learned positions, pre-norm blocks, mean over tokens."""

    def __init__(self, classes: int = 10, width: int = 128, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.positions = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, 2 * width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 3, 32, 32) to logits (batch, classes)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits


MODEL = ModelSpec(
    build=Vit,
    example=lambda batch: torch.randn(batch, 3, 32, 32),
    summary="small vision transformer, 32×32, 3 channels",
)
