"""All that decides a run besides its task, its optimizer and its seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

OptimizerName = Literal["adahessian", "sgd", "adam", "adamw", "adagrad", "rmsprop"]
OPTIMIZER_NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)

OPTIMIZER_TITLES: dict[OptimizerName, str] = {
    "adahessian": "AdaHessian",
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
}

ScheduleName = Literal["constant", "steps", "plateau", "inverse-sqrt", "cosine", "linear"]


class SettingsError(ValueError):
    """A value that makes no sense. The message names the option."""


# For each option what its values must be, in words and as a test.
_DEMANDS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "epochs": ("1 or more", lambda value: value >= 1),
    "batch_size": ("1 or more", lambda value: value >= 1),
    "lr": ("0 or more", lambda value: 0 <= value < math.inf),
    "eps": ("0 or more", lambda value: 0 <= value < math.inf),
    "weight_decay": ("0 or more", lambda value: 0 <= value < math.inf),
    "momentum": ("from 0 to 1, without 1", lambda value: 0 <= value < 1),
    "lr_warmup_steps": ("0 or more", lambda value: value >= 0),
    "decay_factor": ("above 0", lambda value: value > 0),
    "plateau_patience": ("0 or more", lambda value: value >= 0),
    "block_size": ("1 or more", lambda value: value >= 1),
    "hessian_power": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "num_probes": ("1 or more", lambda value: value >= 1),
    "update_every": ("1 or more", lambda value: value >= 1),
    "measured_epochs": ("0 or more", lambda value: value >= 0),
    "batch_fraction": ("above 0 and at most 1", lambda value: 0 < value <= 1),
}


# What no other optimizer has.
OF_ADAHESSIAN = (
    "block_size",
    "hessian_power",
    "averaging",
    "num_probes",
    "update_every",
    "measured_epochs",
    "batch_fraction",
    "steady_start",
    "tangents",
)

# Settings that earlier versions had, with their defaults. Files of results still name them.
REMOVED: dict[str, Any] = {"beta2_per": "measurement"}

# On a quarter of the batch at every tenth step, after an epoch of measuring at every step.
ECONOMICAL: dict[str, Any] = {
    "update_every": 10,
    "batch_fraction": 0.25,
    "measured_epochs": 1.0,
    "tangents": "bfloat16",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every task has. A task with settings of its own adds them in a subclass.

    Each field is an option of ``adahessian train``; the paper's value for the task and optimizer is its default.
    """

    epochs: int
    """Passes over the training data."""

    batch_size: int
    """Examples a batch, over all processes; tokens a batch in translation."""

    lr: float
    """The learning rate, at its highest."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the momentum of the gradient, and of the Hessian momentum or second moment."""

    eps: float = 1e-8
    """What is added to the denominator. AdaHessian's is on the scale of the loss."""

    weight_decay: float = 0.0
    """As the optimizer takes it: decoupled for AdaHessian and AdamW, in the gradient for the others."""

    decay_bias_and_norm: bool = True
    """Whether biases and the parameters of normalisation layers decay as well."""

    momentum: float = 0.0
    """Momentum of SGD."""

    schedule: ScheduleName = "constant"
    """How the learning rate changes: constant, by steps, on a plateau of the metric, or falling after a warm-up like
    the inverse square root, half a cosine or a line, the last two to 0."""

    lr_warmup_steps: int = 0
    """First steps, in which the learning rate rises from 0 along a line."""

    decay_epochs: tuple[int, ...] = ()
    """Epochs after which the schedule by steps multiplies the learning rate by the decay factor."""

    decay_factor: float = 0.1
    """What the schedules by steps and on a plateau multiply the learning rate by."""

    plateau_patience: int = 3
    """Epochs without an improvement before the schedule on a plateau decays."""

    clip_norm: float | None = None
    """The largest norm of the gradient; None does not clip."""

    block_size: int = 1
    """AdaHessian: consecutive elements of a row that share one curvature. Convolutions share it over their kernels."""

    hessian_power: float = 1.0
    """AdaHessian: the power k of the Hessian."""

    averaging: Literal["magnitude", "signed"] = "magnitude"
    """AdaHessian: what is averaged over a block, magnitudes or signed values."""

    num_probes: int = 1
    """AdaHessian: Hessian-vector products a measurement."""

    update_every: int = 1
    """AdaHessian: steps from one measurement of the curvature to the next."""

    measured_epochs: float = 0.0
    """AdaHessian: first epochs, in which every step measures, whatever --update-every says."""

    batch_fraction: float = 1.0
    """AdaHessian: share of the batch that the curvature is measured on."""

    steady_start: bool = False
    """AdaHessian: average the first measurement with its mean over each tensor."""

    tangents: Literal["float32", "bfloat16"] = "float32"
    """AdaHessian: precision of the matrix products that only feed the Hessian-vector product, when compiled."""

    def __post_init__(self) -> None:
        for name, (demand, is_met) in _DEMANDS.items():
            value = getattr(self, name)
            if not is_met(value):
                raise SettingsError(f"--{name.replace('_', '-')} {value}: it must be {demand}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise SettingsError(f"--betas {self.betas[0]} {self.betas[1]}: both must be from 0 to 1, without 1")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise SettingsError(f"--clip-norm {self.clip_norm}: it must be above 0; leave it out not to clip")


SettingsT = TypeVar("SettingsT", bound=Settings)


def is_economical(settings: Mapping[str, Any]) -> bool:
    """Whether curvature is measured as by ``--economical``, but for the part of the batch or for how often."""
    differing = [name for name, value in ECONOMICAL.items() if settings.get(name) != value]
    return differing in ([], ["batch_fraction"], ["update_every"])


def economized(settings: SettingsT, *, noise: float) -> SettingsT:
    """Settings for little curvature, from those for one probe on the whole batch at every step.

    Where curvature comes out larger on a part of the batch, steps are as much shorter. What makes up for it, to the
    four digits that the name of a run has room for, is::

        lr * noise^k    and    weight_decay / noise^k

    Args:
        settings: The settings.
        noise: How many times as large curvature comes out.

    Example:
        >>> less = economized(Settings(epochs=160, batch_size=256, lr=0.15, weight_decay=5e-4 / 0.15), noise=2.0)
        >>> less.update_every, less.batch_fraction, less.steady_start, less.lr, less.weight_decay
        (10, 0.25, True, 0.3, 0.001667)
    """
    if noise != 1:
        longer = noise**settings.hessian_power
        lr, weight_decay = _four_digits(settings.lr * longer), _four_digits(settings.weight_decay / longer)
        settings = replace(settings, lr=lr, weight_decay=weight_decay)
    return replace(settings, **ECONOMICAL, steady_start=True)


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")
