"""A causal language model over words: the tensorized transformer (Ma et al., 2019), or with softmax attention."""

import math
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from adahessian.lab.configs.language import WordConfig
from adahessian.lab.errors import ConfigError

# First words of the rarer clusters of an adaptive softmax.
_CUTOFFS = (20_000, 40_000, 200_000)


def _sinusoids(segment: int, width: int) -> Tensor:
    """Return those of all distances, per pair of places: nothing is looked up later, so no derivative scatters."""
    places = torch.arange(segment)
    distance = (places[:, None] - places).clamp(min=0)[..., None]
    waves = distance * torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
    return torch.cat((waves.sin(), waves.cos()), -1)[..., :width]


class SoftmaxAttention(nn.Module):
    """Causal softmax attention. Keys of relative positions are added to the keys of the words."""

    def __init__(self, segment: int, width: int, head_width: int) -> None:
        super().__init__()
        self.heads = max(1, width // head_width)
        self.qkv = nn.Linear(width, 3 * self.heads * head_width, bias=False)
        self.positions = nn.Linear(width, self.heads * head_width, bias=False)
        self.out = nn.Linear(self.heads * head_width, width, bias=False)
        self.later = nn.Buffer(torch.ones(segment, segment, dtype=torch.bool).triu(1), persistent=False)
        self.sinusoids = nn.Buffer(_sinusoids(segment, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations of shape (N, segment, width) to the same shape."""
        batch, length, _ = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        places = self.positions(self.sinusoids).view(length, length, self.heads, -1)
        scores = query @ key.transpose(-2, -1) + torch.einsum("bhir,ijhr->bhij", query, places)
        # Minus infinity would make second derivatives NaN.
        scores = (scores / math.sqrt(query.shape[-1])).masked_fill(self.later, torch.finfo(scores.dtype).min)
        return cast(Tensor, self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2)))


class MultiLinearAttention(nn.Module):
    r"""Attention with one core and with relative positions, made causal.

    It has no softmax. It maps a product of query, key and value by one linear layer:

    .. math::
        A_{ijk} = \sum_r c_r \, q_{ir} \, (k_{jr} + p_{i-j,r}) \, v_{kr}
        \qquad \text{for } j \le i, k \le i, \text{ else } 0

    with the core c and the keys p, a learned map of sinusoids of the distance. The input of the linear layer is the row
    of all :math:`A_{ijk}` of a place i. The authors' code takes a mask and never applies it, so a word sees the words
    that it has to predict. This class applies the mask.
    """

    def __init__(self, segment: int, width: int, rank: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * rank, bias=False)
        self.positions = nn.Linear(width, rank, bias=False)
        self.core = nn.Parameter(torch.rand(rank))
        self.out = nn.Linear(segment * segment, width, bias=False)
        self.earlier = nn.Buffer(torch.ones(segment, segment).tril(), persistent=False)
        self.sinusoids = nn.Buffer(_sinusoids(segment, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations of shape (N, segment, width) to the same shape."""
        batch, length, _ = x.shape
        query, key, value = self.qkv(x).chunk(3, -1)
        keys = key[:, None] + self.positions(self.sinusoids)
        # The first mask comes before the values, where the tensor has no fourth dimension yet.
        pairs = (self.core * query)[:, :, None] * keys * self.earlier[..., None]
        product = pairs.flatten(1, 2) @ value.transpose(1, 2)
        masked = product.view(batch, length, length, length) * self.earlier[:, None]
        return cast(Tensor, self.out(masked.flatten(2)))


class Layer(nn.Module):
    """Attention and a feed-forward network, with layer norm after each residual connection."""

    def __init__(self, config: WordConfig) -> None:
        super().__init__()
        attention = SoftmaxAttention if config.attention == "ordinary" else MultiLinearAttention
        self.attention = attention(config.segment, config.width, config.head_width)
        self.norm1 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, config.feed_forward)
        self.down = nn.Linear(config.feed_forward, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x)))
        return cast(Tensor, self.norm2(x + self.dropout(self.down(self.dropout(F.relu(self.up(x)))))))


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
    """A language model. With a full softmax, the embeddings of words are also the softmax's weights."""

    def __init__(self, vocabulary: int, config: WordConfig) -> None:
        super().__init__()
        width = config.width
        is_full, cutoffs = config.softmax == "full", [cutoff for cutoff in _CUTOFFS if cutoff < vocabulary]
        if not is_full and not cutoffs:
            raise ConfigError(f"--softmax adaptive needs more than {vocabulary} words. Pass --softmax full.")
        softmax = FullSoftmax(width, vocabulary) if is_full else AdaptiveSoftmax(width, vocabulary, cutoffs)
        self.words = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.softmax = softmax
        self.dropout = nn.Dropout(config.dropout)
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
        return cast(tuple[Tensor, Tensor], self.softmax(self.dropout(x), targets))
