"""The learning rate of every step."""

import math
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from adahessian.lab.configs.run import Metric, ScheduleConfig


def lr_multiplier(step: int, schedule: ScheduleConfig, total_steps: int, steps_per_epoch: int) -> float:
    """Return the learning rate of a step, counted from 0, as a multiple of the optimizer's."""
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
    """Sets the learning rates of an optimizer: LambdaLR per step, and ReduceLROnPlateau per evaluation."""

    def __init__(
        self, optimizer: Optimizer, config: ScheduleConfig, total_steps: int, steps_per_epoch: int, metric: Metric
    ) -> None:
        multiplier = partial(lr_multiplier, schedule=config, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
        self.per_step = LambdaLR(optimizer, multiplier)
        patience: Any = config.plateau_patience if config.schedule == "plateau" else math.inf
        mode: Any = "max" if metric.higher_is_better else "min"
        self.plateau = ReduceLROnPlateau(optimizer, mode, config.decay_factor, patience, threshold=1e-3, eps=0)

    def step(self) -> None:
        """Set the learning rates of the next step."""
        self.per_step.step()

    def evaluated(self, metric: float) -> None:
        """Reduce the learning rates on a plateau of the metric."""
        groups = self.plateau.optimizer.param_groups
        before = [group["lr"] for group in groups]
        self.plateau.step(metric)
        if before != [group["lr"] for group in groups]:
            # LambdaLR computes the next learning rates from these.
            self.per_step.base_lrs = [lr * self.plateau.factor for lr in self.per_step.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return the state. The learning rates themselves are in the optimizer's."""
        return {name: scheduler.state_dict() for name, scheduler in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state."""
        for name, scheduler in vars(self).items():
            scheduler.load_state_dict(state[name])
