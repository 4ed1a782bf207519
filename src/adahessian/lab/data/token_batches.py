"""Batches of sentence pairs with about the same number of tokens each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from adahessian.lab.training.random_streams import random_stream

if TYPE_CHECKING:
    from adahessian.lab.tasks.task import Env

PADDING, START, END = 0, 1, 2

# Widths are multiples of this number, which suits the matrix products of a GPU.
MULTIPLE = 8

PairBatch: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Input of the encoder, input of the decoder, and target of the decoder: token numbers, each of shape (N, T)."""


class Sentences:
    """Token numbers of many sentences, without :data:`START` and :data:`END`, in one tensor."""

    def __init__(self, sentences: Sequence[Sequence[int]]) -> None:
        self.lengths = torch.tensor([len(sentence) for sentence in sentences], dtype=torch.int64)
        self._starts = self.lengths.cumsum(0) - self.lengths
        flat = np.fromiter((token for sentence in sentences for token in sentence), np.int32)
        # One element more, for indices beyond the end of the last sentence.
        self._tokens = torch.from_numpy(np.append(flat, np.int32(PADDING)))

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, indices: Tensor, width: int) -> Tensor:
        """Return sentences as rows of this width, each with :data:`END` after it."""
        columns = torch.arange(width)
        lengths = self.lengths[indices].unsqueeze(1)
        places = (self._starts[indices].unsqueeze(1) + columns).clamp(max=len(self._tokens) - 1)
        rows = self._tokens[places].long().masked_fill(columns > lengths, PADDING)
        return rows.masked_fill(columns == lengths, END)


@dataclass(frozen=True)
class Cut:
    """The sentence pairs of one batch, and the width that both sides are padded to."""

    indices: Tensor
    width: int


class TokenBatches:
    """Sentence pairs in batches of as many tokens as fit, including padding.

    Pairs of about the same length share a batch. The seed decides which ones, once. An epoch shuffles the batches and
    the pairs within each batch, so any slice is a fair sample of its batch. Both sides have the same width, and all
    batches of a width except the last have the same number of pairs. That leaves few shapes to compile for.

    Args:
        source: The sentences to translate.
        target: Their translations.
        max_tokens: Most tokens of a batch, on either side. A longer pair is a batch of its own.
        env: Seed, and this rank's share of each batch. None is for evaluation, on whole batches.
    """

    def __init__(self, source: Sentences, target: Sentences, max_tokens: int, env: Env | None = None) -> None:
        self.source, self.target, self.env = source, target, env
        cuts = _cut(torch.maximum(source.lengths, target.lengths) + 1, max_tokens, env.seed if env else 0)
        # A rank without a pair would have no loss.
        self.cuts = [cut for cut in cuts if env is None or len(cut.indices) >= env.world_size]

    def __len__(self) -> int:
        return len(self.cuts)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[PairBatch]:
        """Yield this rank's part of the batches of an epoch, without the first ``skip``."""
        assert self.env is not None
        order = torch.randperm(len(self.cuts), generator=random_stream("translation batches", self.env.seed, epoch))
        for number in order[skip:].tolist():
            cut = self.cuts[number]
            generator = random_stream("translation pairs", self.env.seed, epoch, number)
            indices = cut.indices[torch.randperm(len(cut.indices), generator=generator)]
            yield self.batch(self.env.my_share(indices), cut.width)

    def in_order(self) -> Iterator[tuple[Tensor, PairBatch]]:
        """Yield all batches, the longest sentences first, each with the numbers of its pairs."""
        for cut in self.cuts:
            yield cut.indices, self.batch(cut.indices, cut.width)

    def batch(self, indices: Tensor, width: int) -> PairBatch:
        """Return pairs as rows of this width."""
        target = self.target.padded(indices, width)
        # The decoder reads each word one place after it had to predict it. It never reads END.
        read = torch.cat([torch.full((len(indices), 1), START), target[:, :-1]], 1)
        return self.source.padded(indices, width), read.masked_fill(read == END, PADDING), target


def _cut(lengths: Tensor, max_tokens: int, seed: int) -> list[Cut]:
    """Cut pairs of these lengths into batches, starting with the longest pairs.

    The longest pair of a batch decides its width, and the width decides the number of pairs.
    """
    shuffled = torch.randperm(len(lengths), generator=random_stream("translation cuts", seed))
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
