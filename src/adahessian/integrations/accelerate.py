"""accelerate: the curvature of a model and an optimizer that ``Accelerator.prepare`` has wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from adahessian.curvature.measurement import Curvature

try:
    from accelerate import Accelerator
except ImportError as missing:
    raise ImportError('this needs accelerate: pip install "adahessian[accelerate]"', name="accelerate") from missing


def prepare_curvature(
    accelerator: Accelerator,
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    optimizer: Optimizer,
    *,
    accumulate: bool | None = None,
    **settings: Any,
) -> Curvature[nn.Module]:
    """Make the :class:`adahessian.Curvature` of what ``accelerator.prepare`` has returned.

    Call ``curvature.measure(batch)`` inside ``accelerator.accumulate(model)``, before the gradient. The pass runs the
    model in the precision that accelerate has given it, and its loss is scaled as that of the gradient is. Processes
    are those of the wrapper: ``DistributedDataParallel``, or FSDP2 (``fsdp_version=2``). ``save_state`` and
    ``load_state`` keep the optimizer's state as they keep that of any other.

    Args:
        accelerator: The accelerator that has prepared the model and the optimizer.
        model: The prepared model.
        loss_fn: ``loss_fn(model, batch)`` returns the scalar loss, a mean over the batch.
        optimizer: The prepared optimizer, with an :class:`adahessian.AdaHessian` inside.
        accumulate: Whether the curvature is the mean over all micro-batches of an accumulated gradient, or that of the
            first; None does what ``gradient_accumulation_steps`` of the accelerator asks for.
        settings: Further arguments of :class:`adahessian.Curvature`, such as ``batch_fraction``.

    Returns:
        The curvature.

    Raises:
        TypeError: If the optimizer is no AdaHessian.
        ValueError: If a setting is out of its range, or the wrapper flattens parameters.

    Example:
        >>> import torch, adahessian
        >>> accelerator = Accelerator(cpu=True)
        >>> net = torch.nn.Linear(3, 1)
        >>> model, optimizer = accelerator.prepare(net, adahessian.AdaHessian(net.parameters()))
        >>> curvature = prepare_curvature(accelerator, model, lambda m, x: m(x).square().mean(), optimizer)
        >>> curvature.measure(torch.ones(8, 3))
        True
    """
    if accumulate is None:
        accumulate = accelerator.gradient_accumulation_steps > 1
    # It looks inside of the wrappers itself, that of the optimizer too.
    prepared: Any = optimizer
    return Curvature(model, loss_fn, prepared, scaler=accelerator.scaler, accumulate=accumulate, **settings)
