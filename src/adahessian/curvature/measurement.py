"""The curvature as an object of its own, apart from the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adahessian.curvature.backends import twice_differentiable
from adahessian.curvature.errors import CurvatureError, explained
from adahessian.curvature.graph import check_twice_differentiable
from adahessian.curvature.isolation import untouched
from adahessian.curvature.passes import CurvaturePass, Model

if TYPE_CHECKING:
    from adahessian.optimizer import AdaHessian


class Curvature(CurvaturePass[Model]):
    """Measures the curvature of a loss for an optimizer, in a pass of its own.

    The gradient's path stays as it is. The pass leaves gradients, buffers (batch-norm statistics), train and eval modes
    and random streams as it finds them: with or without it, the same dropout masks and the same data order follow.
    Hooks on parameters do not see it; those on modules do.

    Args:
        model: The model. It may be shared with, or a part of, what computes the gradient.
        loss_fn: ``loss_fn(model, batch)`` returns the scalar loss, a mean over the batch: a sum would make the
            curvature depend on the size of the slice.
        optimizer: The optimizer that uses the curvature and says when it is due.
        batch_fraction: Share of each batch to measure on, above 0 and up to 1: its first examples. Every tensor of the
            batch is cut, a mask over positions too: give such a one to ``loss_fn`` by another way.
        batch_dim: The dimension of the batch's tensors that counts examples.

    Raises:
        TypeError: If the model, the function or the optimizer is none.
        ValueError: If ``batch_fraction`` or ``batch_dim`` is out of its range.

    Example:
        >>> import adahessian
        >>> model = nn.Linear(3, 1)
        >>> optimizer = adahessian.AdaHessian(model.parameters(), update_every=10)
        >>> curvature = Curvature(model, lambda m, batch: m(batch).square().mean(), optimizer, batch_fraction=0.25)
        >>> curvature.measure(torch.ones(8, 3))
        True
        >>> curvature.measure(torch.ones(8, 3))  # the next step has its measurement
        False
    """

    def __init__(
        self,
        model: Model,
        loss_fn: Callable[[Model, Any], Tensor],
        optimizer: AdaHessian,
        *,
        batch_fraction: float = 1.0,
        batch_dim: int = 0,
    ) -> None:
        super().__init__(model, loss_fn, optimizer, batch_fraction=batch_fraction, batch_dim=batch_dim)
        self.loss_fn = loss_fn

    def _measure(self, part: Any) -> None:
        with torch.enable_grad(), untouched(self.model), twice_differentiable(self.model):
            loss = self.loss_fn(self.model, part)
            _check(loss)
            params = self.optimizer.measured_parameters()
            with explained():
                gradients = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
            if all(gradient is None for gradient in gradients):
                raise CurvatureError("the loss depends on none of the optimizer's parameters: is this its model?")
            self.optimizer.measure_gradients(gradients)


def _check(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise CurvatureError(f"loss_fn must return the loss alone, as a tensor, but returned a {type(loss).__name__}")
    if loss.numel() != 1 or loss.is_complex():
        raise CurvatureError(
            f"loss_fn must return a real scalar, but returned a {loss.dtype} tensor of shape {tuple(loss.shape)}: "
            "reduce it with .mean()"
        )
    if not loss.requires_grad:
        raise CurvatureError(
            "the loss has no graph: loss_fn must compute it from the model's parameters, without torch.no_grad(), "
            ".detach() or .item(), and at least one parameter must require a gradient"
        )
    check_twice_differentiable([loss])
