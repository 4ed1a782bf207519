"""One training step per batch, for every optimizer: eager, or compiled and captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, Optimizer

import adahessian
from adahessian.lab.configs import optimizers as configs
from adahessian.lab.errors import ConfigError
from adahessian.lab.training.optimizers import has_sparse_embeddings

LossFn: TypeAlias = Callable[[nn.Module, Any], Tensor]
Mode: TypeAlias = Literal["captured", "compiled", "mixed", "eager"]


class Step:
    """A function that takes one step for a batch and returns its loss, on the device."""

    def __init__(self, take: Callable[[Any], Tensor], mode: Mode) -> None:
        self._take = take
        self.mode = mode
        """Captured in CUDA graphs, compiled, partly so ("mixed"), or eager."""

    def __call__(self, batch: Any) -> Tensor:
        """Take one step and return the loss."""
        return self._take(batch)


def make_step(
    model: nn.Module, loss_fn: LossFn, optimizer: Optimizer, config: configs.OptimizerConfig, *, compiled: bool
) -> Step:
    """Return the training step of an optimizer.

    Args:
        model: The model, wrapped in DistributedDataParallel if there are several processes.
        loss_fn: ``loss_fn(model, batch)`` returns the mean loss.
        optimizer: The optimizer that ``config`` describes.
        config: Options of curvature and clipping.
        compiled: Compile derivatives and, on a GPU, capture them. DistributedDataParallel reduces gradients in
            ``backward``, and sparse gradients change their size, so these gradients stay eager.

    Raises:
        ConfigError: If the optimizer does not support several processes.
    """
    is_replicated = isinstance(model, DistributedDataParallel)
    if is_replicated and isinstance(config, (configs.Sophia, configs.LBFGS)):
        raise ConfigError(f"{config.title} does not support several processes. Start one without torchrun.")
    can_compile = compiled and not is_replicated and not has_sparse_embeddings(model)
    mode: Mode = "captured" if next(model.parameters()).is_cuda else "compiled"
    if isinstance(config, (configs.AdaHessian, configs.AdaHessianKron)):
        assert isinstance(optimizer, adahessian.AdaHessian)
        dtype = torch.bfloat16 if config.product_dtype == "bfloat16" and compiled else None
        curvature = adahessian.Curvature(
            model, loss_fn, optimizer, batch_fraction=config.batch_fraction, compile=compiled, product_dtype=dtype
        )
        _clip_before_step(optimizer, config.clip_norm)
        if can_compile:
            return Step(adahessian.TrainingStep(curvature), mode)
        return Step(_eager(model, loss_fn, optimizer, curvature), "mixed" if compiled else "eager")
    if isinstance(optimizer, LBFGS):
        return Step(_with_closure(model, loss_fn, optimizer), "eager")
    _clip_before_step(optimizer, config.clip_norm)
    if not can_compile:
        take = _eager(model, loss_fn, optimizer)
    else:
        take = adahessian.TrainingStep(model, loss_fn, optimizer, compile=True)
    if isinstance(config, configs.Sophia):
        take, mode = _with_graph_when_due(model, loss_fn, optimizer, config.curvature_every, take), "mixed"
    return Step(take, mode if can_compile else "eager")


def is_compiled(step: Step) -> bool:
    """Return whether a step is compiled, except for parts that cannot be."""
    return step.mode != "eager"


def _eager(
    model: nn.Module, loss_fn: LossFn, optimizer: Optimizer, curvature: adahessian.Curvature[Any] | None = None
) -> Callable[[Any], Tensor]:
    def take(batch: Any) -> Tensor:
        if curvature is not None:
            curvature.measure(batch)
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return take


def _with_closure(model: nn.Module, loss_fn: LossFn, optimizer: LBFGS) -> Callable[[Any], Tensor]:
    def take(batch: Any) -> Tensor:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            return loss

        first: Any = optimizer.step(closure)
        loss: Tensor = first.detach()
        return loss

    return take


def _with_graph_when_due(
    model: nn.Module, loss_fn: LossFn, optimizer: Optimizer, every: int, take: Callable[[Any], Tensor]
) -> Callable[[Any], Tensor]:
    """Return Sophia's step, which differentiates the gradient's graph every few steps."""
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def take_with_graph(batch: Any) -> Tensor:
        if optimizer.param_groups[0].get("step", 0) % every:
            return take(batch)
        loss = loss_fn(model, batch)
        gradients = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        optimizer.step()
        optimizer.zero_grad()  # the graph refers to the parameters and they to it
        return loss.detach()

    return take_with_graph


def _clip_before_step(optimizer: Optimizer, clip_norm: float | None) -> None:
    if clip_norm is None:
        return

    def clip(of: Optimizer, *_: Any) -> None:
        params = [param for group in of.param_groups for param in group["params"]]
        # PyTorch cannot clip sparse gradients.
        clip_grad_norm_([p for p in params if p.grad is not None and not p.grad.is_sparse], clip_norm)

    optimizer.register_step_pre_hook(clip)
