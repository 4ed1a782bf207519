"""The multi-linear attention of the tensorized transformer (Ma et al., 2019), with one core, and causal."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adahessian.lab.models.word_transformer import RelativePositions


class MultiLinearAttention(nn.Module):
    r"""Attention without a softmax: a product of query, key and value, mapped by one linear layer.

    .. math::
        A_{ijk} = \sum_r c_r \, q_{ir} \, (k_{jr} + p_{i-j,r}) \, v_{kr}
        \qquad \text{for } j \le i, k \le i, \text{ else } 0

    with the core c and the keys p of relative positions. The row of all :math:`A_{ijk}` of a place i is the input of
    the linear layer. Its authors' code takes a mask and never applies it, so that a word sees those it is to predict;
    this one applies it.

    Args:
        segment: Length of a segment.
        width: Size of an activation.
        rank: Size of query, key, value and core.
    """

    earlier: Tensor

    def __init__(self, segment: int, width: int, rank: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * rank, bias=False)
        self.positions = RelativePositions(segment, width, rank)
        self.core = nn.Parameter(torch.rand(rank))
        self.out = nn.Linear(segment * segment, width, bias=False)
        self.register_buffer("earlier", torch.ones(segment, segment).tril(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Activations of shape (N, segment, width) in and out."""
        batch, length, _ = x.shape
        query, key, value = self.qkv(x).chunk(3, -1)
        keys = key[:, None] + self.positions()
        # Masked before they meet the values: no (N, i, j, k) is multiplied but by the second mask.
        pairs = (self.core * query)[:, :, None] * keys * self.earlier[..., None]
        product = pairs.flatten(1, 2) @ value.transpose(1, 2)
        masked = product.view(batch, length, length, length) * self.earlier[:, None]
        out: Tensor = self.out(masked.flatten(2))
        return out
