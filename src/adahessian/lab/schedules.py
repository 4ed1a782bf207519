"""How the learning rate changes."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from adahessian.lab.settings import Settings


class Schedule:
    """The learning rate of every step, as a multiple of the highest.

    A warm-up along a line comes first in all of them. The one on a plateau is told of each epoch's result, and keeps
    its factor in its state.

    Args:
        optimizer: Whose learning rates to set. Each group keeps its share.
        settings: Which schedule.
        steps_per_epoch: Steps an epoch.
        higher_is_better: What a better result is.
    """

    def __init__(
        self, optimizer: Optimizer, settings: Settings, *, steps_per_epoch: int, higher_is_better: bool
    ) -> None:
        self._optimizer = optimizer
        self._settings = settings
        self._steps_per_epoch = steps_per_epoch
        self._sign = 1 if higher_is_better else -1
        self._factor = 1.0
        self._best = -math.inf
        self._bad_epochs = 0
        self._lambda = LambdaLR(optimizer, self.multiple)

    def step(self) -> None:
        """To be called after each step of the optimizer."""
        self._lambda.step()

    def after_epoch(self, result: float) -> None:
        """To be called after each epoch, with its result."""
        settings = self._settings
        if settings.schedule != "plateau":
            return
        # Only an improvement by a thousandth counts.
        signed = self._sign * result
        if signed > self._best + 1e-3 * abs(self._best if math.isfinite(self._best) else 0):
            self._best, self._bad_epochs = signed, 0
        else:
            self._bad_epochs += 1
        if self._bad_epochs > settings.plateau_patience:
            self._factor, self._bad_epochs = self._factor * settings.decay_factor, 0
            # The next step's learning rate has been set already.
            multiple = self.multiple(self._lambda.last_epoch)
            for group, highest in zip(self._optimizer.param_groups, self._lambda.base_lrs, strict=True):
                group["lr"] = highest * multiple

    def multiple(self, step: int) -> float:
        """The learning rate of a step, from 0, over the highest."""
        s = self._settings
        if step < s.lr_warmup_steps:
            return (step + 1) / s.lr_warmup_steps
        if s.schedule == "steps":
            return s.decay_factor ** sum(step >= epoch * self._steps_per_epoch for epoch in s.decay_epochs)
        if s.schedule == "plateau":
            return self._factor
        if s.schedule == "inverse-sqrt":
            return math.sqrt(max(1, s.lr_warmup_steps) / max(1, step + 1))
        total = s.epochs * self._steps_per_epoch
        done = min(1.0, (step - s.lr_warmup_steps) / max(1, total - s.lr_warmup_steps))
        if s.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        if s.schedule == "linear":
            return 1 - done
        return 1.0

    def state_dict(self) -> dict[str, float]:
        """What must be kept to go on."""
        return {
            "step": self._lambda.last_epoch,
            "factor": self._factor,
            "best": self._best,
            "bad_epochs": self._bad_epochs,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from there. The learning rates themselves are part of the optimizer's state."""
        self._lambda.last_epoch = int(state["step"])
        self._factor, self._best = state["factor"], state["best"]
        self._bad_epochs = int(state["bad_epochs"])
