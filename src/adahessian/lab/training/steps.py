"""One training step per batch, for every optimizer: eager, or compiled and captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
Take: TypeAlias = Callable[[Any], Tensor]
Mode: TypeAlias = Literal["captured", "compiled", "mixed", "eager"]  # mixed: parts of the step are eager


@dataclass(frozen=True)
class Step:
    """A function that takes one step for a batch and returns its loss, on the device."""

    take: Take
    mode: Mode

    def __call__(self, batch: Any) -> Tensor:
        """Take one step and return the loss."""
        return self.take(batch)


def make_step(
    model: nn.Module, loss_fn: LossFn, optimizer: Optimizer, config: configs.OptimizerConfig, *, compiled: bool
) -> Step:
    """Return the training step of the optimizer that ``config`` describes.

    ``compiled`` compiles derivatives and, on a GPU, captures them. DistributedDataParallel reduces gradients in
    ``backward``, and sparse gradients change their size, so these gradients stay eager.
    """
    is_replicated, is_lbfgs = isinstance(model, DistributedDataParallel), isinstance(optimizer, LBFGS)
    if is_replicated and isinstance(config, (configs.Sophia, configs.LBFGS)):
        raise ConfigError(f"{config.title} does not support several processes. Start one without torchrun.")
    can_compile = compiled and not (is_replicated or is_lbfgs or has_sparse_embeddings(model))
    mode: Mode = "captured" if next(model.parameters()).is_cuda else "compiled"
    curvature = None
    if isinstance(config, (configs.AdaHessian, configs.AdaHessianKron)):
        assert isinstance(optimizer, adahessian.AdaHessian)
        dtype = torch.bfloat16 if config.product_dtype == "bfloat16" and compiled else None
        curvature = adahessian.Curvature(
            model, loss_fn, optimizer, batch_fraction=config.batch_fraction, compile=compiled, product_dtype=dtype
        )
    if config.clip_norm is not None:
        _clip_before_step(optimizer, config.clip_norm)
    if not can_compile:
        take = _eager(model, loss_fn, optimizer, curvature)
        mode = "mixed" if compiled and curvature is not None else "eager"
    elif curvature is not None:
        take = adahessian.TrainingStep(curvature)
    else:
        take = adahessian.TrainingStep(model, loss_fn, optimizer, compile=True)
    if isinstance(config, configs.Sophia):
        take = _with_graph_when_due(model, loss_fn, optimizer, config.curvature_every, take)
        mode = "mixed" if can_compile else "eager"
    return Step(take, mode)


def _eager(
    model: nn.Module, loss_fn: LossFn, optimizer: Optimizer, curvature: adahessian.Curvature[Any] | None = None
) -> Take:
    def take(batch: Any) -> Tensor:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            return loss

        if curvature is not None:
            curvature.measure(batch)
        if isinstance(optimizer, LBFGS):
            loss: Any = optimizer.step(closure)
        else:
            loss = closure()
            optimizer.step()
        found: Tensor = loss.detach()
        return found

    return take


def _with_graph_when_due(model: nn.Module, loss_fn: LossFn, optimizer: Optimizer, every: int, take: Take) -> Take:
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


def _clip_before_step(optimizer: Optimizer, clip_norm: float) -> None:
    def clip(of: Optimizer, *_: Any) -> None:
        params = [param for group in of.param_groups for param in group["params"]]
        # PyTorch cannot clip sparse gradients.
        clip_grad_norm_([p for p in params if p.grad is not None and not p.grad.is_sparse], clip_norm)

    optimizer.register_step_pre_hook(clip)
