"""Physics-informed networks: Poisson's equation in one and two dimensions."""

from typing import ClassVar, Literal

from adahessian.lab.configs.checks import Count
from adahessian.lab.configs.optimizers import LBFGS, AdaHessianKron, Adam, AdamW
from adahessian.lab.configs.presets import Configs, preset, same_for, with_modern
from adahessian.lab.configs.run import Metric, ScheduleConfig, WithValidation


class PINNConfig(WithValidation):
    """Poisson's equation, solved by a network in float64."""

    metric: ClassVar[Metric] = Metric(
        name="relative_error", title="relative L2 error", higher_is_better=False, digits=5
    )
    validation_metric: ClassVar[Metric] = metric

    dimensions: Literal[1, 2] = 1  # Dimensions of the domain.
    width: Count = 32  # Hidden units per layer.
    depth: Count = 2  # Hidden layers.
    points: Count = 256  # Collocation points inside the domain. Every step uses all of them.


def _configs(task: PINNConfig) -> Configs:
    lr = 3e-3
    # Without gradient noise there is nothing to gain from measuring on a part of the points.
    kron = AdaHessianKron(lr=lr, batch_fraction=1.0)
    optimizers = {**with_modern({"adamw": AdamW(lr=lr), "adam": Adam(lr=lr)}), "adahessian-kron": kron}
    cosine = ScheduleConfig(schedule="cosine", lr_warmup_steps=100)
    return {
        **same_for(optimizers, task, schedule=cosine, steps=2000, eval_every=100),
        **same_for({"lbfgs": LBFGS(lr=1.0)}, task, steps=2000, eval_every=100),
    }


_NOTES = "Not in the paper. The exact solution is known. One step of L-BFGS evaluates the loss several times."


@preset("pinn-poisson-1d", "PINN for Poisson's equation in 1D", notes=_NOTES)
def pinn_poisson_1d() -> Configs:
    """Solve u'' = f with a network of three hidden layers of 32 units."""
    return _configs(PINNConfig(width=32, depth=3))


@preset("pinn-poisson-2d", "PINN for Poisson's equation in 2D", notes=_NOTES)
def pinn_poisson_2d() -> Configs:
    """Solve Poisson's equation on a square with a network of three hidden layers of 64 units."""
    return _configs(PINNConfig(dimensions=2, width=64, depth=3, points=1024))
