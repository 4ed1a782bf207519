"""Figure 2 of the paper: the loss around trained weights, along the two eigenvectors of largest eigenvalue."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh
from torch import Tensor, nn

from adahessian.hessian.attention import plain_attention
from adahessian.lab.configs import find_preset
from adahessian.lab.errors import LabError
from adahessian.lab.paper_figures.style import styled
from adahessian.lab.results.frames import heading, task_config
from adahessian.lab.results.run_file import read_run
from adahessian.lab.tasks.task import Env, load_task
from adahessian.lab.training.checkpoint import load_checkpoint


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Losses on a grid around a trained weight."""

    weight: str
    eigenvalues: np.ndarray  # the two of largest magnitude
    offsets: np.ndarray  # along each eigenvector, which has length 1
    losses: np.ndarray  # a row per offset along the first eigenvector


def load_trained(weights: Path, data_dir: Path) -> tuple[str, nn.Module, Callable[[], Tensor]]:
    """Return the title of a run's task, its trained model, and the loss of the first training batch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = read_run(Path(f"{weights.absolute().parent}.json"))
    preset = find_preset(result.task)
    config = replace(preset.config(result.optimizer), task=task_config(result.task, result.config["task"]))
    task = load_task(config, Env(data_dir=data_dir, device=device, seed=result.seed))
    # In eval mode, the loss is a function of the weights alone.
    model = task.build_model().eval()
    model.load_state_dict(load_checkpoint(weights, device))
    batch = next(iter(task.batches(0)))
    return heading(preset.name), model, lambda: task.loss(model, batch)


def measure_surface(model: nn.Module, loss: Callable[[], Tensor]) -> Surface:
    """Compute losses along the two leading eigenvectors of a weight's Hessian. The model stays as it is.

    As in the paper, the weight is the last matrix but one. The model is in eval mode.
    """
    matrices = [(name, parameter) for name, parameter in model.named_parameters() if parameter.dim() > 1]
    name, weight = matrices[-2:][0]
    with plain_attention():
        values, vectors = leading_eigenpairs(loss(), weight)
        # The axes end where a parabola of the first curvature has risen by 1.
        reach = math.sqrt(2 / abs(values[0]))
        offsets = np.linspace(-reach, reach, 21)
        losses = losses_around(loss, weight, vectors, offsets)
    return Surface(weight=name, eigenvalues=values, offsets=offsets, losses=losses)


def leading_eigenpairs(loss: Tensor, weight: nn.Parameter) -> tuple[np.ndarray, Tensor]:
    """Return the two eigenvalues of largest magnitude, the larger first, and the eigenvectors, shaped like weights."""
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)

    def product(vector: np.ndarray) -> np.ndarray:
        tangent = torch.as_tensor(vector).to(gradient).view_as(gradient)
        (row,) = torch.autograd.grad(gradient, weight, tangent, retain_graph=True, materialize_grads=True)
        return row.flatten().double().cpu().numpy()

    size = weight.numel()
    start = np.random.default_rng(0).standard_normal(size)
    if not gradient.requires_grad or size < 3 or not product(start).any():
        raise LabError("The weight of figure 2 has no curvature, or fewer than 3 elements. Pass other --weights.")
    try:
        values, vectors = eigsh(LinearOperator((size, size), product, dtype=np.float64), k=2, v0=start, tol=1e-4)
    except ArpackError as error:
        raise LabError(f"The eigenvectors of figure 2 did not converge ({error}). Pass other --weights.") from error
    order = np.argsort(-np.abs(values))
    return values[order], torch.as_tensor(vectors.T[order].copy()).to(gradient).view(2, *weight.shape)


@torch.no_grad()
def losses_around(loss: Callable[[], Tensor], weight: nn.Parameter, vectors: Tensor, offsets: np.ndarray) -> np.ndarray:
    """Return the losses where a weight is moved along two vectors, and move it back."""
    center = weight.clone()

    def loss_at(first: float, second: float) -> float:
        weight.copy_(center + first * vectors[0] + second * vectors[1])
        return loss().item()

    losses = np.array([[loss_at(first, second) for second in offsets] for first in offsets])
    weight.copy_(center)
    return losses


@styled
def draw(weights: Path, data_dir: Path) -> Figure:
    """Draw the loss around the weights of a run."""
    title, model, loss = load_trained(weights, data_dir)
    surface = measure_surface(model, loss)
    first, second = np.meshgrid(surface.offsets, surface.offsets, indexing="ij")
    of_first, of_second = (rf"eigenvector, $\lambda$ = {value:.3g}" for value in surface.eigenvalues)
    figure = Figure(figsize=(7.5, 6), layout="constrained")
    axes: Any = figure.add_subplot(projection="3d", title=f"{title}: {surface.weight}")
    axes.plot_surface(first, second, surface.losses, cmap="viridis", linewidth=0.2, edgecolor="#00000040")
    axes.set(xlabel=f"first {of_first}", ylabel=f"second {of_second}", zlabel="loss")
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.labelpad = 12
    axes.locator_params(nbins=5)
    axes.set_box_aspect(None, zoom=0.9)
    return figure
