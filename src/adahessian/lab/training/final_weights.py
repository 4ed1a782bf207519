"""Which weights of a run are tested: the last, the best, or the mean of the last epochs."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from adahessian.lab.configs.run import RunConfig
from adahessian.lab.training.checkpoint import weights_of


class FinalWeights:
    """Keeps the weights of the best evaluation, or the sum of the weights at the ends of the last epochs.

    Args:
        config: The run's. Its ``final_weights`` decides.
        total_steps: Length of the run. Epochs are counted back from its end.
        steps_per_epoch: Steps per epoch.
    """

    def __init__(self, config: RunConfig, total_steps: int, steps_per_epoch: int) -> None:
        self._which, self._total_steps, self._steps_per_epoch = config.final_weights, total_steps, steps_per_epoch
        self._averaged_steps = config.average_epochs * steps_per_epoch
        self._higher_is_better = config.task.validation_metric.higher_is_better
        self._kept: dict[str, Tensor] = {}
        self._count = 0
        self._best = -math.inf

    def after_step(self, model: nn.Module, step: int) -> None:
        """Add the weights if they are to be averaged."""
        left = self._total_steps - step
        if self._which == "average" and left % self._steps_per_epoch == 0 and left < self._averaged_steps:
            weights = weights_of(model)
            for name, total in self._kept.items():
                if total.is_floating_point():  # counters keep their last value
                    weights[name] += total
            self._kept, self._count = weights, self._count + 1

    def after_evaluation(self, model: nn.Module, metric: float) -> None:
        """Keep the weights if they are the best so far."""
        signed = metric if self._higher_is_better else -metric
        if self._which == "best" and (signed > self._best or not self._kept):
            self._kept = weights_of(model)
        self._best = max(self._best, signed)  # in this order, NaN is never the maximum

    def load_into(self, model: nn.Module) -> None:
        """Give the model the weights to test."""
        if self._kept:
            count = max(1, self._count)
            mean = {name: kept / count if kept.is_floating_point() else kept for name, kept in self._kept.items()}
            model.load_state_dict(mean)

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"kept": self._kept, "count": self._count, "best": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state."""
        self._kept, self._count, self._best = state["kept"], state["count"], state["best"]
