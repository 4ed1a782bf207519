"""One training step of a batch, by any optimizer: as a user would write it, or compiled and captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import adahessian
from adahessian.lab.optimizers import curvature_options, has_sparse_embeddings
from adahessian.lab.settings import Settings

LossFn: TypeAlias = Callable[[nn.Module, Any], Tensor]
Step: TypeAlias = Callable[[Any], Tensor]


def make_step(model: nn.Module, loss_fn: LossFn, optimizer: Optimizer, settings: Settings, *, compiled: bool) -> Step:
    """A function that takes one step for a batch and returns its loss, on the device.

    Args:
        model: What is trained, wrapped for several processes if there are some.
        loss_fn: ``loss_fn(model, batch)`` is the loss.
        optimizer: By which.
        settings: The curvature's and the clipping's settings.
        compiled: Whether derivatives are compiled, and on a GPU replayed as CUDA graphs, where that is possible.
    """
    # Several processes reduce their gradients in backward(), and sparse gradients change their size.
    compiles_step = compiled and not isinstance(model, DistributedDataParallel) and not has_sparse_embeddings(model)
    if isinstance(optimizer, adahessian.AdaHessian):
        curvature = adahessian.Curvature(model, loss_fn, optimizer, **curvature_options(settings, compiled=compiled))
        if compiles_step:
            _clip_before_step(optimizer, settings.clip_norm)
            return adahessian.TrainingStep(curvature)
        return _plain_step(model, loss_fn, optimizer, settings.clip_norm, curvature)
    if compiles_step and next(model.parameters()).is_cuda:
        _clip_before_step(optimizer, settings.clip_norm)
        return adahessian.TrainingStep(model, loss_fn, optimizer, compile=True)
    return _plain_step(model, loss_fn, optimizer, settings.clip_norm)


def is_compiled(step: Step) -> bool:
    """Whether the derivatives of a step are compiled."""
    return isinstance(step, adahessian.TrainingStep)


def _plain_step(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: Optimizer,
    clip_norm: float | None,
    curvature: adahessian.Curvature[Any] | None = None,
) -> Step:
    _clip_before_step(optimizer, clip_norm)

    def step(batch: Any) -> Tensor:
        if curvature is not None:
            curvature.measure(batch)
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _clip_before_step(optimizer: Optimizer, clip_norm: float | None) -> None:
    if clip_norm is None:
        return

    def clip(of: Optimizer, *_: Any) -> None:
        params = [param for group in of.param_groups for param in group["params"]]
        # torch clips no sparse gradients.
        clip_grad_norm_([p for p in params if p.grad is not None and not p.grad.is_sparse], clip_norm)

    optimizer.register_step_pre_hook(clip)
