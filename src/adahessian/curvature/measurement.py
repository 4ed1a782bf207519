"""The curvature as an object of its own, apart from the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from adahessian.curvature.batches import slice_batch
from adahessian.curvature.errors import CurvatureError
from adahessian.curvature.graph import check_twice_differentiable
from adahessian.curvature.isolation import untouched

if TYPE_CHECKING:
    from adahessian.optimizer import AdaHessian

Model = TypeVar("Model", bound=nn.Module)


class Curvature(Generic[Model]):
    """Measures the curvature of a loss for an optimizer, in a pass of its own.

    The gradient's path stays as it is. The pass leaves gradients, buffers (batch-norm statistics), train and eval modes
    and random streams as it finds them: with or without it, the same dropout masks and the same data order follow.

    Args:
        model: The model. It may be shared with, or a part of, what computes the gradient.
        loss_fn: ``loss_fn(model, batch)`` returns the scalar loss, a mean over the batch: a sum would make the
            curvature depend on the size of the slice.
        optimizer: The optimizer that uses the curvature and says when it is due.
        batch_fraction: Share of each batch to measure on, above 0 and up to 1: its first examples.
        batch_dim: The dimension of the batch's tensors that counts examples.

    Raises:
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
        if not 0 < batch_fraction <= 1:
            raise ValueError(f"Invalid batch_fraction: {batch_fraction!r}. It must be above 0 and at most 1.")
        if batch_dim < 0:
            raise ValueError(f"Invalid batch_dim: {batch_dim!r}. It must be 0 or more.")
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.batch_fraction = batch_fraction
        self.batch_dim = batch_dim

    def measure(self, batch: Any) -> bool:
        """Measure the curvature on a slice of the batch, if a measurement is due.

        Call it before ``optimizer.step()``, which uses the measurement.

        Args:
            batch: What ``loss_fn`` takes: tensors, or tuples, lists and dicts of them.

        Returns:
            Whether it measured.

        Raises:
            CurvatureError: If the loss is not a scalar or depends on no parameter, or if an operation cannot be
                differentiated twice. Nothing has changed then.
            ValueError: If the batch cannot be sliced.
        """
        if not self.optimizer.curvature_due:
            return False
        part = slice_batch(batch, self.batch_fraction, self.batch_dim)
        # Fused attention has no second derivative; the math kernel has.
        with torch.enable_grad(), untouched(self.model), sdpa_kernel(SDPBackend.MATH):
            loss = self.loss_fn(self.model, part)
            _check(loss)
            params = self.optimizer.measured_parameters()
            gradients = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
            if all(gradient is None for gradient in gradients):
                raise CurvatureError("the loss depends on none of the optimizer's parameters: is this its model?")
            self.optimizer.measure_gradients(gradients)
        return True


def _check(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise CurvatureError(f"loss_fn must return a real scalar, but returned {found}: reduce it with .mean()")
    if not loss.requires_grad:
        raise CurvatureError(
            "the loss has no graph: loss_fn must compute it from the model's parameters, without torch.no_grad(), "
            ".detach() or .item(), and at least one parameter must require a gradient"
        )
    check_twice_differentiable([loss])
