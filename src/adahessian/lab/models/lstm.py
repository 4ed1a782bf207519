"""A recurrent language model."""

from __future__ import annotations

from torch import Tensor, nn


class LSTM(nn.Module):
    """Embedding, LSTM layers and a linear head.

    Args:
        layers: Number of recurrent layers.
        width: Size of an embedding and of the hidden state.
        vocabulary: Number of tokens.
    """

    def __init__(self, layers: int = 2, width: int = 256, vocabulary: int = 2048) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.recurrent = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens of shape (N, T) to logits of shape (N, T, vocabulary)."""
        states, _ = self.recurrent(self.tokens(tokens))
        logits: Tensor = self.head(states)
        return logits
