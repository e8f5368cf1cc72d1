"""A next-character LSTM of the size LEAF uses for Shakespeare (Caldas et al., 2018)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anycostfl.models import ModelSpec

VOCABULARY = 80
LENGTH = 80


class CharLstm(nn.Module):
    """Embedding, two LSTM layers, a linear layer on the last step."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map characters (batch, length) to logits of the next one (batch, vocabulary)."""
        states, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(states[:, -1])
        return logits


MODEL = ModelSpec(
    build=CharLstm,
    example=lambda batch: torch.randint(VOCABULARY, (batch, LENGTH)),
    summary="two-layer character LSTM",
)
