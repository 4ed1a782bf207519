"""The directions in which a loss curves most: leading eigenvectors of its Hessian with respect to some parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_ITERATIONS = 500


@dataclass(frozen=True, kw_only=True)
class Eigenpair:
    """An eigenvalue, and its eigenvector of length 1."""

    value: float
    vector: Tensor
    residual: float
    r""":math:`\|H v - \lambda v\| / |\lambda|`: how far the iteration was from its end when it stopped."""


def hessian_product(loss: Tensor, parameters: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """Exact products of the Hessian with vectors, by double backward.

    Args:
        loss: A scalar with its graph.
        parameters: The Hessian's rows and columns: all else is held.

    Returns:
        From a vector over all elements of the parameters to the product.
    """
    gradient = flat(torch.autograd.grad(loss, parameters, create_graph=True))

    def product(vector: Tensor) -> Tensor:
        if not gradient.requires_grad:
            # A loss that is linear in these parameters.
            return torch.zeros_like(vector)
        rows = torch.autograd.grad(gradient @ vector, parameters, retain_graph=True, materialize_grads=True)
        return flat(rows).detach()

    return product


def leading_eigenpairs(
    product: Callable[[Tensor], Tensor],
    like: Tensor,
    *,
    count: int = 2,
    tolerance: float = 1e-3,
    iterations: int = _MOST_ITERATIONS,
    generator: torch.Generator | None = None,
) -> list[Eigenpair]:
    """The eigenpairs of largest magnitude, by power iteration; each one's predecessors are projected out.

    Args:
        product: Multiplies the matrix with a vector.
        like: A vector of the same length, dtype and device.
        count: How many.
        tolerance: The residual that is small enough.
        iterations: Products for each at most.
        generator: Draws the first vectors.
    """
    found: list[Eigenpair] = []
    for _ in range(count):
        start = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)

        def deflated(vector: Tensor) -> Tensor:
            return _without(product(vector), found)

        pair = _iterate(deflated, _without(start, found), 0.0, tolerance, iterations)
        if pair.residual > tolerance:
            # Two of about the same magnitude and opposite signs hold each other up: a shift parts them.
            radius = deflated(pair.vector).norm().item()
            shifted = [_iterate(deflated, pair.vector, by, tolerance, iterations) for by in (radius, -radius)]
            pair = max(shifted, key=lambda of_shift: abs(of_shift.value))
        found.append(pair)
    return found


def _iterate(
    product: Callable[[Tensor], Tensor], start: Tensor, shift: float, tolerance: float, iterations: int
) -> Eigenpair:
    """The eigenpair of the matrix whose eigenvalue plus ``shift`` is largest in magnitude."""
    vector = _unit(start)
    for _ in range(iterations):
        image = product(vector)
        value = (vector @ image).item()
        residual = (image - value * vector).norm().item()
        if image.norm() == 0 or residual <= tolerance * abs(value):
            break
        vector = _unit(image + shift * vector)
    return Eigenpair(value=value, vector=vector, residual=residual / abs(value) if value else 0.0)


def _without(vector: Tensor, found: Sequence[Eigenpair]) -> Tensor:
    for pair in found:
        vector = vector - (pair.vector @ vector) * pair.vector
    return vector


def _unit(vector: Tensor) -> Tensor:
    return vector.div(vector.norm())


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one vector, whatever the order of their memory."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
