"""The demo's plots. Each function draws one picture and writes it to a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure

from adahessian.lab import landscapes
from adahessian.lab.digits import Epoch
from adahessian.lab.landscapes import WAVY_LRS, WAVY_STARTS, WavyWalks

DPI = 160

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#7A7A7A"
# In the order of the contenders.
CONTENDER_COLOURS = (GREY, ORANGE, PURPLE, BLUE, GREEN)
CONTENDER_LINES = ("-", "--", ":", "-", "--")

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


def plot_digits(runs: Mapping[str, Sequence[Sequence[Epoch]]], path: Path) -> None:
    """Draw how contenders learn the digits: training loss by epoch and by time, and final accuracy seed by seed.

    Args:
        runs: For each contender the epochs of each seed.
        path: The file to write.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 4.6), layout="constrained")
        by_epoch, by_time, at_end = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
        by_time.sharey(by_epoch)
        for (name, seeds), colour, line in zip(runs.items(), CONTENDER_COLOURS, CONTENDER_LINES, strict=True):
            losses = np.array([[epoch.train_loss for epoch in epochs] for epochs in seeds])
            seconds = np.array([[epoch.train_seconds for epoch in epochs] for epochs in seeds]).mean(axis=0)
            middle = np.exp(np.log(losses).mean(axis=0))
            for axes, x in ((by_epoch, np.arange(1, losses.shape[1] + 1)), (by_time, seconds)):
                axes.plot(x, middle, line, color=colour, label=name)
                axes.fill_between(x, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.13, linewidth=0)
        by_epoch.set(title="Training loss by epoch", xlabel="epoch: geometric mean of the seeds, and their range")
        by_epoch.set_ylabel("cross-entropy on the training digits")
        by_epoch.set_yscale("log")
        by_epoch.xaxis.get_major_locator().set_params(integer=True)
        by_time.set(title="The same by time", xlabel="seconds of training (rough)")
        by_time.tick_params(labelleft=False)
        _draw_final_accuracies(at_end, runs)
        figure.legend(*by_epoch.get_legend_handles_labels(), loc="outside lower center", ncols=len(runs))
        figure.savefig(path, dpi=DPI)


def _draw_final_accuracies(axes: Axes, runs: Mapping[str, Sequence[Sequence[Epoch]]]) -> None:
    """A row of dots for each contender, one dot a seed, and a bar at the mean."""
    for row, (seeds, colour) in enumerate(zip(runs.values(), CONTENDER_COLOURS, strict=True)):
        accuracies = 100 * np.array([epochs[-1].accuracy for epochs in seeds])
        # Seeds that tie would hide one another: each has its own height within the row.
        heights = row + np.linspace(-0.22, 0.22, len(seeds)) if len(seeds) > 1 else np.array([row])
        axes.plot(accuracies, heights, "o", color=colour, alpha=0.75, markersize=6, markeredgewidth=0)
        axes.plot([accuracies.mean()] * 2, [row - 0.34, row + 0.34], color=colour, linewidth=2.6)
    axes.set_yticks(range(len(runs)), [name.replace(", ", ",\n") for name in runs])
    axes.set_ylim(len(runs) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set(title="Test accuracy at the end", xlabel="% of 500 test digits: one dot a seed, the bar is the mean")


def plot_quadratic(paths: Mapping[str, torch.Tensor], path: Path) -> None:
    """Draw figure 1: the ways down :math:`10 x^2 + y^2`, seen from above, and their distances to the minimum.

    Args:
        paths: For each way its positions, of shape (steps + 1, 2).
        path: The file to write.
    """
    styles = {
        landscapes.GRADIENT_DESCENT: (VERMILION, "o-", 3.5),
        landscapes.ADAHESSIAN: (BLUE, "o-", 5.0),
        landscapes.ADAHESSIAN_WITH_MOMENTUM: (GREEN, "o--", 2.5),
    }
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 5), layout="constrained")
        above, distance = figure.subplots(1, 2, width_ratios=(1, 1.1))
        x, y = np.meshgrid(np.linspace(-1.05, 1.05, 400), np.linspace(-1.8, 3.0, 400))
        heights = landscapes.quadratic(torch.as_tensor(np.stack([x, y], axis=-1))).numpy()
        above.contour(x, y, heights, levels=[0.05, 0.3, 1, 2.2, 4, 6.5, 9.85], colors="#BDBDBD", linewidths=0.9)
        for name in (landscapes.GRADIENT_DESCENT, landscapes.ADAHESSIAN):
            colour, line, size = styles[name]
            above.plot(*paths[name].numpy().T, line, color=colour, markersize=size, linewidth=1.5, label=name)
        above.plot(*paths[landscapes.ADAHESSIAN][0].tolist(), "o", color="black", markersize=7, label="start")
        above.plot(0, 0, "*", color="black", markersize=13, markeredgecolor="white", label="minimum", zorder=4)
        above.set(title="$10x^2 + y^2$ from above", xlabel="x", ylabel="y", xlim=(-1.05, 1.05), ylim=(-1.8, 3.0))
        above.grid(visible=False)
        above.set_xticks([-1, -0.5, 0, 0.5, 1])
        above.text(0.36, 1.35, "one step", color=BLUE)
        above.legend(loc="lower right", frameon=True, edgecolor="none", framealpha=1)
        floor = 1e-17
        for name, (colour, line, size) in styles.items():
            distances = paths[name].norm(dim=1).clamp(min=floor).numpy()
            distance.semilogy(distances, line, color=colour, markersize=size, linewidth=1.5, label=name)
        distance.set(title="Distance to the minimum", xlabel="step", ylabel="distance (0 is drawn at the edge)")
        distance.set_ylim(floor / 3, 30)
        distance.legend(loc="center right")
        figure.savefig(path, dpi=DPI)


def plot_wavy(walks: Mapping[float, Mapping[float, WavyWalks]], path: Path) -> None:
    """Draw figure 3: the walks of one start, how many starts arrive at each learning rate, and where every start ends.

    Args:
        walks: The walks, by the momentum of the gradient, then by that of the Hessian.
        path: The file to write.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 9), layout="constrained")
        upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 0.95), hspace=0.04).flat
        one_start, shares = upper.subplots(1, 2, width_ratios=(1.35, 1))
        _draw_one_start(one_start, walks[landscapes.USUAL_BETA1])
        _draw_shares(shares, walks)
        _draw_maps(lower, walks[landscapes.USUAL_BETA1])
        figure.savefig(path, dpi=DPI)


_WITH, _WITHOUT = landscapes.WITH_HESSIAN_MOMENTUM, landscapes.WITHOUT_HESSIAN_MOMENTUM
_WAVY_STYLES = {_WITH: (BLUE, "o", "with Hessian momentum"), _WITHOUT: (ORANGE, "s", "without Hessian momentum")}

# One start at one learning rate, at which the momentum makes the difference that the paper shows. It does not
# everywhere: the picture counts for how many starts it does.
_SHOWN_START = 90
_SHOWN_LR = WAVY_LRS.index(3.0)


def _draw_one_start(axes: Axes, walks: Mapping[float, WavyWalks]) -> None:
    x = torch.linspace(-1.05, 1.05, 2101, dtype=torch.float64)
    axes.plot(x, landscapes.wavy(x), color="#9A9A9A", linewidth=1.2)
    for beta2, (colour, marker, label) in _WAVY_STYLES.items():
        positions = walks[beta2].positions[_SHOWN_LR, :, _SHOWN_START]
        heights = landscapes.wavy(positions)
        axes.plot(positions, heights, f"{marker}-", color=colour, markersize=4, linewidth=0.9, label=label)
        axes.plot(positions[-1], heights[-1], marker, color=colour, markersize=11, markeredgecolor="black", zorder=4)
    start = WAVY_STARTS[_SHOWN_START]
    axes.plot(start, landscapes.wavy(start), "o", color="black", markersize=8, label="start", zorder=4)
    axes.plot([], [], "o", color="white", markersize=9, markeredgecolor="black", label="end")
    arrived, others = walks[_WITH].arrived[_SHOWN_LR], walks[_WITHOUT].arrived[_SHOWN_LR]
    axes.set_title(
        "$x^2 + 0.1\\,x\\,\\sin(20\\pi x)$, "
        rf"one start at lr {WAVY_LRS[_SHOWN_LR]:g}, $\beta_1$ = {landscapes.USUAL_BETA1:g}"
    )
    axes.set_xlabel(
        f"x\nOf {len(WAVY_STARTS)} starts at this learning rate {int((arrived & ~others).sum())} reach the lowest "
        f"minimum only with Hessian momentum,\n{int((others & ~arrived).sum())} only without, "
        f"{int((arrived & others).sum())} both ways, {int((~arrived & ~others).sum())} neither way."
    )
    axes.set_ylabel("f(x)")
    axes.legend(loc="upper center")


def _draw_shares(axes: Axes, walks: Mapping[float, Mapping[float, WavyWalks]]) -> None:
    for beta1, line in zip(walks, ("-", "--"), strict=True):
        for beta2, (colour, marker, label) in _WAVY_STYLES.items():
            shares = 100 * np.array(walks[beta1][beta2].shares())
            axes.plot(
                WAVY_LRS, shares, marker + line, color=colour, label=rf"{label}, $\beta_1$ = {beta1:g}", markersize=5
            )
    axes.set_xscale("log")
    axes.set_xticks(WAVY_LRS, [f"{lr:g}" for lr in WAVY_LRS])
    axes.minorticks_off()
    axes.set(title="Starts that reach the lowest minimum and stay", xlabel="learning rate", ylabel="% of starts")
    axes.set_ylim(bottom=-2)
    axes.legend(loc="upper left")


def _draw_maps(figure: SubFigure, walks: Mapping[float, WavyWalks]) -> None:
    """For each learning rate a row, for each start a cell: its colour says how high the walk ended."""
    maps = figure.subplots(1, 2, sharey=True)
    lowest_shown, highest_shown = 1e-3, 1e1
    for axes, (beta2, (_, _, label)) in zip(maps, _WAVY_STYLES.items(), strict=True):
        heights = walks[beta2].final_heights.clamp(min=lowest_shown).numpy()
        image = axes.pcolormesh(
            np.linspace(0, 1, heights.shape[1] + 1),
            np.arange(heights.shape[0] + 1),
            heights,
            norm=LogNorm(lowest_shown, highest_shown),
            cmap="viridis_r",
        )
        axes.set(title=rf"Where every start ends {label}, $\beta_1$ = {landscapes.USUAL_BETA1:g}", xlabel="start")
        axes.grid(visible=False)
    maps[0].set_yticks(np.arange(len(WAVY_LRS)) + 0.5, [f"{lr:g}" for lr in WAVY_LRS])
    maps[0].set_ylabel("learning rate")
    figure.colorbar(image, ax=list(maps), extend="both", pad=0.015, label="final height above the lowest minimum")
    figure.supxlabel(
        r"Start, learning rate and $\beta_1$ are varied because the paper gives none of them. The function is even: "
        "starts from -1 to 0 mirror these.",
        fontsize=10,
    )
