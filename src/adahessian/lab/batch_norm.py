"""Batch norm's statistics, computed anew for the weights as they are."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def with_statistics_of(model: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """A copy of a model, in eval mode, whose batch norms have the mean statistics of these batches.

    The running statistics that training keeps are a mean over its last steps, of which each had other weights. While
    the learning rate is high they lag behind, and the model is tested with statistics that are not its own.

    Args:
        model: Is left as it is.
        batches: Inputs like those that it is trained on. Each counts by its size.
    """
    model = copy.deepcopy(model).eval()
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    for norm in norms:
        norm.reset_running_stats()
        norm.train()
    seen = 0
    for batch in batches:
        seen += len(batch)
        for norm in norms:
            norm.momentum = len(batch) / seen
        model(batch)
    return model.eval()
