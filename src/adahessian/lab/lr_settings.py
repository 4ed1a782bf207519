"""The optimizers and settings whose learning rates the study compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import adahessian
from adahessian.lab.lr_tasks import TASK_NAMES, TaskName

# Half decades. Weight decay is off, so that nothing but the learning rate changes along a row.
_LRS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_ADAMW_LRS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
_LOWER_LRS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_HIGHER_LRS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An optimizer with all that a run needs to know of it but the learning rate."""

    name: str

    build: Callable[[nn.Module, float, int], Optimizer]
    """``build(model, lr, seed)`` makes the optimizer."""

    lrs: tuple[float, ...] = _LRS
    """The learning rates to try."""

    loss_scale: float = 1.0
    """What the loss is multiplied with in training."""

    warmup: float = 0.0
    """Share of the run in which the learning rate rises from near 0 to its value."""

    batch_fraction: float = 1.0
    """Share of the batch that the curvature is measured on."""

    only_on: tuple[TaskName, ...] = TASK_NAMES
    """The tasks it is tried on: kernels are blocks already, and the text takes long."""


def _sgd(model: nn.Module, lr: float, seed: int) -> Optimizer:
    return SGD(model.parameters(), lr, momentum=0.9)


def _adamw(model: nn.Module, lr: float, seed: int) -> Optimizer:
    return AdamW(model.parameters(), lr, weight_decay=0.0)


def _adahessian(model: nn.Module, lr: float, seed: int, **options: Any) -> Optimizer:
    return adahessian.AdaHessian(adahessian.param_groups(model), lr, seed=seed, **options)


def _with(**options: Any) -> Callable[[nn.Module, float, int], Optimizer]:
    return partial(_adahessian, **options)


_DIGITS: tuple[TaskName, ...] = ("digits-mlp", "digits-conv")
_MLP: tuple[TaskName, ...] = ("digits-mlp",)

OPTIMIZERS = (
    Setting(name="SGD", build=_sgd),
    Setting(name="AdamW", build=_adamw, lrs=_ADAMW_LRS),
    Setting(name="AdaHessian", build=_adahessian),
)
VARIATIONS = (
    Setting(name="block_size=8", build=_with(block_size=8), only_on=_MLP),
    Setting(name="block_size=32", build=_with(block_size=32), only_on=("digits-mlp", "text")),
    # Of a block of one, magnitude and sign make no difference.
    Setting(name="averaging='signed'", build=_with(averaging="signed"), only_on=("digits-conv",)),
    Setting(name="block_size=32, averaging='signed'", build=_with(block_size=32, averaging="signed"), only_on=_MLP),
    Setting(name="hessian_power=0.5", build=_with(hessian_power=0.5), lrs=_HIGHER_LRS),
    Setting(name="num_probes=4", build=_with(num_probes=4), only_on=_DIGITS),
    Setting(name="warm-up", build=_adahessian, warmup=0.2),
    Setting(name="SGD, warm-up", build=_sgd, warmup=0.2),
    Setting(name="AdamW, warm-up", build=_adamw, warmup=0.2, lrs=_ADAMW_LRS),
    Setting(name="warm-up, block_size=32", build=_with(block_size=32), warmup=0.2, only_on=("text",)),
    Setting(name="eps=1e-2", build=_with(eps=1e-2), lrs=_HIGHER_LRS, only_on=_DIGITS),
    Setting(name="eps=1e-8", build=_with(eps=1e-8), lrs=_LOWER_LRS, only_on=_MLP),
    Setting(name="loss / 100", build=_adahessian, loss_scale=0.01, lrs=_HIGHER_LRS, only_on=_MLP),
    Setting(name="loss / 100, eps=1e-6", build=_with(eps=1e-6), loss_scale=0.01, only_on=_MLP),
    Setting(name="loss x 100", build=_adahessian, loss_scale=100.0, lrs=_LOWER_LRS, only_on=_MLP),
    Setting(
        name="update_every=10 on a quarter",
        build=_with(update_every=10, warmup_steps=15),
        batch_fraction=0.25,
        only_on=_DIGITS,
    ),
)
