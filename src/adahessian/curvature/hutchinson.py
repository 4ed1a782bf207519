"""Hutchinson's estimate of the Hessian diagonal.

    diag(H) = E[z * (H z)],    z Rademacher,    H z = d(g . z) / d theta

With a diagonal Hessian one probe is exact, since z * z = 1. Otherwise a probe's error at element i has the variance
sum_{j != i} H_ij^2, and the mean over probes divides it by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adahessian.curvature.errors import explained
from adahessian.curvature.isolation import hooks_silenced


def hessian_vector_product(
    gradients: Sequence[Tensor], parameters: Sequence[Tensor], vector: Sequence[Tensor], *, retain_graph: bool
) -> tuple[Tensor | None, ...]:
    """``H z`` by differentiating ``g . z``; None for a parameter on which no gradient depends.

    Raises:
        CurvatureError: If an operation of the graph has no second derivative.
    """
    with explained(), hooks_silenced(parameters):
        return torch.autograd.grad(gradients, parameters, vector, retain_graph=retain_graph, allow_unused=True)


def hessian_diagonal(
    gradients: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    draw: Callable[[int], Sequence[Tensor]],
    num_probes: int,
) -> list[Tensor | None]:
    """The mean of ``z * (H z)`` over the probes ``draw(0), ..., draw(num_probes - 1)``, signed, at least in float32.

    Gradients carry their graph. A gradient that carries none is a constant: the loss is linear in that parameter, whose
    curvature is 0. A parameter without a gradient took no part, and gets None.
    The graph is freed with the last product.

    Raises:
        CurvatureError: If an operation of the graph has no second derivative.
        RuntimeError: If a gradient is sparse.
    """
    for gradient in gradients:
        refuse_sparse(gradient)
    curved = [i for i, gradient in enumerate(gradients) if gradient is not None and gradient.requires_grad]
    outputs = [gradient for gradient in gradients if gradient is not None and gradient.requires_grad]
    inputs = [parameters[i] for i in curved]
    sums: dict[int, Tensor] = {}
    for probe in range(num_probes if curved else 0):
        signs = draw(probe)
        products = hessian_vector_product(
            outputs, inputs, [signs[i] for i in curved], retain_graph=probe + 1 < num_probes
        )
        found = {i: product for i, product in zip(curved, products, strict=True) if product is not None}
        if not found:
            continue
        # Lists at a time: on a GPU each launch counts.
        terms = torch._foreach_mul(
            [as_reals(product.to(accumulation_dtype(product.dtype))) for product in found.values()],
            [as_reals(signs[i]) for i in found],
        )
        new = dict(zip(found, terms, strict=True))
        if known := [i for i in new if i in sums]:
            torch._foreach_add_([sums[i] for i in known], [new[i] for i in known])
        sums = new | sums
    if num_probes > 1 and sums:
        torch._foreach_div_(list(sums.values()), num_probes)
    return [
        None if gradient is None else _as_before(sums[i], parameter) if i in sums else _zeros(parameter)
        for i, (gradient, parameter) in enumerate(zip(gradients, parameters, strict=True))
    ]


def _as_before(reals: Tensor, parameter: Tensor) -> Tensor:
    return torch.complex(*reals) if parameter.is_complex() else reals


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=accumulation_dtype(parameter.dtype))


def refuse_sparse(gradient: Tensor | None) -> None:
    """Name what to do about a sparse gradient.

    Raises:
        RuntimeError: If it is one.
    """
    if gradient is not None and gradient.is_sparse:
        raise RuntimeError(
            "AdaHessian does not support sparse gradients: give the embedding sparse=False, or train it by Adagrad, "
            "with the rest by AdaHessian: optimizer = adahessian.DenseAndSparse(model)"
        )


def as_reals(tensor: Tensor) -> Tensor:
    """A complex tensor as two real ones, stacked in front; a real tensor as it is. Always a view."""
    return torch.view_as_real(tensor).movedim(-1, 0) if tensor.is_complex() else tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that averages are kept in: never narrower than float32, whatever the parameter is."""
    return torch.promote_types(dtype, torch.float32)
