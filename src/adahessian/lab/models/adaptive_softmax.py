"""The adaptive softmax of Grave et al. (2017), with shapes that do not depend on the data."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class AdaptiveSoftmax(nn.AdaptiveLogSoftmaxWithLoss):
    """:class:`torch.nn.AdaptiveLogSoftmaxWithLoss` that computes every cluster for every word and masks afterwards.

    PyTorch's version selects the words of each cluster, so its shapes depend on the data. Neither ``torch.func`` nor a
    CUDA graph allows that. The tails are narrow, so the extra work is bounded: each cluster needs only the sum over its
    words and the row of the target.
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
