"""One training step per batch, for every optimizer: eager, or compiled and captured."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, Optimizer

import adahessian
from adahessian.base.log import logger, warn_once
from adahessian.lab.configs import optimizers as configs
from adahessian.lab.errors import ConfigError
from adahessian.lab.training.optimizers import has_sparse_embeddings

LossFn: TypeAlias = Callable[[nn.Module, Any], Tensor]
Take: TypeAlias = Callable[[Any], Tensor]  # takes one step for a batch and returns its loss, on the device
Mode: TypeAlias = Literal["captured", "compiled", "mixed", "eager"]  # mixed: parts of the step are eager


@contextmanager
def fallbacks() -> Iterator[list[str]]:
    """Collect the library's messages about steps that are not compiled or not captured, although they should be."""
    found: list[str] = []

    def collect(record: logging.LogRecord) -> bool:
        if re.search("not (compiled|captured)|neither compiled nor captured", record.getMessage()):
            found.append(record.getMessage())
        return True

    warn_once.cache_clear()  # earlier runs of this process may have logged the same
    logger.addFilter(collect)
    try:
        yield found
    finally:
        logger.removeFilter(collect)


def make_step(
    model: nn.Module, loss_fn: LossFn, optimizer: Optimizer, config: configs.OptimizerConfig, *, compiled: bool
) -> tuple[Take, Mode]:
    """Return the training step of the optimizer that ``config`` describes, and how it is taken.

    ``compiled`` compiles derivatives and, on a GPU, captures them. DistributedDataParallel reduces gradients in
    ``backward``, and sparse gradients change their size, so these gradients stay eager.
    """
    is_replicated = isinstance(model, DistributedDataParallel)
    if is_replicated and isinstance(config, (configs.Sophia, configs.LBFGS)):
        raise ConfigError(f"{config.title} does not support several processes. Start one without torchrun.")
    can_compile = compiled and not (is_replicated or isinstance(config, configs.LBFGS) or has_sparse_embeddings(model))
    mode: Mode = "captured" if next(model.parameters()).is_cuda else "compiled"
    curvature = None
    if isinstance(config, (configs.AdaHessian, configs.AdaHessianKron)):
        assert isinstance(optimizer, adahessian.AdaHessian)
        dtype = torch.bfloat16 if config.product_dtype == "bfloat16" and compiled else None
        options: Any = {"batch_fraction": config.batch_fraction, "product_dtype": dtype}
        is_default = not compiled and not next(model.parameters()).is_cuda  # for the log
        curvature = adahessian.Curvature(model, loss_fn, optimizer, compile=None if is_default else compiled, **options)
    if config.clip_norm is not None:
        optimizer.register_step_pre_hook(partial(_clip, clip_norm=config.clip_norm))
    if not can_compile:
        take: Take = partial(_take_eagerly, model, loss_fn, optimizer, curvature)
        mode = "mixed" if compiled and curvature is not None else "eager"
    elif curvature is not None:
        take = adahessian.TrainingStep(curvature)
    else:
        take = adahessian.TrainingStep(model, loss_fn, optimizer, compile=True)
    if isinstance(config, configs.Sophia):
        take = partial(_take_with_graph_when_due, model, loss_fn, optimizer, config.curvature_every, take)
        mode = "mixed" if can_compile else "eager"
    return take, mode


def _take_eagerly(
    model: nn.Module, loss_fn: LossFn, optimizer: Optimizer, curvature: adahessian.Curvature[Any] | None, batch: Any
) -> Tensor:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        return loss

    if curvature is not None:
        curvature.measure(batch)
    if isinstance(optimizer, LBFGS):
        loss: Tensor = optimizer.step(closure)
    else:
        loss = closure()
        optimizer.step()
    return loss.detach()


def _take_with_graph_when_due(
    model: nn.Module, loss_fn: LossFn, optimizer: Optimizer, every: int, take: Take, batch: Any
) -> Tensor:
    """Take Sophia's step, which differentiates the gradient's graph every few steps."""
    if optimizer.param_groups[0].get("step", 0) % every:
        return take(batch)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    loss = loss_fn(model, batch)
    gradients = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    optimizer.step()
    optimizer.zero_grad()  # the graph and the parameters refer to each other
    return loss.detach()


def _clip(optimizer: Optimizer, *_: Any, clip_norm: float) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # PyTorch cannot clip sparse gradients.
    clip_grad_norm_([p for p in params if p.grad is not None and not p.grad.is_sparse], clip_norm)
