"""Batches of sentence pairs with about the same number of tokens each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    def padded(self, indices: Tensor, width: int) -> Tensor:
        """Return sentences as rows of this width, each with :data:`END` after it."""
        columns, lengths = torch.arange(width), self.lengths[indices].unsqueeze(1)
        places = (self._starts[indices].unsqueeze(1) + columns).clamp(max=len(self._tokens) - 1)
        rows = self._tokens[places].long().masked_fill(columns > lengths, PADDING)
        return rows.masked_fill(columns == lengths, END)


class TokenBatches:
    """Sentence pairs in batches of at most ``max_tokens`` per side, including padding, if a single pair is not longer.

    Pairs of about the same length share a batch. The seed decides which ones, once. An epoch shuffles the batches and
    the pairs within each batch, so any slice is a fair sample of its batch. Both sides have the same width, and all
    batches of a width except the last have the same number of pairs. That leaves few shapes to compile for. Without
    ``env``, whole batches are for evaluation.
    """

    def __init__(self, source: Sentences, target: Sentences, max_tokens: int, env: Env | None = None) -> None:
        self.source, self.target, self.env = source, target, env
        lengths = torch.maximum(source.lengths, target.lengths) + 1
        shuffled = torch.randperm(len(lengths), generator=random_stream("translation cuts", env.seed if env else 0))
        widths = (lengths + MULTIPLE - 1) // MULTIPLE * MULTIPLE
        order = shuffled[widths[shuffled].argsort(descending=True, stable=True)]
        self.cuts: list[tuple[Tensor, int]] = []
        first = 0
        while first < len(order):
            # The longest pair of a batch decides its width, and the width decides the number of pairs.
            width = int(widths[order[first]])
            indices = order[first : first + max(1, max_tokens // width)]
            first += len(indices)
            # A rank without a pair would have no loss.
            if env is None or len(indices) >= env.world_size:
                self.cuts.append((indices, width))

    def __len__(self) -> int:
        return len(self.cuts)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[PairBatch]:
        """Yield this rank's part of the batches of an epoch, without the first ``skip``."""
        assert self.env is not None
        order = torch.randperm(len(self.cuts), generator=random_stream("translation batches", self.env.seed, epoch))
        for number in order[skip:].tolist():
            indices, width = self.cuts[number]
            generator = random_stream("translation pairs", self.env.seed, epoch, number)
            indices = indices[torch.randperm(len(indices), generator=generator)]
            yield self._batch(self.env.my_share(indices), width)

    def in_order(self) -> Iterator[tuple[Tensor, PairBatch]]:
        """Yield all batches, the longest sentences first, each with the numbers of its pairs."""
        for indices, width in self.cuts:
            yield indices, self._batch(indices, width)

    def _batch(self, indices: Tensor, width: int) -> PairBatch:
        target = self.target.padded(indices, width)
        # The decoder reads each word one place after it had to predict it. It never reads END.
        read = torch.cat([torch.full((len(indices), 1), START), target[:, :-1]], 1)
        return self.source.padded(indices, width), read.masked_fill(read == END, PADDING), target
