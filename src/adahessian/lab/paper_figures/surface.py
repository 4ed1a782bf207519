"""Figure 2 of the paper: the loss around trained weights, along the two eigenvectors of largest eigenvalue."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh
from torch import Tensor, nn

from adahessian.hessian.attention import plain_attention
from adahessian.lab.configs import find_preset
from adahessian.lab.errors import LabError
from adahessian.lab.paper_figures.style import STYLE
from adahessian.lab.results.run_file import read_run
from adahessian.lab.tasks.task import Env, load_task
from adahessian.lab.training.checkpoint import load_checkpoint


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Losses on a grid around trained weights."""

    block: str
    eigenvalues: np.ndarray  # the two of largest magnitude
    offsets: np.ndarray  # along each eigenvector, which has length 1
    losses: np.ndarray  # a row per offset along the first eigenvector


def load_trained(weights: Path, data_dir: Path) -> tuple[str, nn.Module, Callable[[], Tensor]]:
    """Return the title of a run's task, its trained model, and the loss of the first training batch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = read_run(Path(f"{weights.absolute().parent}.json"))
    preset = find_preset(result.task)
    config = preset.config(result.optimizer)
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in result.config["task"].items()}
    config = replace(config, task=replace(config.task, **options))
    task = load_task(config, Env(data_dir=data_dir, device=device, seed=result.seed))
    # In eval mode, the loss is a function of the weights alone.
    model = task.build_model().eval()
    model.load_state_dict(load_checkpoint(weights, device))
    batch = next(iter(task.batches(0)))
    return preset.title, model, lambda: task.loss(model, batch)


def measure_surface(model: nn.Module, loss: Callable[[], Tensor], block: str | None = None) -> Surface:
    """Compute the losses along the two leading eigenvectors of a block's Hessian. The weights stay as they are.

    The model is in eval mode. A block is a parameter or a module. None takes the last weight matrix but one, as in the
    paper.
    """
    name, parameters = find_block(model, block)
    with plain_attention():
        values, vectors = leading_eigenpairs(loss(), parameters)
        # The axes end where a parabola of the first curvature has risen by 1.
        reach = math.sqrt(2 / abs(values[0]))
        offsets = np.linspace(-reach, reach, 21)
        losses = losses_around(loss, parameters, vectors, offsets)
    return Surface(block=name, eigenvalues=values, offsets=offsets, losses=losses)


def find_block(model: nn.Module, block: str | None) -> tuple[str, list[nn.Parameter]]:
    """Return the name and the parameters of a block."""
    named = dict(model.named_parameters())
    if block is None:
        matrices = [name for name, parameter in named.items() if parameter.dim() > 1] or list(named)
        block = matrices[-2:][0]
    chosen = [parameter for name, parameter in named.items() if name == block or name.startswith(f"{block}.")]
    if not chosen:
        raise LabError(f"--block {block} does not exist. Pass one of {', '.join(named)}, or the beginning of one.")
    return block, chosen


def leading_eigenpairs(loss: Tensor, parameters: Sequence[nn.Parameter]) -> tuple[np.ndarray, Tensor]:
    """Return the two eigenvalues of largest magnitude, the larger one first, and the eigenvectors as rows.

    Hessian-vector products are exact, by double backward.
    """
    gradient = _flat(torch.autograd.grad(loss, parameters, create_graph=True))

    def product(vector: np.ndarray) -> np.ndarray:
        tangent = torch.as_tensor(vector.reshape(-1)).to(gradient)
        rows = torch.autograd.grad(gradient @ tangent, parameters, retain_graph=True, materialize_grads=True)
        return _flat(rows).double().cpu().numpy()

    size = len(gradient)
    start = np.random.default_rng(0).standard_normal(size)
    if not gradient.requires_grad or size < 3 or not product(start).any():
        raise LabError("--block has no curvature, or fewer than 3 parameters. Pass another block.")
    try:
        values, vectors = eigsh(LinearOperator((size, size), product, dtype=np.float64), k=2, v0=start, tol=1e-4)
    except ArpackError as error:
        raise LabError(f"The eigenvectors of --block did not converge ({error}). Pass another block.") from error
    order = np.argsort(-np.abs(values))
    return values[order], torch.as_tensor(vectors.T[order].copy()).to(gradient)


def losses_around(
    loss: Callable[[], Tensor], parameters: Sequence[nn.Parameter], vectors: Tensor, offsets: np.ndarray
) -> np.ndarray:
    """Return the losses where parameters are moved along two vectors, and move them back."""
    centers = [parameter.detach().clone() for parameter in parameters]

    def loss_at(first: float, second: float) -> float:
        shifts = (first * vectors[0] + second * vectors[1]).split([center.numel() for center in centers])
        for parameter, center, shift in zip(parameters, centers, shifts, strict=True):
            parameter.copy_(center + shift.view(center.shape))
        return loss().item()

    with torch.no_grad():
        losses = np.array([[loss_at(first, second) for second in offsets] for first in offsets])
        loss_at(0, 0)
    return losses


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def draw(surface: Surface, title: str) -> Figure:
    """Draw the surface in perspective and from above."""
    losses = surface.losses
    first, second = np.meshgrid(surface.offsets, surface.offsets, indexing="ij")
    of_first, of_second = (rf"eigenvector, $\lambda$ = {value:.3g}" for value in surface.eigenvalues)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.5, 5.2), layout="constrained")
        perspective: Any = figure.add_subplot(1, 2, 1, projection="3d")
        perspective.plot_surface(first, second, losses, cmap="viridis", linewidth=0.2, edgecolor="#00000040")
        perspective.set_xlabel(f"first {of_first}", labelpad=10)
        perspective.set_ylabel(f"second {of_second}", labelpad=10)
        perspective.set_zlabel("loss", labelpad=10)
        perspective.tick_params(labelsize=8)
        perspective.locator_params(nbins=5)
        perspective.set_box_aspect(None, zoom=0.85)
        above = figure.add_subplot(1, 2, 2)
        scale: dict[str, Any] = {"levels": 24}
        # Losses span orders of magnitude, so evenly spaced levels would leave the valley empty.
        if losses.min() > 0:
            scale = {"levels": np.geomspace(losses.min(), losses.max() * 1.001, 24), "norm": LogNorm()}
        contours = above.contourf(first, second, losses, cmap="viridis", **scale)
        above.contour(first, second, losses, colors="white", linewidths=0.4, alpha=0.6, **scale)
        above.plot(0, 0, "o", color="white", markeredgecolor="black", markersize=8, label="trained weights")
        above.set(xlabel=f"first {of_first}", ylabel=f"second {of_second}", aspect="equal")
        above.grid(visible=False)
        above.legend(loc="upper right", frameon=True, framealpha=0.9)
        figure.colorbar(contours, ax=above, label="loss", format="%.2g")
        figure.suptitle(f"{title}: {surface.block}", fontsize=11, fontweight="bold")
    return figure
