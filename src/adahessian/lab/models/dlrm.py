"""DLRM, the recommendation model of Naumov et al. (2019)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

Widths = Sequence[int]


class DLRM(nn.Module):
    """Embeddings of categories and of numbers, their pairwise dot products, and a network on top.

    All columns of categories share one table, so that one lookup serves all of them. Its gradient is sparse.
    """

    def __init__(
        self, categories: int, width: int, bottom: Widths, top: Widths, *, numbers: int = 13, columns: int = 26
    ) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(columns * categories, width, sparse=True)
        nn.init.uniform_(self.embeddings.weight, -(categories**-0.5), categories**-0.5)
        self.bottom = nn.Sequential(*_layers((numbers, *bottom, width)))
        pairs = torch.tril_indices(columns + 1, columns + 1, offset=-1)
        self.top = nn.Sequential(*_layers((width + pairs.shape[1], *top, 1))[:-1])
        self.first_rows = nn.Buffer(torch.arange(columns) * categories, persistent=False)
        self.pairs = nn.Buffer(pairs[0] * (columns + 1) + pairs[1], persistent=False)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Return logits of shape (N,) for numbers of shape (N, numbers) and categories of shape (N, columns)."""
        dense = self.bottom(numbers)
        embedded = torch.cat([dense.unsqueeze(1), self.embeddings(categories + self.first_rows)], dim=1)
        products = (embedded @ embedded.mT).flatten(1).index_select(1, self.pairs)
        logits: Tensor = self.top(torch.cat([dense, products], dim=1))
        return logits.squeeze(1)


def _layers(widths: Widths) -> list[nn.Module]:
    """Return linear layers, each followed by a ReLU, initialized as by DLRM's authors."""
    layers: list[nn.Module] = []
    for width_in, width in pairwise(widths):
        linear = nn.Linear(width_in, width)
        nn.init.normal_(linear.weight, std=(2 / (width_in + width)) ** 0.5)
        nn.init.normal_(linear.bias, std=width**-0.5)
        layers += [linear, nn.ReLU()]
    return layers
