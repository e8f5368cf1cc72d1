"""A small causal transformer for next characters, in the manner of GPT-2, weights tied."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycostfl.models import ModelSpec
from anycostfl.models.char_lstm import LENGTH, VOCABULARY


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over the places before each one (batch, place, width)."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (batch, place, 3, head, size)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each on the normalised stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        x = x + self.attention(self.norm1(x))
        stream: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return stream


class CharTransformer(nn.Module):
    """Learned positions, pre-norm blocks; the output layer is the embedding."""

    def __init__(self, width: int = 96, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map characters (batch, place) to logits of each next one (batch, place, vocabulary)."""
        stream = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(stream)), self.embedding.weight)


MODEL = ModelSpec(
    build=CharTransformer,
    example=lambda batch: torch.randint(VOCABULARY, (batch, LENGTH)),
    summary="causal transformer for characters",
)
