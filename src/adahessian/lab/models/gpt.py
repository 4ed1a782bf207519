"""Language models over tokens: a GPT, and an LSTM to benchmark."""

from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Layer(nn.Module):
    """Causal self-attention and a feed-forward network, each with layer norm before it and a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return cast(Tensor, x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))))


class GPT(nn.Module):
    """A pre-norm, causal Transformer whose output layer is its embedding, with dropout after each part of a layer."""

    def __init__(
        self, layers: int, width: int, heads: int, vocabulary: int, context: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, param in self.named_parameters():
            if param.dim() == 2:
                scale = 0.02 / (2 * layers) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 0.02
                nn.init.normal_(param, std=scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens of shape (N, T) to logits of shape (N, T, vocabulary)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for layer in self.layers:
            x = layer(x)
        return cast(Tensor, self.head(self.norm(x)))


class LSTM(nn.Module):
    """Embedding, LSTM layers and a linear head."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.recurrent = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens of shape (N, T) to logits of shape (N, T, vocabulary)."""
        return cast(Tensor, self.head(self.recurrent(self.tokens(tokens))[0]))
