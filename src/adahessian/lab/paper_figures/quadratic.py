"""Figure 1 of the paper: AdaHessian solves a quadratic function in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import adahessian
from adahessian.lab.paper_figures.style import BLUE, GREEN, STYLE, VERMILION

GRADIENT_DESCENT = "gradient descent"
ADAHESSIAN = "AdaHessian, $\\beta_1$ = 0"
WITH_MOMENTUM = "AdaHessian, $\\beta_1$ = 0.9"
START = (0.6, 2.5)
STEPS = 60


class Points(nn.Module):
    """Points that an optimizer moves on a function. The loss is the sum of the function's values.

    No point's value depends on another point. Where the function's Hessian is diagonal, AdaHessian's estimate is exact.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], starts: Sequence[Tensor]) -> None:
        super().__init__()
        self.function = function
        self.groups = nn.ParameterList(start.clone() for start in starts)

    def forward(self) -> Tensor:
        """Return the loss."""
        return self.function(torch.stack(list(self.groups))).sum()


def walk(points: Points, optimizer: Optimizer, steps: int) -> Tensor:
    """Return the positions before and after each step, of shape (groups, steps + 1, ...)."""
    curvature = None
    if isinstance(optimizer, adahessian.AdaHessian):
        curvature = adahessian.Curvature(points, lambda model, _: model(), optimizer)
    positions = [torch.stack(list(points.groups)).detach()]
    for _ in range(steps):
        if curvature is not None:
            curvature.measure(None)
        optimizer.zero_grad()
        points().backward()
        optimizer.step()
        positions.append(torch.stack(list(points.groups)).detach())
    return torch.stack(positions, dim=1)


def quadratic(points: Tensor) -> Tensor:
    """Return :math:`10 x^2 + y^2` of points along the last dimension. The curvatures are 20 and 2.

    Example:
        >>> quadratic(torch.tensor([1.0, 2.0]))
        tensor(14.)
    """
    x, y = points.unbind(-1)
    return 10 * x.square() + y.square()


def solve_quadratic() -> dict[str, Tensor]:
    """Minimize :func:`quadratic` with three optimizers, and return the positions of each, of shape (steps + 1, 2).

    Gradient descent has its best learning rate, 2 / (20 + 2). AdaHessian's learning rate is 1, and eps is 0, so its
    first step is Newton's.
    """
    optimizers: dict[str, Callable[[nn.Module], Optimizer]] = {
        GRADIENT_DESCENT: lambda model: SGD(model.parameters(), lr=2 / (20 + 2)),
        ADAHESSIAN: lambda model: adahessian.AdaHessian(model.parameters(), lr=1.0, betas=(0.0, 0.999), eps=0.0),
        WITH_MOMENTUM: lambda model: adahessian.AdaHessian(model.parameters(), lr=1.0, eps=0.0),
    }
    paths = {}
    for name, build in optimizers.items():
        points = Points(quadratic, [torch.tensor(START, dtype=torch.float64)])
        paths[name] = walk(points, build(points), STEPS)[0]
    return paths


def draw() -> Figure:
    """Draw the paths from above, and the distances to the minimum."""
    paths = solve_quadratic()
    styles = ((VERMILION, "o-", 3.5), (BLUE, "o-", 5.0), (GREEN, "o--", 2.5))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 5), layout="constrained")
        above, distance = figure.subplots(1, 2, width_ratios=(1, 1.1))
        x, y = np.meshgrid(np.linspace(-1.05, 1.05, 400), np.linspace(-1.8, 3.0, 400))
        values = quadratic(torch.as_tensor(np.stack([x, y], axis=-1))).numpy()
        above.contour(x, y, values, levels=[0.05, 0.3, 1, 2.2, 4, 6.5, 9.85], colors="#BDBDBD", linewidths=0.9)
        # Distances of exactly 0 are drawn at the floor.
        floor = 1e-17
        for (name, path), (color, line, size) in zip(paths.items(), styles, strict=True):
            kind: dict[str, Any] = {"color": color, "markersize": size, "linewidth": 1.5, "label": name}
            if name != WITH_MOMENTUM:
                above.plot(*path.numpy().T, line, **kind)
            distance.semilogy(path.norm(dim=1).clamp(min=floor).numpy(), line, **kind)
        above.plot(*START, "o", color="black", markersize=7, label="start")
        above.plot(0, 0, "*", color="black", markersize=13, markeredgecolor="white", label="minimum", zorder=4)
        above.set(title="$10x^2 + y^2$ from above", xlabel="x", ylabel="y", xlim=(-1.05, 1.05), ylim=(-1.8, 3.0))
        above.grid(visible=False)
        above.set_xticks([-1, -0.5, 0, 0.5, 1])
        above.text(0.36, 1.35, "one step", color=BLUE)
        above.legend(loc="lower right", frameon=True, edgecolor="none", framealpha=1)
        distance.set(title="Distance to the minimum", xlabel="step", ylabel="distance (0 is drawn at the edge)")
        distance.set_ylim(floor / 3, 30)
        distance.legend(loc="center right")
    return figure
