"""Physics-informed networks: Poisson's equation in one and two dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from adahessian.lab.configs.checks import at_least
from adahessian.lab.configs.optimizers import LBFGS, AdaHessianKron, Adam, AdamW
from adahessian.lab.configs.presets import Configs, preset, same_for, with_modern
from adahessian.lab.configs.run import Metric
from adahessian.lab.configs.schedule import ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class PINNConfig:
    """Poisson's equation, solved by a network in float64."""

    holdout: ClassVar[int] = 0
    default_holdout: ClassVar[int] = 0
    metric: ClassVar[Metric] = Metric(
        name="relative_error", title="relative L2 error", higher_is_better=False, digits=5
    )
    validation_metric: ClassVar[Metric] = metric

    dimensions: Literal[1, 2] = 1
    """Dimensions of the domain."""

    width: int = 32
    """Hidden units per layer."""

    depth: int = 2
    """Hidden layers."""

    points: int = 256
    """Collocation points inside of the domain. Every step takes all of them."""

    def __post_init__(self) -> None:
        at_least(1, width=self.width, depth=self.depth, points=self.points)

    @property
    def batch_size(self) -> int:
        """All points."""
        return self.points


def _configs(task: PINNConfig) -> Configs:
    # Without gradient noise there is nothing to gain from measuring on a part of the points.
    kron = AdaHessianKron(lr=_LR, batch_fraction=1.0)
    optimizers = {**with_modern({"adamw": AdamW(lr=_LR), "adam": Adam(lr=_LR)}), "adahessian-kron": kron}
    cosine = ScheduleConfig(schedule="cosine", lr_warmup_steps=100)
    return {
        **same_for(optimizers, task, schedule=cosine, steps=2000, eval_every=100),
        **same_for({"lbfgs": LBFGS(lr=1.0)}, task, steps=2000, eval_every=100),
    }


_LR = 3e-3
_NOTES = """
    Not in the paper. The exact solution is known, so the metric is the network's relative error. Every step takes all
    points, and the arithmetic is float64. One step of L-BFGS evaluates the loss several times.
    """


@preset(
    "pinn-poisson-1d",
    title="PINN for Poisson's equation in 1D",
    data="Nothing.",
    family_notes=_NOTES,
    needs_no_data=True,
)
def pinn_poisson_1d() -> Configs:
    """Solve u'' = f with a network of three hidden layers of 32 units."""
    return _configs(PINNConfig(width=32, depth=3))


@preset(
    "pinn-poisson-2d",
    title="PINN for Poisson's equation in 2D",
    data="Nothing.",
    family_notes=_NOTES,
    needs_no_data=True,
)
def pinn_poisson_2d() -> Configs:
    """Solve Poisson's equation on a square with a network of three hidden layers of 64 units."""
    return _configs(PINNConfig(dimensions=2, width=64, depth=3, points=1024))
