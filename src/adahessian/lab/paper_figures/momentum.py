"""Figure 3 of the paper: momentum of the Hessian on a function with many minima."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

import adahessian
from adahessian.lab.paper_figures.quadratic import Points, walk
from adahessian.lab.paper_figures.style import BLUE, ORANGE, STYLE

WITH, WITHOUT = 0.999, 0.0
"""Values of beta2: with and without Hessian momentum."""

# The paper gives neither the start nor the learning rate nor beta1, and the outcome depends on all of them.
BETA1S = (0.9, 0.0)
LRS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
# The function is even, so these starts stand for [-1, 1].
STARTS = torch.arange(0.005, 1.0, 0.01, dtype=torch.float64)
STEPS = 1000

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


def lowest_minimum() -> tuple[float, float]:
    """Return the position (the positive one of two) and the value of the lowest minimum of :func:`wavy`.

    Example:
        >>> "{:.4f} {:.5f}".format(*lowest_minimum())
        '0.0734 -0.00192'
    """
    x = torch.linspace(0, 0.1, 1_000_001, dtype=torch.float64)
    values = wavy(x)
    return x[values.argmin()].item(), values.min().item()


@dataclass(frozen=True)
class Walks:
    """Walks from all starts at all learning rates, for one beta2."""

    positions: Tensor
    """Positions before and after each step, of shape (learning rates, steps + 1, starts)."""

    @property
    def heights(self) -> Tensor:
        """Values above the lowest minimum, of the same shape."""
        return wavy(self.positions) - lowest_minimum()[1]

    @property
    def arrived(self) -> Tensor:
        """Which walks spend the last steps near a lowest minimum, of shape (learning rates, starts)."""
        return (self.heights[:, -_STAY:] <= _TOLERANCE).all(dim=1)

    @property
    def shares(self) -> list[float]:
        """The share of starts that arrive, per learning rate."""
        return self.arrived.double().mean(dim=1).tolist()


def compare_momentum(beta1: float, steps: int = STEPS) -> dict[float, Walks]:
    """Walk on :func:`wavy` with and without Hessian momentum. One optimizer moves the points of all settings."""
    settings = [(beta2, lr) for beta2 in (WITH, WITHOUT) for lr in LRS]
    points = Points(wavy, [STARTS] * len(settings))
    optimizer = adahessian.AdaHessian(
        {"params": [group], "lr": lr, "betas": (beta1, beta2)}
        for group, (beta2, lr) in zip(points.groups, settings, strict=True)
    )
    with_momentum, without = map(Walks, walk(points, optimizer, steps).chunk(2))
    return {WITH: with_momentum, WITHOUT: without}


def draw(steps: int = STEPS) -> Figure:
    """Draw the walks of one start, how many starts arrive per learning rate, and where each start ends."""
    walks = {beta1: compare_momentum(beta1, steps) for beta1 in BETA1S}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 9), layout="constrained")
        upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 0.95), hspace=0.04).flat
        one_start, shares = upper.subplots(1, 2, width_ratios=(1.35, 1))
        _draw_one_start(one_start, walks[BETA1S[0]])
        _draw_shares(shares, walks)
        _draw_ends(lower, walks[BETA1S[0]])
    return figure


def _draw_one_start(axes: Axes, walks: Mapping[float, Walks]) -> None:
    x = torch.linspace(-1.05, 1.05, 2101, dtype=torch.float64)
    axes.plot(x, wavy(x), color="#9A9A9A", linewidth=1.2)
    for beta2, (color, marker, label) in _LINES.items():
        positions = walks[beta2].positions[_SHOWN_LR, :, _SHOWN_START]
        axes.plot(positions, wavy(positions), f"{marker}-", color=color, markersize=4, linewidth=0.9, label=label)
        end = positions[-1]
        axes.plot(end, wavy(end), marker, color=color, markersize=11, markeredgecolor="black", zorder=4)
    start = STARTS[_SHOWN_START]
    axes.plot(start, wavy(start), "o", color="black", markersize=8, label="start", zorder=4)
    axes.plot([], [], "o", color="white", markersize=9, markeredgecolor="black", label="end")
    arrived, others = walks[WITH].arrived[_SHOWN_LR], walks[WITHOUT].arrived[_SHOWN_LR]
    counts = [int(of.sum()) for of in (arrived & ~others, others & ~arrived, arrived & others, ~arrived & ~others)]
    axes.set(
        title=rf"$x^2 + 0.1\,x\,\sin(20\pi x)$: one start, lr {LRS[_SHOWN_LR]:g}, $\beta_1$ = {BETA1S[0]:g}",
        xlabel="x\n{} of 100 starts reach the lowest minimum only with Hessian momentum,\n"
        "{} only without, {} with and without, {} never.".format(*counts),
        ylabel="f(x)",
    )
    axes.legend(loc="upper center")


def _draw_shares(axes: Axes, walks: Mapping[float, Mapping[float, Walks]]) -> None:
    for (beta1, of_beta1), line in zip(walks.items(), ("-", "--"), strict=True):
        for beta2, (color, marker, label) in _LINES.items():
            shares = 100 * np.array(of_beta1[beta2].shares)
            axes.plot(LRS, shares, marker + line, color=color, markersize=5, label=rf"{label}, $\beta_1$ = {beta1:g}")
    axes.set_xscale("log")
    axes.set_xticks(LRS, [f"{lr:g}" for lr in LRS])
    axes.minorticks_off()
    axes.set(title="Starts that reach the lowest minimum and stay", xlabel="learning rate", ylabel="% of starts")
    axes.set_ylim(bottom=-2)
    axes.legend(loc="upper left")


def _draw_ends(figure: SubFigure, walks: Mapping[float, Walks]) -> None:
    maps = figure.subplots(1, 2, sharey=True)
    norm = LogNorm(1e-3, 1e1)
    for axes, (beta2, (_, _, label)) in zip(maps, _LINES.items(), strict=True):
        heights = walks[beta2].heights[:, -1].clamp(min=1e-3).numpy()
        edges = np.linspace(0, 1, len(STARTS) + 1), np.arange(len(LRS) + 1)
        image = axes.pcolormesh(*edges, heights, norm=norm, cmap="viridis_r")
        axes.set(title=rf"Where each start ends {label}, $\beta_1$ = {BETA1S[0]:g}", xlabel="start")
        axes.grid(visible=False)
    maps[0].set_yticks(np.arange(len(LRS)) + 0.5, [f"{lr:g}" for lr in LRS])
    maps[0].set_ylabel("learning rate")
    figure.colorbar(image, ax=list(maps), extend="both", pad=0.015, label="final height above the lowest minimum")
    note = r"The paper gives neither the start nor the learning rate nor $\beta_1$, so all three are varied."
    figure.supxlabel(f"{note} The function is even: starts from -1 to 0 mirror these.", fontsize=10)
