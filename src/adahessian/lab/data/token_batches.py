"""Batches of sentence pairs with about the same number of tokens each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from adahessian.lab.randomness import generator_for
from adahessian.lab.tasks.task import Share

PADDING, START, END = 0, 1, 2

# What is padded to, which the matrix products of a GPU like best.
MULTIPLE = 8

PairBatch: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""What the encoder reads, what the decoder reads and what it is to say: token numbers, each of shape (N, T)."""


class Sentences:
    """Token numbers of many sentences, without :data:`START` and :data:`END`, in one tensor.

    Args:
        sentences: The token numbers of each.
    """

    def __init__(self, sentences: Sequence[Sequence[int]]) -> None:
        self.lengths = torch.tensor([len(sentence) for sentence in sentences], dtype=torch.int64)
        self._starts = self.lengths.cumsum(0) - self.lengths
        flat = np.fromiter((token for sentence in sentences for token in sentence), np.int32)
        # One more than there are: an index past the end of the last sentence has to find something.
        self._tokens = torch.from_numpy(np.append(flat, np.int32(PADDING)))

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, indices: Tensor, width: int) -> Tensor:
        """Some of the sentences, each with :data:`END` behind it, as rows of this width."""
        columns = torch.arange(width)
        lengths = self.lengths[indices].unsqueeze(1)
        places = (self._starts[indices].unsqueeze(1) + columns).clamp(max=len(self._tokens) - 1)
        rows = self._tokens[places].long().masked_fill(columns > lengths, PADDING)
        return rows.masked_fill(columns == lengths, END)


@dataclass(frozen=True)
class Cut:
    """The sentence pairs of one batch, and the width that both of its sides are padded to."""

    indices: Tensor
    width: int


class TokenBatches:
    """Sentence pairs in batches of as many tokens as fit, padding included.

    Pairs of about the same length come together. Which ones is decided once, by the seed; an epoch shuffles the batches
    and, inside of them, the pairs: any slice is a fair sample of its batch. Both sides are padded to one width, and all
    batches of a width but the last have as many pairs, so that there are few different shapes to compile for.

    Args:
        source: The sentences to translate.
        target: Their translations.
        max_tokens: Most tokens of a batch, on either side. A longer pair is a batch of its own.
        seed: Which pairs of a length come together.
        share: Which part of each batch to give.
    """

    def __init__(
        self, source: Sentences, target: Sentences, max_tokens: int, *, seed: int = 0, share: Share | None = None
    ) -> None:
        self.source, self.target = source, target
        self.seed, self.share = seed, share or Share()
        cuts = _cut(torch.maximum(source.lengths, target.lengths) + 1, max_tokens, seed)
        # A process without a pair would have no loss.
        self.cuts = [cut for cut in cuts if len(cut.indices) >= self.share.ranks]

    def __len__(self) -> int:
        return len(self.cuts)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[PairBatch]:
        """The batches of an epoch in its order, from the one with the number ``start`` on."""
        order = torch.randperm(len(self.cuts), generator=generator_for("translation batches", self.seed, epoch))
        for number in order[start:].tolist():
            cut = self.cuts[number]
            generator = generator_for("translation pairs", self.seed, epoch, number)
            indices = cut.indices[torch.randperm(len(cut.indices), generator=generator)]
            yield self.batch(self.share.of(indices), cut.width)

    def in_order(self) -> Iterator[tuple[Tensor, PairBatch]]:
        """All batches, the longest sentences first, each with the numbers of its pairs."""
        for cut in self.cuts:
            yield cut.indices, self.batch(cut.indices, cut.width)

    def batch(self, indices: Tensor, width: int) -> PairBatch:
        """These pairs, as rows of this width."""
        said = self.target.padded(indices, width)
        # The decoder reads each word one place after it was to say it; END it never reads.
        read = torch.cat([torch.full((len(indices), 1), START), said[:, :-1]], 1)
        return self.source.padded(indices, width), read.masked_fill(read == END, PADDING), said


def _cut(lengths: Tensor, max_tokens: int, seed: int) -> list[Cut]:
    """Cut pairs of these lengths into batches, from the longest pairs on.

    The longest pair of a batch decides its width, and the width the number of pairs: none is left over but at the end.
    """
    shuffled = torch.randperm(len(lengths), generator=generator_for("translation cuts", seed))
    widths = (lengths + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    order = shuffled[widths[shuffled].argsort(descending=True, stable=True)]
    sorted_widths = widths[order].tolist()
    cuts: list[Cut] = []
    first = 0
    while first < len(order):
        width = sorted_widths[first]
        count = max(1, max_tokens // width)
        cuts.append(Cut(order[first : first + count], width))
        first += count
    return cuts
