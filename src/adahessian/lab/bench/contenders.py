"""The optimizers whose whole step is timed: torch's own, and ours at each setting."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

import adahessian
from adahessian.lab.bench.training import MODES, Mode, Training, plain, with_curvature
from adahessian.lab.bench.workloads import Task

# Nothing is to be learned from noise: so small that every loss stays finite.
LR = 1e-6
# The paper's for Transformers. Convolutions are averaged over their kernels whatever it is.
BLOCK_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An optimizer, at one setting or at several that differ in when a dear step is due."""

    schedules: dict[str, int]
    """Names in the tables, each with the steps from one dear step to the next. One training serves them all in turn:
    it is compiled once."""

    start: Callable[[Task, Mode], Training]
    """Sets up the training of a task in a mode."""

    modes: tuple[Mode, ...] = MODES
    """The modes it can run in."""

    def only(self, names: Collection[str]) -> Contender:
        """The same at those of its schedules that are named."""
        return replace(self, schedules={name: every for name, every in self.schedules.items() if name in names})


def named(contenders: Iterable[Contender], names: Collection[str]) -> list[Contender]:
    """Those of the contenders that are named, each at the schedules that are."""
    return [contender for contender in (each.only(names) for each in contenders) if contender.schedules]


# Torch's own ---------------------------------------------------------------------------------------------------------


def _sgd(task: Task, mode: Mode) -> Training:
    return plain(task, SGD(task.parameters, LR, momentum=0.9), mode)


def _adam(task: Task, mode: Mode) -> Training:
    return plain(task, Adam(task.parameters, LR, capturable=mode == "captured"), mode)


def _adamw(task: Task, mode: Mode) -> Training:
    return plain(task, fused_adamw(task.parameters, capturable=mode == "captured"), mode)


def fused_adamw(params: Iterable[Tensor], *, capturable: bool = False) -> AdamW:
    """AdamW, fused unless torch lacks that for the device."""
    params = list(params)
    try:
        return AdamW(params, LR, fused=True, capturable=capturable)
    except RuntimeError:
        return AdamW(params, LR, foreach=True, capturable=capturable)


SGD_NAME, ADAM_NAME, ADAMW_NAME = "SGD", "Adam", "AdamW"
REFERENCE = Contender(schedules={SGD_NAME: 1}, start=_sgd)

# Ours ----------------------------------------------------------------------------------------------------------------


def _adahessian(
    task: Task,
    mode: Mode,
    *,
    num_probes: int = 1,
    batch_fraction: float = 1.0,
    product_dtype: torch.dtype | None = None,
) -> Training:
    groups = adahessian.param_groups(task.model)
    optimizer = adahessian.AdaHessian(groups, LR, block_size=BLOCK_SIZE, num_probes=num_probes)
    return with_curvature(task, optimizer, mode, batch_fraction=batch_fraction, product_dtype=product_dtype)


def _adahessian_kron(task: Task, mode: Mode) -> Training:
    optimizer = adahessian.AdaHessianKron(adahessian.param_groups(task.model), LR, curvature_warmup=0)
    return with_curvature(task, optimizer, mode, batch_fraction=0.25, product_dtype=torch.bfloat16)


def measuring_every(steps: int) -> str:
    """What AdaHessian is called that measures in so many steps once, on the whole batch unless something is added."""
    return "AdaHessian, every step" if steps == 1 else f"AdaHessian, every {steps} steps"


def on_a_quarter(steps: int) -> str:
    """What AdaHessian is called that measures on a quarter of the batch, in so many steps once."""
    return f"{measuring_every(steps)} on a quarter"


def with_probes(count: int) -> Contender:
    """AdaHessian that measures at every step, with so many probes."""
    name = f"AdaHessian, {count} probe{'s' if count > 1 else ''}"
    return Contender(schedules={name: 1}, start=partial(_adahessian, num_probes=count))


# The intervals of the paper's overhead table.
INTERVALS = (1, 2, 3, 4, 5)
# For a part of the batch: that of `adahessian train --economical`, and twice of it.
RARE_INTERVALS = (10, 20)
_COMPILED_MODES: tuple[Mode, ...] = ("compiled", "captured")

CONTENDERS = (
    Contender(schedules={ADAM_NAME: 1}, start=_adam),
    Contender(schedules={ADAMW_NAME: 1}, start=_adamw),
    Contender(schedules={measuring_every(steps): steps for steps in INTERVALS}, start=_adahessian),
    Contender(
        schedules={on_a_quarter(steps): steps for steps in RARE_INTERVALS},
        start=partial(_adahessian, batch_fraction=0.25),
    ),
    Contender(
        schedules={"AdaHessian, every step, bf16 tangents": 1},
        start=partial(_adahessian, product_dtype=torch.bfloat16),
        modes=_COMPILED_MODES,
    ),
    Contender(
        schedules={f"{on_a_quarter(steps)}, bf16 tangents": steps for steps in RARE_INTERVALS},
        start=partial(_adahessian, batch_fraction=0.25, product_dtype=torch.bfloat16),
        modes=_COMPILED_MODES,
    ),
    Contender(
        schedules={f"AdaHessianKron, every {steps} steps": steps for steps in RARE_INTERVALS},
        start=_adahessian_kron,
        modes=_COMPILED_MODES,
    ),
)
