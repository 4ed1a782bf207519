"""Gauss-Newton products, which leave out the curvature of the model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vjp

from adahessian.base.batches import map_tensors, tensors_in
from adahessian.base.errors import CurvatureError
from adahessian.base.log import warn_once
from adahessian.hessian.graph import check_loss, check_twice_differentiable, differentiate

_vjp: Any = vjp  # its type depends on has_aux


@dataclass(frozen=True)
class GaussNewton:
    r"""A loss in two parts, for which :class:`adahessian.Curvature` measures Gauss-Newton products.

    .. math::
        G z = J^\top H_L J z, \quad J = \partial f / \partial \theta, \quad H_L = \partial^2 L / \partial f^2

    G is the Hessian of the loss L without the curvature of the outputs f. The product is exact, and G is positive
    semidefinite if L is convex in f. Pass an object of this class to ``Curvature`` as ``loss_fn``, and call it in your
    loop as ``loss_fn(model, batch)``.

    Do not use it for a loss that the model computes itself: a loss that is linear in the outputs, or piecewise linear
    like the absolute error, has G = 0. The loss must not read parameters except through the outputs.

    Args:
        outputs: ``outputs(model, batch)`` returns a tensor or a tuple of tensors.
        loss: ``loss(outputs, batch)`` returns the scalar loss, a mean over the batch rather than a sum.

    Raises:
        TypeError: If ``outputs`` or ``loss`` is not a function of these arguments.

    Example:
        >>> import adahessian
        >>> model = torch.nn.Linear(3, 1)
        >>> loss_fn = GaussNewton(lambda model, batch: model(batch), lambda outputs, batch: outputs.square().mean())
        >>> optimizer = adahessian.AdaHessian(model.parameters())
        >>> adahessian.Curvature(model, loss_fn, optimizer).measure(torch.ones(8, 3))
        True
    """

    outputs: Callable[[Any, Any], Any]
    loss: Callable[[Any, Any], Tensor]

    def __post_init__(self) -> None:
        if not (callable(self.outputs) and callable(self.loss)) or isinstance(self.loss, nn.modules.loss._Loss):
            found = f"{type(self.outputs).__name__} and {type(self.loss).__name__}"
            raise TypeError(f"outputs and loss are {found}. Pass functions of (model, batch) and of (outputs, batch).")

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute the loss of a batch."""
        return self.loss(self.outputs(model, batch), batch)


def linearize(
    loss_fn: GaussNewton, model: nn.Module, batch: Any, params: Sequence[Tensor], *, check_graph: bool
) -> tuple[Tensor, Sequence[Tensor | None], Callable[..., Sequence[Tensor | None]]]:
    r"""Return the loss, its gradients with a graph, and the function that ``products_of`` multiplies by.

    The gradients :math:`J^\top u` at :math:`u = \partial L / \partial f` are linear in u, so double backward with
    respect to u computes :math:`J z = \partial (z^\top J^\top u) / \partial u`.
    """
    outputs = loss_fn.outputs(model, batch)
    parts = _differentiable(outputs)
    if not any(part.requires_grad for part in parts):
        raise CurvatureError(
            f"outputs returned a {type(outputs).__name__} that does not depend on parameters. Return a tensor or a "
            "tuple of tensors, computed without torch.no_grad(), torch.inference_mode() or .detach()."
        )
    leaves = [part.detach().requires_grad_() for part in parts]
    loss = loss_fn.loss(_replaced(outputs, leaves), batch)
    check_loss(loss, "loss")
    if check_graph:
        check_twice_differentiable([loss], of_loss=True)
        check_twice_differentiable(parts)
    found = differentiate([loss], [*leaves, *params], [torch.ones_like(loss)], create_graph=True)
    if any(each is not None for each in found[len(leaves) :]):
        raise CurvatureError(
            "loss reads parameters of the model, whose curvature would be missing. Return everything that depends on "
            "parameters from outputs, as a tuple."
        )
    ends = [(y, leaf, slope) for y, leaf, slope in zip(parts, leaves, found, strict=False) if slope is not None]
    parts, leaves, slopes = ([end[i] for end in ends] for i in range(3))
    if not any(slope.requires_grad for slope in slopes):
        warn_once("loss is linear in outputs, so its curvature is zero. Return predictions from outputs, not the loss.")
    u = [slope.detach().requires_grad_() for slope in slopes]

    def multiply(gradients: Any, params: Any, z: Any, *, retain_graph: bool) -> Sequence[Tensor | None]:
        jz = differentiate(gradients, u, z, retain_graph=True)
        hjz = differentiate(slopes, leaves, jz, retain_graph=True)
        return differentiate(parts, params, hjz, retain_graph=retain_graph)

    return loss, differentiate(parts, params, u, create_graph=True), multiply


def functional_product(loss_fn: GaussNewton, outputs_at: Callable[[Any], Any], params: Any, z: Any, batch: Any) -> Any:
    """Return the gradients, G z, and the loss with the second result of ``outputs_at``, by ``torch.func`` only.

    One pass through the model is enough, so dropout masks are drawn once.
    """

    def parts_at(params: Any) -> tuple[tuple[Tensor, ...], tuple[Any, Any]]:
        outputs, aux = outputs_at(params)
        return tuple(_differentiable(outputs)), (outputs, aux)

    def loss_at(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        loss = loss_fn.loss(_replaced(outputs, parts), batch)
        return loss.squeeze(), loss

    parts, by_params, (outputs, aux) = _vjp(parts_at, params, has_aux=True)
    slopes, by_parts, loss = _vjp(grad(loss_at, has_aux=True), parts, has_aux=True)
    (gradients,), by_slopes = _vjp(by_params, slopes)
    (jz,) = by_slopes((z,))
    (hjz,) = by_parts(jz)  # H_L is symmetric
    (product,) = by_params(hjz)
    return gradients, product, (loss, aux)


def _differentiable(outputs: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(outputs) if tensor.is_floating_point() or tensor.is_complex()]


def _replaced(outputs: Any, parts: Sequence[Tensor]) -> Any:
    """Return outputs of the same structure, with other tensors in place of the differentiable ones."""
    following = iter(parts)
    return map_tensors(lambda tensor: next(following) if _differentiable(tensor) else tensor, outputs)
