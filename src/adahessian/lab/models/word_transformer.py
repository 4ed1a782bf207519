"""A causal Transformer over words with relative positions, for several kinds of attention and softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class RelativePositions(nn.Module):
    """A learned map of sinusoids of the distance between two places of a segment.

    The sinusoids are stored for each pair of places. Nothing is looked up, so no derivative scatters.
    """

    def __init__(self, segment: int, width: int, out: int) -> None:
        super().__init__()
        places = torch.arange(segment)
        distance = (places[:, None] - places).clamp(min=0)[..., None]
        waves = distance * torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
        self.sinusoids = nn.Buffer(torch.cat((waves.sin(), waves.cos()), -1)[..., :width], persistent=False)
        self.map = nn.Linear(width, out, bias=False)

    def forward(self) -> Tensor:
        """Return keys of shape (place, earlier place, out)."""
        keys: Tensor = self.map(self.sinusoids)
        return keys


class SoftmaxAttention(nn.Module):
    """Causal softmax attention. Keys of relative positions are added to the keys of the words."""

    def __init__(self, segment: int, width: int, head_width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * heads * head_width, bias=False)
        self.positions = RelativePositions(segment, width, heads * head_width)
        self.out = nn.Linear(heads * head_width, width, bias=False)
        self.later = nn.Buffer(torch.ones(segment, segment, dtype=torch.bool).triu(1), persistent=False)

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
    """

    def __init__(self, segment: int, width: int, rank: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * rank, bias=False)
        self.positions = RelativePositions(segment, width, rank)
        self.core = nn.Parameter(torch.rand(rank))
        self.out = nn.Linear(segment * segment, width, bias=False)
        self.earlier = nn.Buffer(torch.ones(segment, segment).tril(), persistent=False)

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
        out: Tensor = self.norm2(x + self.dropout(self.down(self.dropout(F.relu(self.up(x))))))
        return out


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


class AdaptiveSoftmax(nn.AdaptiveLogSoftmaxWithLoss):
    """:class:`torch.nn.AdaptiveLogSoftmaxWithLoss` that computes every cluster for every word and masks afterwards.

    PyTorch's version selects the words of each cluster, so its shapes depend on the data. Neither ``torch.func`` nor a
    CUDA graph allows that. The tails are narrow, so the extra work is small.
    """

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the log-probabilities of the targets, and the mean log-probability of all words."""
        head = self.head(x).log_softmax(-1)
        first = self.shortlist_size
        log_prob = head.gather(-1, targets.clamp(max=first - 1)[..., None]).squeeze(-1)
        over_words = head[..., :first].sum(-1)
        for number, tail in enumerate(self.tail):
            low, high = self.cutoffs[number], self.cutoffs[number + 1]
            cluster = head[..., first + number]
            projection, words = tail.children()
            narrow, weight = projection(x), cast(Tensor, words.weight)
            total = (narrow @ weight.T).logsumexp(-1)
            row = F.embedding((targets - low).clamp(0, high - low - 1), weight)
            # Targets of later clusters are replaced in their own iteration.
            log_prob = torch.where(targets >= low, cluster + (narrow * row).sum(-1) - total, log_prob)
            over_words = over_words + (high - low) * (cluster - total) + narrow @ weight.sum(0)
        return log_prob, over_words / self.n_classes


class WordTransformer(nn.Module):
    """A language model with any attention and any softmax, such as :class:`FullSoftmax`.

    With a full softmax, the embeddings of words are also the softmax's weights.
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
        """Return the log-probabilities of the targets, and the mean log-probability of all words in their places.

        Label smoothing needs the means. All tensors have the shape (N, segment).
        """
        x = self.dropout(self.words(words) * math.sqrt(self.words.embedding_dim))
        for layer in self.layers:
            x = layer(x)
        log_probs: tuple[Tensor, Tensor] = self.softmax(self.dropout(x), targets)
        return log_probs
