"""Physics-informed networks (PINNs): Poisson's equation with a known solution, in one and two dimensions."""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.quasirandom import SobolEngine

from adahessian.lab.configs.science import PINNConfig
from adahessian.lab.tasks.task import Env, Task, Tensors

# Terms of the exact solution: an amplitude, and a frequency per dimension.
_SOLUTIONS = {1: ((1.0, (1,)), (0.1, (6,))), 2: ((1.0, (1, 1)), (0.1, (3, 2)))}
# Points per side of the square, and points per axis of the grid of the evaluation.
_BOUNDARY_POINTS, _GRID_POINTS = 64, {1: 2001, 2: 101}


class LaplacianMLP(nn.Module):
    r"""Network with tanh that returns its value, gradient and Laplacian with respect to its inputs.

    All three propagate through the layers together, so a loss of them needs no nested differentiation:

    .. math::
        \nabla \tanh h = (1 - t^2) \nabla h, \quad
        \Delta \tanh h = (1 - t^2) (\Delta h - 2 t |\nabla h|^2), \quad t = \tanh h
    """

    def __init__(self, inputs: int, width: int, depth: int) -> None:
        super().__init__()
        layers = [nn.Linear(*sizes) for sizes in pairwise([inputs, *[width] * depth, 1])]
        self.layers = nn.ModuleList(layers)
        for layer in layers:
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map inputs of shape (N, d) to values (N,), gradients (d, N) and Laplacians (N,)."""
        gradient = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)[:, None].expand(-1, len(x), -1)
        # Rows: the value, d partial derivatives and the Laplacian.
        stacked = torch.cat((x[None], gradient, torch.zeros_like(x)[None]))
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            if number > 0:
                value, gradient, laplacian = stacked[:1].tanh(), stacked[1:-1], stacked[-1:]
                slope = 1 - value.square()
                curved = laplacian - 2 * value * gradient.square().sum(0, keepdim=True)
                stacked = torch.cat((value, slope * gradient, slope * curved))
            products = linear(stacked, layer.weight)
            stacked = torch.cat((products[:1] + layer.bias, products[1:]))
        return stacked[0, :, 0], stacked[1:-1, :, 0], stacked[-1, :, 0]


class PINNTask(Task[Tensors]):
    r"""Solve :math:`-\Delta u = f` on :math:`[-1, 1]^d` with :math:`u = 0` on the boundary.

    The exact solution is :math:`u^*(x) = \sum_k a_k \prod_i \sin(\pi \omega_{ki} x_i)`, which gives :math:`f`. The loss
    is the mean squared residual over the mean of :math:`f^2`, plus the mean squared boundary value over the mean of
    :math:`u^{*2}`. All arithmetic is in float64.
    """

    steps_per_epoch = 1

    def __init__(self, config: PINNConfig, env: Env) -> None:
        self.config, self.env = config, env
        dimensions = config.dimensions
        unit = SobolEngine(dimensions, scramble=True, seed=0).draw(config.points, dtype=torch.float64)
        self._points = env.my_share((2 * unit - 1).to(env.device))
        # Both ends of the interval, or evenly spaced points on the sides of the square.
        ends = torch.tensor([-1.0, 1.0], dtype=torch.float64)
        vertical = torch.cartesian_prod(ends, torch.linspace(-1, 1, _BOUNDARY_POINTS, dtype=torch.float64))
        boundary = ends[:, None] if dimensions == 1 else torch.cat((vertical, vertical.flip(1)))
        self._boundary = boundary.to(env.device)
        axis = torch.linspace(-1, 1, _GRID_POINTS[dimensions], dtype=torch.float64, device=env.device)
        self._grid = torch.cartesian_prod(*[axis] * dimensions).reshape(-1, dimensions)
        self._solution, force = self.exact(self._grid)
        self._force_scale, self._solution_scale = (each.square().mean() for each in (force, self._solution))

    def exact(self, points: Tensor) -> Tensors:
        """Return the exact solution and f at points of shape (N, d)."""
        solution, force = torch.zeros(2, len(points), dtype=points.dtype, device=points.device)
        for amplitude, frequencies in _SOLUTIONS[self.config.dimensions]:
            angles = math.pi * points * points.new_tensor(frequencies)
            term = amplitude * angles.sin().prod(1)
            solution = solution + term
            force = force + math.pi**2 * sum(frequency**2 for frequency in frequencies) * term
        return solution, force

    def build_model(self) -> nn.Module:
        config = self.config
        return LaplacianMLP(config.dimensions, config.width, config.depth).double().to(self.env.device)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Tensors]:
        """Yield all points and f at these, once per epoch."""
        if skip == 0:
            yield self._points, self.exact(self._points)[1]

    def loss(self, model: nn.Module, batch: Tensors) -> Tensor:
        """Return the relative squared residual plus the penalty on the boundary."""
        points, force = batch
        values, _, laplacians = model(torch.cat((points, self._boundary)))
        residual: Tensor = (laplacians[: len(points)] + force).square().mean()
        penalty: Tensor = values[len(points) :].square().mean()
        return residual / self._force_scale + penalty / self._solution_scale

    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        """Return the relative L2 error of the solution on a fine grid."""
        error = model(self._grid)[0] - self._solution
        return {"relative_error": (error.square().mean() / self._solution_scale).sqrt().item()}
