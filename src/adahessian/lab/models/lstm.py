"""A recurrent language model."""

from __future__ import annotations

from torch import Tensor, nn


class LSTM(nn.Module):
    """Embedding, LSTM layers and a linear head."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.recurrent = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens of shape (N, T) to logits of shape (N, T, vocabulary)."""
        logits: Tensor = self.head(self.recurrent(self.tokens(tokens))[0])
        return logits
