"""Figure 3 of the paper: momentum of the Hessian on a function with many minima."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

import adahessian
from adahessian.lab.paper_figures.quadratic import walk
from adahessian.lab.paper_figures.style import BLUE, ORANGE, STYLE

# Values of beta2: with and without Hessian momentum.
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
_LINES = {WITH: (BLUE, "o", "with Hessian momentum"), WITHOUT: (ORANGE, "s", "without Hessian momentum")}


def wavy(x: Tensor) -> Tensor:
    r"""Return :math:`x^2 + 0.1 \, x \sin(20 \pi x)`, which has 21 minima in [-1, 1]."""
    return x.square() + 0.1 * x * torch.sin(20 * math.pi * x)


def arrived(positions: Tensor) -> Tensor:
    """Return which walks spend the last steps near a lowest minimum, of shape (learning rates, starts)."""
    return (wavy(positions[:, -_STAY:]) <= LOWEST + _TOLERANCE).all(dim=1)


def compare_momentum(beta1: float, steps: int = 1000) -> dict[float, Tensor]:
    """Walk on :func:`wavy` with and without Hessian momentum. One optimizer moves the points of all settings.

    Positions before and after each step have the shape (learning rates, steps + 1, starts).
    """
    groups = [{"params": STARTS, "lr": lr, "betas": (beta1, beta2)} for beta2 in (WITH, WITHOUT) for lr in LRS]
    positions = walk(wavy, groups, adahessian.AdaHessian, steps)
    return dict(zip((WITH, WITHOUT), positions.chunk(2), strict=True))


def draw() -> Figure:
    """Draw the walks of one start, how many starts arrive per learning rate, and where each start ends."""
    walks = {beta1: compare_momentum(beta1) for beta1 in BETA1S}
    shown = walks[BETA1S[0]]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 9), layout="constrained")
        upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 0.95), hspace=0.04).flat
        one_start, shares = upper.subplots(1, 2, width_ratios=(1.35, 1))
        _draw_one_start(one_start, shown)
        for (beta1, of_beta1), line in zip(walks.items(), ("-", "--"), strict=True):
            for beta2, (color, marker, name) in _LINES.items():
                label = rf"{name}, $\beta_1$ = {beta1:g}"
                share = 100 * arrived(of_beta1[beta2]).double().mean(dim=1)
                shares.semilogx(LRS, share, marker + line, color=color, markersize=5, label=label)
        shares.set_xticks(LRS, [f"{lr:g}" for lr in LRS])
        shares.minorticks_off()
        shares.set(title="Starts that reach the lowest minimum and stay", xlabel="learning rate", ylabel="% of starts")
        shares.set_ylim(bottom=-2)
        shares.legend(loc="upper left")

        maps = lower.subplots(1, 2, sharey=True)
        for axes, (beta2, (_, _, name)) in zip(maps, _LINES.items(), strict=True):
            heights = (wavy(shown[beta2][:, -1]) - LOWEST).clamp(min=1e-3)
            edges = np.linspace(0, 1, len(STARTS) + 1), np.arange(len(LRS) + 1)
            image = axes.pcolormesh(*edges, heights, norm=LogNorm(1e-3, 1e1), cmap="viridis_r")
            axes.set(title=rf"Where each start ends {name}, $\beta_1$ = {BETA1S[0]:g}", xlabel="start")
            axes.grid(visible=False)
        maps[0].set_yticks(np.arange(len(LRS)) + 0.5, [f"{lr:g}" for lr in LRS])
        maps[0].set_ylabel("learning rate")
        lower.colorbar(image, ax=list(maps), extend="both", pad=0.015, label="final height above the lowest minimum")
        note = r"The paper gives neither the start nor the learning rate nor $\beta_1$, so all three are varied."
        lower.supxlabel(f"{note} The function is even: starts from -1 to 0 mirror these.", fontsize=10)
    return figure


def _draw_one_start(axes: Axes, walks: dict[float, Tensor]) -> None:
    x = torch.linspace(-1.05, 1.05, 2101, dtype=torch.float64)
    axes.plot(x, wavy(x), color="#9A9A9A", linewidth=1.2)
    for beta2, (color, marker, label) in _LINES.items():
        positions = walks[beta2][_SHOWN_LR, :, _SHOWN_START]
        axes.plot(positions, wavy(positions), f"{marker}-", color=color, markersize=4, linewidth=0.9, label=label)
        end = positions[-1]
        axes.plot(end, wavy(end), marker, color=color, markersize=11, markeredgecolor="black", zorder=4)
    start = STARTS[_SHOWN_START]
    axes.plot(start, wavy(start), "o", color="black", markersize=8, label="start", zorder=4)
    axes.plot([], [], "o", color="white", markersize=9, markeredgecolor="black", label="end")
    first, second = (arrived(walks[beta2])[_SHOWN_LR] for beta2 in (WITH, WITHOUT))
    counts = [int(each.sum()) for each in (first & ~second, second & ~first, first & second, ~first & ~second)]
    axes.set(
        title=rf"$x^2 + 0.1\,x\,\sin(20\pi x)$: one start, lr {LRS[_SHOWN_LR]:g}, $\beta_1$ = {BETA1S[0]:g}",
        xlabel="x\n{} of 100 starts reach the lowest minimum only with Hessian momentum,\n"
        "{} only without, {} with and without, {} never.".format(*counts),
        ylabel="f(x)",
    )
    axes.legend(loc="upper center")
