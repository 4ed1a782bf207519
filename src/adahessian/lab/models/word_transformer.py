"""A causal Transformer over words with relative positions, with multi-linear or softmax attention."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class RelativePositions(nn.Module):
    """A learned map of sinusoids of the distance between two places of a segment.

    The sinusoids are stored for each pair of places. Nothing is looked up, so no derivative scatters.

    Args:
        segment: Number of places.
        width: Number of sinusoids.
        out: Size of the result.
    """

    sinusoids: Tensor

    def __init__(self, segment: int, width: int, out: int) -> None:
        super().__init__()
        places = torch.arange(segment)
        distance = (places[:, None] - places).clamp(min=0)[..., None]
        waves = distance * torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
        self.register_buffer("sinusoids", torch.cat((waves.sin(), waves.cos()), -1)[..., :width], persistent=False)
        self.map = nn.Linear(width, out, bias=False)

    def forward(self) -> Tensor:
        """Return keys of shape (place, earlier place, out)."""
        keys: Tensor = self.map(self.sinusoids)
        return keys


class SoftmaxAttention(nn.Module):
    """Causal softmax attention. Keys of relative positions are added to the keys of the words.

    Args:
        segment: Length of a segment.
        width: Size of an activation.
        head_width: Size of a head.
        heads: Number of heads.
    """

    later: Tensor

    def __init__(self, segment: int, width: int, head_width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * heads * head_width, bias=False)
        self.positions = RelativePositions(segment, width, heads * head_width)
        self.out = nn.Linear(heads * head_width, width, bias=False)
        self.register_buffer("later", torch.ones(segment, segment, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations of shape (N, segment, width) to the same shape."""
        batch, length, _ = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        places = self.positions().view(length, length, self.heads, -1)
        scores = query @ key.transpose(-2, -1) + torch.einsum("bhir,ijhr->bhij", query, places)
        # Minus infinity would make second derivatives NaN.
        scores = (scores / math.sqrt(query.shape[-1])).masked_fill(self.later, torch.finfo(scores.dtype).min)
        attended = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, -1)
        out: Tensor = self.out(attended)
        return out


class MultiLinearAttention(nn.Module):
    r"""The attention of the tensorized transformer (Ma et al., 2019), with one core, made causal.

    It has no softmax. It maps a product of query, key and value by one linear layer:

    .. math::
        A_{ijk} = \sum_r c_r \, q_{ir} \, (k_{jr} + p_{i-j,r}) \, v_{kr}
        \qquad \text{for } j \le i, k \le i, \text{ else } 0

    with the core c and the keys p of relative positions. The input of the linear layer is the row of all
    :math:`A_{ijk}` of a place i. The authors' code takes a mask and never applies it, so a word sees the words that it
    has to predict. This class applies the mask.

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
        """Map activations of shape (N, segment, width) to the same shape."""
        batch, length, _ = x.shape
        query, key, value = self.qkv(x).chunk(3, -1)
        keys = key[:, None] + self.positions()
        # The first mask comes before the values, where the tensor has no fourth dimension yet.
        pairs = (self.core * query)[:, :, None] * keys * self.earlier[..., None]
        product = pairs.flatten(1, 2) @ value.transpose(1, 2)
        masked = product.view(batch, length, length, length) * self.earlier[:, None]
        out: Tensor = self.out(masked.flatten(2))
        return out


class Layer(nn.Module):
    """Attention and a feed-forward network, with layer norm after each residual connection."""

    def __init__(self, attention: nn.Module, width: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.attention = attention
        self.norm1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, feed_forward)
        self.down = nn.Linear(feed_forward, width)
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations of shape (N, segment, width) to the same shape."""
        x = self.norm1(x + self.dropout(self.attention(x)))
        hidden = self.dropout(F.relu(self.up(x)))
        x = self.norm2(x + self.dropout(self.down(hidden)))
        return x


class FullSoftmax(nn.Module):
    """A softmax over all words."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the targets, and the mean log-probability of all words."""
        logits = F.linear(x, self.weight, self.bias)
        total = logits.logsumexp(-1)
        return logits.gather(-1, targets[..., None]).squeeze(-1) - total, logits.mean(-1) - total


class WordTransformer(nn.Module):
    """A language model with any attention and any softmax.

    With a full softmax, the embeddings of words are also the softmax's weights.

    Args:
        layers: Number of layers.
        width: Size of an embedding.
        feed_forward: Hidden size of the feed-forward networks.
        vocabulary: Number of words.
        dropout: Share of activations set to 0 in training.
        make_attention: Returns the attention of one layer.
        softmax: Maps activations and targets to log-probabilities, as :class:`FullSoftmax` does.
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        feed_forward: int,
        vocabulary: int,
        dropout: float,
        make_attention: Callable[[], nn.Module],
        softmax: nn.Module,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(make_attention(), width, feed_forward, dropout) for _ in range(layers))
        self.softmax = softmax
        self.dropout = nn.Dropout(dropout)
        if isinstance(softmax, FullSoftmax):
            self.words.weight = softmax.weight
        for param in self.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=0.02)

    def forward(self, words: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return two tensors of shape (N, segment), for words and the words that follow them, of the same shape.

        The first holds the log-probability of each target. The second holds the mean log-probability of all words in
        its place, which label smoothing needs.
        """
        x = self.dropout(self.words(words) * math.sqrt(self.words.embedding_dim))
        for layer in self.layers:
            x = layer(x)
        log_probs: tuple[Tensor, Tensor] = self.softmax(self.dropout(x), targets)
        return log_probs
