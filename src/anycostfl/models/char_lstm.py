"""A next-character LSTM that predicts at every place of a window."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anycostfl.models import ModelSpec

VOCABULARY, LENGTH = 72, 80  # characters and the unknown one, places


class CharLstm(nn.Module):
    """Embedding, one LSTM layer, one linear layer."""

    def __init__(self, vocabulary: int = VOCABULARY, width: int = 192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 32)
        self.lstm = nn.LSTM(32, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map characters (batch, place) to logits of each next one (batch, place, vocabulary)."""
        states, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(states)
        return logits


MODEL = ModelSpec(
    build=CharLstm,
    example=lambda batch: torch.randint(VOCABULARY, (batch, LENGTH)),
    summary="character LSTM, every place",
)
