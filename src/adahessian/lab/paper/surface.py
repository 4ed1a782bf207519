"""Figure 2 of the paper: the loss around trained weights, along the two directions in which a block curves most."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor, nn

from adahessian.hessian.attention import plain_attention
from adahessian.lab.paper.eigenvectors import flat, hessian_product, leading_eigenpairs
from adahessian.lab.plots import DPI
from adahessian.lab.report.themes import style

POINTS = 21
# How far to go: to where a parabola of the first curvature has risen by so much.
RISE = 1.0
# And where nothing curves, as far as this share of the length of the block's weights.
_FLAT_REACH = 0.5


class UnknownBlockError(Exception):
    """A block that a model does not have."""


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Losses on a grid around trained weights."""

    block: str
    parameters: int
    eigenvalues: tuple[float, float]
    residuals: tuple[float, float]
    offsets: list[float]
    """Positions along either direction."""

    losses: list[list[float]]
    """Row by row along the first direction, column by column along the second."""


def measure_surface(model: nn.Module, loss: Callable[[], Tensor], block: str | None, *, seed: int = 0) -> Surface:
    """Find the two directions, and the losses along them.

    Args:
        model: With trained weights, which are the same afterwards; in eval mode, so that the loss is a function.
        loss: The loss of one batch.
        block: Name of a parameter, or of a module; by default the last weights but one, as in the paper.
        seed: Of the vectors that the search begins with.

    Raises:
        UnknownBlockError: If the model has no such block.
    """
    name, parameters = block_of(model, block)
    with plain_attention():
        product = hessian_product(loss(), parameters)
        centre = flat(parameters).detach()
        first, second = leading_eigenpairs(product, centre, generator=torch.Generator().manual_seed(seed))
        steepest = abs(first.value)
        reach = math.sqrt(2 * RISE / steepest) if steepest > 0 else _FLAT_REACH * centre.norm().item()
        offsets = np.linspace(-reach, reach, POINTS).tolist()
        losses = losses_around(loss, parameters, (first.vector, second.vector), offsets)
    return Surface(
        block=name,
        parameters=centre.numel(),
        eigenvalues=(first.value, second.value),
        residuals=(first.residual, second.residual),
        offsets=offsets,
        losses=losses,
    )


def block_of(model: nn.Module, block: str | None) -> tuple[str, list[nn.Parameter]]:
    """The parameters of a block, and its name."""
    named = dict(model.named_parameters())
    if block is None:
        weights = [name for name, parameter in named.items() if parameter.dim() > 1] or list(named)
        block = weights[-2:][0]
    chosen = [parameter for name, parameter in named.items() if name == block or name.startswith(f"{block}.")]
    if not chosen:
        raise UnknownBlockError(f"there is no block {block}; there are {', '.join(named)}, and what these begin with")
    return block, chosen


def losses_around(
    loss: Callable[[], Tensor],
    parameters: Sequence[nn.Parameter],
    directions: tuple[Tensor, Tensor],
    offsets: Sequence[float],
) -> list[list[float]]:
    """Losses where parameters are moved along two directions, and then back to where they were."""
    centre = flat(parameters).detach()
    first, second = directions
    losses = []
    try:
        with torch.no_grad():
            for along in offsets:
                row = []
                for across in offsets:
                    _set(parameters, centre + along * first + across * second)
                    row.append(loss().item())
                losses.append(row)
    finally:
        with torch.no_grad():
            _set(parameters, centre)
    return losses


def _set(parameters: Sequence[nn.Parameter], values: Tensor) -> None:
    for parameter, part in zip(parameters, values.split([p.numel() for p in parameters]), strict=True):
        parameter.copy_(part.view(parameter.shape))


def plot_surface(surface: Surface, title: str, path: Path) -> None:
    """Draw the surface in perspective and from above."""
    losses = np.array(surface.losses)
    first, second = np.meshgrid(surface.offsets, surface.offsets, indexing="ij")
    labels: dict[str, Any] = {
        "xlabel": f"along the first, $\\lambda$ = {surface.eigenvalues[0]:.3g}",
        "ylabel": f"along the second, $\\lambda$ = {surface.eigenvalues[1]:.3g}",
    }
    with matplotlib.rc_context(style("light")):
        figure = Figure(figsize=(11.5, 5.2), layout="constrained")
        perspective: Any = figure.add_subplot(1, 2, 1, projection="3d")
        perspective.plot_surface(first, second, losses, cmap="viridis", linewidth=0.2, edgecolor="#00000040")
        perspective.set_xlabel(labels["xlabel"], labelpad=10)
        perspective.set_ylabel(labels["ylabel"], labelpad=10)
        perspective.set_zlabel("loss", labelpad=10)
        perspective.tick_params(labelsize=8)
        perspective.set_box_aspect(None, zoom=0.85)
        above = figure.add_subplot(1, 2, 2)
        # A loss falls by orders of magnitude: evenly spaced levels would leave out the valley.
        scale: dict[str, Any] = {"levels": 24}
        if losses.min() > 0:
            scale = {"levels": np.geomspace(losses.min(), losses.max() * 1.001, 24), "norm": LogNorm()}
        contours = above.contourf(first, second, losses, cmap="viridis", **scale)
        above.contour(first, second, losses, colors="white", linewidths=0.4, alpha=0.6, **scale)
        above.plot(0, 0, "o", color="white", markeredgecolor="black", markersize=8, label="trained weights")
        above.set(**labels)
        above.set_aspect("equal")
        above.grid(visible=False)
        above.legend(loc="upper right", frameon=True, framealpha=0.9)
        figure.colorbar(contours, ax=above, label="loss", format="%.2g")
        figure.suptitle(title, fontsize=11, fontweight="bold")
        figure.savefig(path, dpi=DPI)
