"""Figures 1 and 3 of the paper: steps of optimizers on functions of one and two variables."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import adahessian
from adahessian.lab.paper_figures.style import BLUE, GREEN, ORANGE, VERMILION, styled

# Figure 1: AdaHessian solves a quadratic function in one step.
GRADIENT_DESCENT = "gradient descent"
ADAHESSIAN = "AdaHessian, $\\beta_1$ = 0"
WITH_MOMENTUM = "AdaHessian, $\\beta_1$ = 0.9"
START = (0.6, 2.5)
_LINES = {GRADIENT_DESCENT: (VERMILION, "o-", 3.5), ADAHESSIAN: (BLUE, "o-", 5.0), WITH_MOMENTUM: (GREEN, "o--", 2.5)}
_STEPS = 60

# Figure 3: momentum of the Hessian helps on a function with many minima. These are values of beta2.
WITH, WITHOUT = 0.999, 0.0
# The paper gives neither the start nor the learning rate nor beta1, and the outcome depends on all of them.
BETA1S = (0.9, 0.0)
LRS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
# The function is even, so these starts stand for [-1, 1].
STARTS = torch.arange(0.005, 1.0, 0.01, dtype=torch.float64)

# The lowest minima of the function are at 0.0734 and -0.0734.
LOWEST = -0.001915398
# Excludes the shallow minimum at 0, which is 0.0019 above the lowest minima.
_TOLERANCE = 1e-3
# Steps that a walk has to stay near the lowest minimum. Passing through is not enough.
_STAY = 100
# The walk that is drawn: one start, at a learning rate where momentum decides the outcome.
_SHOWN_START, _SHOWN_LR = 90, LRS.index(3.0)
_MOMENTUM_LINES = {WITH: (BLUE, "o", "with Hessian momentum"), WITHOUT: (ORANGE, "s", "without Hessian momentum")}


def walk(
    function: Callable[[Tensor], Tensor], groups: Sequence[dict[str, Any]], make: Callable[..., Optimizer], steps: int
) -> Tensor:
    """Return the positions of points before and after each step, of shape (groups, steps + 1, ...).

    Each group holds its start as ``"params"``, and options. No point depends on another one.
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
    """Minimize :func:`quadratic` with three optimizers, and return the positions of each, of shape (steps + 1, 2)."""
    start = torch.tensor(START, dtype=torch.float64)
    optimizers: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
        GRADIENT_DESCENT: (SGD, {"lr": 2 / (20 + 2)}),  # the best learning rate
        # At a learning rate of 1, the first step is Newton's.
        ADAHESSIAN: (adahessian.AdaHessian, {"lr": 1.0, "betas": (0.0, 0.999), "eps": 0.0}),
        WITH_MOMENTUM: (adahessian.AdaHessian, {"lr": 1.0, "eps": 0.0}),
    }
    return {
        name: walk(quadratic, [{"params": start, **options}], optimizer, _STEPS)[0]
        for name, (optimizer, options) in optimizers.items()
    }


@styled
def draw_quadratic() -> Figure:
    """Draw the paths from above, and the distances to the minimum."""
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


def wavy(x: Tensor) -> Tensor:
    r"""Return :math:`x^2 + 0.1 \, x \sin(20 \pi x)`, which has 21 minima in [-1, 1]."""
    return x.square() + 0.1 * x * torch.sin(20 * math.pi * x)


def arrived(positions: Tensor) -> Tensor:
    """Return which walks spend the last steps near a lowest minimum, of shape (learning rates, starts)."""
    return (wavy(positions[:, -_STAY:]) <= LOWEST + _TOLERANCE).all(dim=1)


def compare_momentum(beta1: float, steps: int = 1000) -> dict[float, Tensor]:
    """Return positions with and without Hessian momentum, of shape (learning rates, steps + 1, starts)."""
    groups = [{"params": STARTS, "lr": lr, "betas": (beta1, beta2)} for beta2 in (WITH, WITHOUT) for lr in LRS]
    positions = walk(wavy, groups, adahessian.AdaHessian, steps)
    return dict(zip((WITH, WITHOUT), positions.chunk(2), strict=True))


@styled
def draw_momentum() -> Figure:
    """Draw the walks of one start, and how many starts arrive per learning rate."""
    figure = Figure(figsize=(13, 5), layout="constrained")
    one_start, shares = figure.subplots(1, 2, width_ratios=(1.35, 1))
    for beta1, line in zip(BETA1S, ("-", "--"), strict=True):
        walks = compare_momentum(beta1)
        if beta1 == BETA1S[0]:
            _draw_one_start(one_start, walks)
        for beta2, (color, marker, name) in _MOMENTUM_LINES.items():
            label = rf"{name}, $\beta_1$ = {beta1:g}"
            shares.semilogx(LRS, 100 * arrived(walks[beta2]).double().mean(1), marker + line, color=color, label=label)
    shares.set_xticks(LRS, [f"{lr:g}" for lr in LRS])
    shares.minorticks_off()
    shares.set(title="100 starts from 0 to 1, as the function is even", xlabel="learning rate")
    shares.set(ylabel="% that reach the lowest minimum and stay", ylim=(-2, None))
    shares.legend(loc="upper left")
    return figure


def _draw_one_start(axes: Axes, walks: dict[float, Tensor]) -> None:
    x = torch.linspace(-1.05, 1.05, 2101, dtype=torch.float64)
    axes.plot(x, wavy(x), color="#9A9A9A", linewidth=1.2)
    for beta2, (color, marker, label) in _MOMENTUM_LINES.items():
        positions = walks[beta2][_SHOWN_LR, :, _SHOWN_START]
        axes.plot(positions, wavy(positions), f"{marker}-", color=color, markersize=4, linewidth=0.9, label=label)
        end = positions[-1]
        axes.plot(end, wavy(end), marker, color=color, markersize=11, markeredgecolor="black", zorder=4)
    start = STARTS[_SHOWN_START]
    axes.plot(start, wavy(start), "o", color="black", markersize=8, label="start", zorder=4)
    axes.plot([], [], "o", color="white", markersize=9, markeredgecolor="black", label="end")
    title = rf"$x^2 + 0.1\,x\,\sin(20\pi x)$: one start, lr {LRS[_SHOWN_LR]:g}, $\beta_1$ = {BETA1S[0]:g}"
    axes.set(title=title, xlabel="x", ylabel="f(x)")
    axes.legend(loc="upper center")
