"""The optimizers that the digits compare, each at a learning rate of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import adahessian
from adahessian.lab.settings import ECONOMICAL

# The paper's decay for all: as an L2 term of the gradient for SGD and Adam, decoupled and divided by the learning rate
# for AdamW and AdaHessian, which comes to shrinking the weights by this share a step.
WEIGHT_DECAY = 5e-4

# Twenty steps are the first epoch of the digits: the paper, too, measures at every step at first.
ECONOMICAL_WARMUP_STEPS = 20

# Seven learning rates for each contender, half a decade apart. Each ran five times for ten epochs: five-fold
# cross-validation within the training examples, every fold with a seed of its own that the demo does not use. The one
# with the highest mean accuracy was taken; none lay at an end of its grid. The test examples played no part.
# ``python -m adahessian.lab.lr_search`` does it again.
_ADAM_LRS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
_OTHER_LRS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An optimizer with all that a run needs to know of it."""

    name: str
    """How tables and plots call it."""

    lr: float
    """The learning rate it starts with, found by :mod:`adahessian.lab.lr_search`."""

    searched_lrs: tuple[float, ...]
    """The learning rates that were tried to find it: as many for each contender."""

    build: Callable[[nn.Module, float, int], Optimizer]
    """``build(model, lr, seed)`` makes the optimizer."""

    batch_fraction: float = 1.0
    """Share of the batch that the curvature is measured on, where there is a curvature."""

    def optimizer(self, model: nn.Module, *, seed: int) -> Optimizer:
        """The optimizer for a model, at the contender's learning rate."""
        return self.build(model, self.lr, seed)


def _sgd(model: nn.Module, lr: float, seed: int) -> Optimizer:
    return SGD(model.parameters(), lr, momentum=0.9, weight_decay=WEIGHT_DECAY)


def _adam(model: nn.Module, lr: float, seed: int) -> Optimizer:
    return Adam(model.parameters(), lr, weight_decay=WEIGHT_DECAY)


def _adamw(model: nn.Module, lr: float, seed: int) -> Optimizer:
    return AdamW(model.parameters(), lr, weight_decay=WEIGHT_DECAY / lr)


def _adahessian(model: nn.Module, lr: float, seed: int) -> Optimizer:
    groups = adahessian.param_groups(model, weight_decay=WEIGHT_DECAY / lr)
    return adahessian.AdaHessian(groups, lr, seed=seed)


def _economical_adahessian(model: nn.Module, lr: float, seed: int) -> Optimizer:
    groups = adahessian.param_groups(model, weight_decay=WEIGHT_DECAY / lr)
    return adahessian.AdaHessian(
        groups,
        lr,
        seed=seed,
        curvature_every=ECONOMICAL["update_every"],
        curvature_warmup=ECONOMICAL_WARMUP_STEPS,
        steady_start=True,
    )


CONTENDERS = (
    Contender(name="SGD", lr=1.0, searched_lrs=_OTHER_LRS, build=_sgd),
    Contender(name="Adam", lr=0.1, searched_lrs=_ADAM_LRS, build=_adam),
    Contender(name="AdamW", lr=0.03, searched_lrs=_ADAM_LRS, build=_adamw),
    Contender(name="AdaHessian", lr=0.3, searched_lrs=_OTHER_LRS, build=_adahessian),
    Contender(
        name="AdaHessian, economical",
        lr=1.0,
        searched_lrs=_OTHER_LRS,
        build=_economical_adahessian,
        batch_fraction=ECONOMICAL["batch_fraction"],
    ),
)
