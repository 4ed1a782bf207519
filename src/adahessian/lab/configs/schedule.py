"""How the learning rate changes during a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from adahessian.lab.configs.checks import at_least, positive


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate of each step as a multiple of the optimizer's."""

    schedule: Literal["constant", "steps", "plateau", "inverse-sqrt", "cosine", "linear"] = "constant"
    """Learning-rate schedule after warm-up."""

    lr_warmup_steps: int = 0
    """Linear warm-up, in steps."""

    decay_epochs: tuple[int, ...] = ()
    """Epochs after which the schedule `steps` decays."""

    decay_factor: float = 0.1
    """Factor of each decay (steps and plateau)."""

    plateau_patience: int = 3
    """Evaluations without improvement before `plateau` decays."""

    def __post_init__(self) -> None:
        at_least(0, lr_warmup_steps=self.lr_warmup_steps, plateau_patience=self.plateau_patience)
        positive(decay_factor=self.decay_factor)
