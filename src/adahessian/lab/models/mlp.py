"""Multilayer perceptrons: a plain one, and one with derivatives with respect to its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers between the widths of inputs, hidden layers and outputs, with ReLU in between."""
    layers = [layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


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
