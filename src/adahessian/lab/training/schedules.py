"""The learning rate of every step."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from adahessian.lab.configs.run import ScheduleConfig


def lr_multiplier(step: int, schedule: ScheduleConfig, total_steps: int, steps_per_epoch: int) -> float:
    """Return the learning rate of a step, counted from 0, as a multiple of the optimizer's.

    Example:
        >>> [lr_multiplier(step, ScheduleConfig(schedule="linear", lr_warmup_steps=2), 6, 1) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warmup = schedule.lr_warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if schedule.schedule == "steps":
        return schedule.decay_factor ** sum(step >= epoch * steps_per_epoch for epoch in schedule.decay_epochs)
    if schedule.schedule == "inverse-sqrt":
        return math.sqrt(max(1, warmup) / max(1, step + 1))
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if schedule.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1 - done if schedule.schedule == "linear" else 1.0


class Schedule:
    """Sets the learning rates of an optimizer: LambdaLR per step, and on a plateau ReduceLROnPlateau per evaluation."""

    def __init__(
        self,
        optimizer: Optimizer,
        config: ScheduleConfig,
        *,
        total_steps: int,
        steps_per_epoch: int,
        higher_is_better: bool,
    ) -> None:
        multiplier = partial(lr_multiplier, schedule=config, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
        self._per_step = LambdaLR(optimizer, multiplier)
        mode: Any = "max" if higher_is_better else "min"
        options: dict[str, Any] = {"factor": config.decay_factor, "patience": config.plateau_patience}
        is_plateau = config.schedule == "plateau"
        self._plateau = ReduceLROnPlateau(optimizer, mode, **options, threshold=1e-3, eps=0) if is_plateau else None

    def step(self) -> None:
        """Set the learning rates of the next step."""
        self._per_step.step()

    def evaluated(self, metric: float) -> None:
        """Reduce the learning rates on a plateau of the metric."""
        if self._plateau is None:
            return
        groups = self._plateau.optimizer.param_groups
        before = [group["lr"] for group in groups]
        self._plateau.step(metric)
        if before != [group["lr"] for group in groups]:
            # LambdaLR computes the next learning rates from these.
            self._per_step.base_lrs = [lr * self._plateau.factor for lr in self._per_step.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return the state. The learning rates themselves are in the optimizer's."""
        return {"per_step": self._per_step.state_dict(), "plateau": self._plateau and self._plateau.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state."""
        self._per_step.load_state_dict(state["per_step"])
        if self._plateau is not None:
            self._plateau.load_state_dict(state["plateau"])
