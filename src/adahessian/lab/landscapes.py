"""Figures 1 and 3 of the paper: the real optimizer on functions that are simple enough to see what curvature does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import adahessian

Landscape = Callable[[Tensor], Tensor]


class Walkers(nn.Module):
    r"""Points on a landscape, each of which goes its own way.

    Their loss is the sum of their heights. No walker's height depends on another's position, so the Hessian couples
    none of them. On the landscapes here it is diagonal altogether, and the estimate :math:`z \odot (H z)` is its
    diagonal exactly, whatever the signs :math:`z`.

    Args:
        landscape: Heights of positions.
        starts: First positions, one tensor for each parameter group that is to walk.
    """

    def __init__(self, landscape: Landscape, starts: Sequence[Tensor]) -> None:
        super().__init__()
        self.landscape = landscape
        self.groups = nn.ParameterList(start.clone() for start in starts)

    def positions(self) -> Tensor:
        """The positions of all groups, stacked."""
        return torch.stack(list(self.groups))

    def forward(self) -> Tensor:
        """The sum of all heights."""
        return self.landscape(self.positions()).sum()


def walk(walkers: Walkers, optimizer: Optimizer, steps: int, on_step: Callable[[], object] = lambda: None) -> Tensor:
    """Take the walkers' steps.

    Args:
        walkers: The walkers, moved in place.
        optimizer: What moves them.
        steps: How many steps to take.
        on_step: Called after each step.

    Returns:
        Positions before and after every step, of shape (groups, steps + 1, ...).
    """
    curvature = None
    if isinstance(optimizer, adahessian.AdaHessian):
        curvature = adahessian.Curvature(walkers, lambda model, _: model(), optimizer)
    positions = [walkers.positions().detach()]
    for _ in range(steps):
        if curvature is not None:
            curvature.measure(None)
        optimizer.zero_grad()
        walkers().backward()
        optimizer.step()
        positions.append(walkers.positions().detach())
        on_step()
    return torch.stack(positions, dim=1)


# ------------------------------------------------------------------------------------------------------------- figure 1


GRADIENT_DESCENT = "gradient descent"
ADAHESSIAN = "AdaHessian, beta1 = 0"
ADAHESSIAN_WITH_MOMENTUM = "AdaHessian, beta1 = 0.9"

QUADRATIC_START = (0.6, 2.5)
QUADRATIC_STEPS = 60


def quadratic(points: Tensor) -> Tensor:
    """Heights :math:`f(x, y) = 10 x^2 + y^2` of points along the last dimension: 20 and 2 are its curvatures.

    Example:
        >>> quadratic(torch.tensor([1.0, 2.0]))
        tensor(14.)
    """
    x, y = points.unbind(-1)
    return 10 * x.square() + y.square()


def solve_quadratic() -> dict[str, Tensor]:
    r"""Walk down :func:`quadratic` from one start by three ways.

    Gradient descent has the learning rate that is best for it, :math:`2 / (20 + 2)`: at any other one of the two
    coordinates shrinks more slowly. AdaHessian has the learning rate 1 and eps 0, so that its first step is Newton's,
    :math:`x - f'(x) / f''(x)`, and lands on the minimum. Without gradient momentum it stays there; with the usual
    :math:`\beta_1 = 0.9` the first gradient still pushes, and carries it past and back.

    Returns:
        For each way the positions before and after each step, of shape (steps + 1, 2).
    """
    start = torch.tensor(QUADRATIC_START, dtype=torch.float64)
    ways: dict[str, Callable[[nn.Module], Optimizer]] = {
        GRADIENT_DESCENT: lambda model: SGD(model.parameters(), lr=2 / (20 + 2)),
        ADAHESSIAN: lambda model: adahessian.AdaHessian(model.parameters(), lr=1.0, betas=(0.0, 0.999), eps=0.0),
        ADAHESSIAN_WITH_MOMENTUM: lambda model: adahessian.AdaHessian(model.parameters(), lr=1.0, eps=0.0),
    }
    paths = {}
    for name, optimizer in ways.items():
        walkers = Walkers(quadratic, [start])
        paths[name] = walk(walkers, optimizer(walkers), QUADRATIC_STEPS)[0]
    return paths


# ------------------------------------------------------------------------------------------------------------- figure 3


# Whether the Hessian has momentum is the question of the figure.
WITH_HESSIAN_MOMENTUM = 0.999
WITHOUT_HESSIAN_MOMENTUM = 0.0

# The paper gives neither the start nor the learning rate nor the momentum of the gradient, and all of them decide the
# outcome. The function is even, so these starts stand for [-1, 1].
USUAL_BETA1 = 0.9
WAVY_BETA1S = (USUAL_BETA1, 0.0)
WAVY_STARTS = torch.arange(0.005, 1.0, 0.01, dtype=torch.float64)
WAVY_LRS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
WAVY_STEPS = 1000

# Low enough to leave out the shallow minimum at 0, which is 0.0019 above the lowest ones at either side of it.
_TOLERANCE = 1e-3
# A walker that passes through the lowest valley has not arrived: it must have stayed for this many steps at the end.
_STAY = 100


def wavy(x: Tensor) -> Tensor:
    r"""Heights :math:`f(x) = x^2 + 0.1 \, x \sin(20 \pi x)`: a parabola with waves, twenty-one valleys in [-1, 1].

    The parabola's curvature is 2. That of the waves is up to 200 times as large, changes its sign every 0.05, and
    vanishes in between: there, a step divided by the curvature of that one place is enormous.
    """
    return x.square() + 0.1 * x * torch.sin(20 * math.pi * x)


def lowest_minimum() -> tuple[float, float]:
    """Position (the positive one of two) and height of the lowest minimum of :func:`wavy`.

    Example:
        >>> "{:.4f} {:.5f}".format(*lowest_minimum())
        '0.0734 -0.00192'
    """
    x = torch.linspace(0, 0.1, 1_000_001, dtype=torch.float64)
    heights = wavy(x)
    return x[heights.argmin()].item(), heights.min().item()


@dataclass(frozen=True)
class WavyWalks:
    """Walks on :func:`wavy` from all starts, at all learning rates, for one Hessian momentum."""

    positions: Tensor
    """Positions before and after each step, of shape (learning rates, steps + 1, starts)."""

    @property
    def final_heights(self) -> Tensor:
        """Heights above the lowest minimum after the last step, of shape (learning rates, starts)."""
        return self._heights()[:, -1]

    @property
    def arrived(self) -> Tensor:
        """Which walks spent their last 100 steps in a lowest valley, of shape (learning rates, starts)."""
        return self.arrival_steps <= self.positions.shape[1] - _STAY

    @property
    def arrival_steps(self) -> Tensor:
        """The step from which on each walk is in a lowest valley, of shape (learning rates, starts)."""
        outside = self._heights() > _TOLERANCE
        steps = torch.arange(1, outside.shape[1] + 1).unsqueeze(-1)
        return (outside * steps).amax(dim=1)

    def shares(self) -> list[float]:
        """For each learning rate the share of starts that arrived."""
        return self.arrived.double().mean(dim=1).tolist()

    def median_arrival_steps(self) -> list[float | None]:
        """For each learning rate the median of the steps to arrive, over those that did; None if none did."""
        return [
            steps[arrived].double().median().item() if arrived.any() else None
            for steps, arrived in zip(self.arrival_steps, self.arrived, strict=True)
        ]

    def _heights(self) -> Tensor:
        return wavy(self.positions) - lowest_minimum()[1]


def compare_hessian_momentum(
    beta1: float = USUAL_BETA1, *, steps: int = WAVY_STEPS, on_step: Callable[[], object] = lambda: None
) -> dict[float, WavyWalks]:
    r"""Walk on :func:`wavy` with and without Hessian momentum, from a grid of starts at a grid of learning rates.

    One optimizer takes all of it in one walk: a parameter group for each pair of momentum and learning rate, whose one
    parameter holds all starts.

    Args:
        beta1: Momentum of the gradient.
        steps: How many steps to take.
        on_step: Called after each step.

    Returns:
        The walks, by their :math:`\beta_2`.
    """
    beta2s = (WITH_HESSIAN_MOMENTUM, WITHOUT_HESSIAN_MOMENTUM)
    settings = [(beta2, lr) for beta2 in beta2s for lr in WAVY_LRS]
    walkers = Walkers(wavy, [WAVY_STARTS] * len(settings))
    optimizer = adahessian.AdaHessian(
        {"params": [group], "lr": lr, "betas": (beta1, beta2)}
        for group, (beta2, lr) in zip(walkers.groups, settings, strict=True)
    )
    positions = walk(walkers, optimizer, steps, on_step)
    return dict(zip(beta2s, map(WavyWalks, positions.chunk(len(beta2s))), strict=True))
