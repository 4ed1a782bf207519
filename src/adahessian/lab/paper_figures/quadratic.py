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
_LINES = {GRADIENT_DESCENT: (VERMILION, "o-", 3.5), ADAHESSIAN: (BLUE, "o-", 5.0), WITH_MOMENTUM: (GREEN, "o--", 2.5)}
_STEPS = 60


def walk(
    function: Callable[[Tensor], Tensor], groups: Sequence[dict[str, Any]], make: Callable[..., Optimizer], steps: int
) -> Tensor:
    """Return the positions of points before and after each step, of shape (groups, steps + 1, ...).

    Each group holds its start as ``"params"``, and options. The loss is the sum of the function's values, so no point
    depends on another one. If the function's Hessian is diagonal, AdaHessian's estimate is exact.
    """
    points = nn.ParameterList(group["params"].clone() for group in groups)
    optimizer = make([{**group, "params": [point]} for group, point in zip(groups, points, strict=True)])

    def loss(points: nn.ParameterList, _: None) -> Tensor:
        return function(torch.stack(list(points))).sum()

    if isinstance(optimizer, adahessian.AdaHessian):
        step = adahessian.TrainingStep(adahessian.Curvature(points, loss, optimizer), capture=False)
    else:
        step = adahessian.TrainingStep(points, loss, optimizer, capture=False)
    positions = [torch.stack(list(points)).detach()]
    for _ in range(steps):
        step(None)
        positions.append(torch.stack(list(points)).detach())
    return torch.stack(positions, dim=1)


def quadratic(points: Tensor) -> Tensor:
    """Return :math:`10 x^2 + y^2` of points along the last dimension. The curvatures are 20 and 2."""
    x, y = points.unbind(-1)
    return 10 * x.square() + y.square()


def solve_quadratic() -> dict[str, Tensor]:
    """Minimize :func:`quadratic` with three optimizers, and return the positions of each, of shape (steps + 1, 2).

    Gradient descent has its best learning rate, 2 / (20 + 2). AdaHessian's learning rate is 1, and eps is 0, so its
    first step is Newton's.
    """
    start = torch.tensor(START, dtype=torch.float64)
    optimizers: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
        GRADIENT_DESCENT: (SGD, {"lr": 2 / (20 + 2)}),
        ADAHESSIAN: (adahessian.AdaHessian, {"lr": 1.0, "betas": (0.0, 0.999), "eps": 0.0}),
        WITH_MOMENTUM: (adahessian.AdaHessian, {"lr": 1.0, "eps": 0.0}),
    }
    return {
        name: walk(quadratic, [{"params": start, **options}], optimizer, _STEPS)[0]
        for name, (optimizer, options) in optimizers.items()
    }


def draw() -> Figure:
    """Draw the paths from above, and the distances to the minimum."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 5), layout="constrained")
        above, distance = figure.subplots(1, 2, width_ratios=(1, 1.1))
        x, y = np.meshgrid(np.linspace(-1.05, 1.05, 400), np.linspace(-1.8, 3.0, 400))
        values = quadratic(torch.as_tensor(np.stack([x, y], axis=-1))).numpy()
        above.contour(x, y, values, levels=[0.05, 0.3, 1, 2.2, 4, 6.5, 9.85], colors="#BDBDBD", linewidths=0.9)
        floor = 1e-17  # where distances of exactly 0 are drawn
        for name, path in solve_quadratic().items():
            color, line, size = _LINES[name]
            look: dict[str, Any] = {"color": color, "markersize": size, "linewidth": 1.5, "label": name}
            if name != WITH_MOMENTUM:
                above.plot(*path.numpy().T, line, **look)
            distance.semilogy(path.norm(dim=1).clamp(min=floor).numpy(), line, **look)
        above.plot(*START, "o", color="black", markersize=7, label="start")
        above.plot(0, 0, "*", color="black", markersize=13, markeredgecolor="white", label="minimum", zorder=4)
        above.set(title="$10x^2 + y^2$ from above", xlabel="x", ylabel="y", xlim=(-1.05, 1.05), ylim=(-1.8, 3.0))
        above.set_xticks([-1, -0.5, 0, 0.5, 1])
        above.grid(visible=False)
        above.text(0.36, 1.35, "one step", color=BLUE)
        above.legend(loc="lower right", frameon=True, edgecolor="none", framealpha=1)
        distance.set(title="Distance to the minimum", xlabel="step", ylabel="distance (0 is drawn at the edge)")
        distance.set_ylim(floor / 3, 30)
        distance.legend(loc="center right")
    return figure
