"""Which weights of a run are tested, unless the last are."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class FinalWeights(AveragedModel):
    """The mean over the ends of the last epochs, or the weights of the best evaluation."""

    best: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, avg_fn=_mean, use_buffers=True)
        self.register_buffer("best", torch.tensor(-math.inf, dtype=torch.float64))

    def keep_if_best(self, model: nn.Module, score: float) -> None:
        """Keep the weights if their score is the highest so far."""
        if score > self.best or self.n_averaged == 0:
            self.n_averaged.zero_()
            self.update_parameters(model)
        self.best.fill_(max(self.best.item(), score))  # in this order, NaN is never the maximum


def _mean(mean: Tensor, value: Tensor, count: Tensor | int) -> Tensor:
    return mean + (value - mean) / (count + 1) if value.is_floating_point() else value  # the last value of counters
