"""accelerate: a curvature pass for a model and an optimizer that ``Accelerator.prepare`` has wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from adahessian.curvature import Curvature

try:
    from accelerate import Accelerator
except ImportError as missing:
    message = 'accelerate is not installed. Run: pip install "adahessian[accelerate]".'
    raise ImportError(message, name="accelerate") from missing


def prepare_curvature(
    accelerator: Accelerator,
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    optimizer: Optimizer,
    **curvature_options: Any,
) -> Curvature[nn.Module]:
    """Create a :class:`adahessian.Curvature` for a prepared model and optimizer.

    Call ``curvature.measure(batch)`` before the gradient, inside ``accelerator.accumulate(model)`` if gradients are
    accumulated. Measurements use the accelerator's precision, scaler and processes (DDP, or FSDP2 with
    ``fsdp_version=2``). ``save_state`` and ``load_state`` include the optimizer's curvature.

    Args:
        accelerator: The accelerator that prepared the model and the optimizer.
        model: The prepared model.
        loss_fn: ``loss_fn(model, batch)`` returns the scalar loss, a mean over the batch.
        optimizer: The prepared :class:`adahessian.AdaHessian`.
        curvature_options: Other arguments of :class:`adahessian.Curvature`, whose errors apply here too.

    Example:
        >>> import torch, adahessian
        >>> accelerator, net = Accelerator(cpu=True), nn.Linear(3, 1)
        >>> model, optimizer = accelerator.prepare(net, adahessian.AdaHessian(net.parameters()))
        >>> curvature = prepare_curvature(accelerator, model, lambda m, x: m(x).square().mean(), optimizer)
        >>> curvature.measure(torch.ones(8, 3))
        True
    """
    # Curvature finds the AdaHessian inside the prepared optimizer.
    return Curvature(model, loss_fn, optimizer, scaler=accelerator.scaler, **curvature_options)  # type: ignore[arg-type]
