"""One training step of a batch, by any optimizer: as a user would write it, or compiled and captured."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import adahessian
from adahessian.captured import CannotCaptureError, Graph
from adahessian.curvature.batches import map_tensors, tensors_of
from adahessian.curvature.kinds import Kinds
from adahessian.lab.optimizers import has_sparse_embeddings
from adahessian.lab.settings import Settings
from adahessian.messages import say

LossFn: TypeAlias = Callable[[nn.Module, Any], Tensor]
Step: TypeAlias = Callable[[Any], Tensor]
Derivatives: TypeAlias = tuple[Tensor, list[Tensor | None]]


def make_step(model: nn.Module, loss_fn: LossFn, optimizer: Optimizer, settings: Settings, *, compiled: bool) -> Step:
    """A function that takes one step for a batch and returns its loss, on the device.

    Args:
        model: What is trained, wrapped for several processes if there are some.
        loss_fn: ``loss_fn(model, batch)`` is the loss.
        optimizer: By which.
        settings: The curvature's and the clipping's settings.
        compiled: Whether derivatives are compiled, and on a GPU replayed as CUDA graphs, where that is possible.
    """
    if isinstance(optimizer, adahessian.AdaHessian | adahessian.DenseAndSparse):
        curvature = adahessian.Curvature(
            model,
            loss_fn,
            optimizer,
            batch_fraction=settings.batch_fraction,
            compile=compiled,
            tangent_dtype=torch.bfloat16 if settings.tangents == "bfloat16" and compiled else None,
        )
        if compiled and isinstance(optimizer, adahessian.AdaHessian) and curvature.ranks is None:
            _clip_before_step(optimizer, settings.clip_norm)
            return adahessian.CapturedStep(curvature)
        return _plain_step(model, loss_fn, optimizer, settings.clip_norm, curvature)
    wrapped = isinstance(model, DistributedDataParallel)
    if compiled and next(model.parameters()).is_cuda and not wrapped and not has_sparse_embeddings(model):
        _clip_before_step(optimizer, settings.clip_norm)
        return ReplayedStep(model, loss_fn, optimizer)
    return _plain_step(model, loss_fn, optimizer, settings.clip_norm)


def is_compiled(step: Step) -> bool:
    """Whether the derivatives of a step are compiled."""
    return isinstance(step, adahessian.CapturedStep | ReplayedStep)


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


class ReplayedStep:
    """The step of a first-order optimizer, its loss and gradients compiled and replayed as a CUDA graph.

    What :class:`adahessian.CapturedStep` is for AdaHessian, so that times can be compared. A batch of another shape
    runs uncompiled unless that shape comes often, and so does what cannot be captured.

    Args:
        model: What is trained, on one CUDA device.
        loss_fn: ``loss_fn(model, batch)`` is the loss.
        optimizer: By which.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, optimizer: Optimizer) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._compiled = torch.compile(loss_fn, dynamic=False)
        self._optimizer = optimizer
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._kinds = Kinds()
        self._graphs: dict[Hashable, tuple[Graph[Derivatives], list[Tensor]]] = {}

    def __call__(self, batch: Any) -> Tensor:
        """Take one step; returns the loss."""
        loss, gradients = self._replayed(batch) or self._derivatives(self._loss_fn, batch)
        for param, gradient in zip(self._params, gradients, strict=True):
            param.grad = gradient
        self._optimizer.step()
        return loss

    def _replayed(self, batch: Any) -> Derivatives | None:
        kind = self._kinds.key(batch)
        if kind is None:
            return None
        if kind not in self._graphs:
            static = map_tensors(lambda tensor: tensor.detach().clone(), batch)
            try:
                graph = Graph(lambda: self._derivatives(self._compiled, static), self._model)
            except CannotCaptureError as cannot:
                say(f"the step is not captured: {cannot}")
                self._kinds.refuse(kind)
                return None
            self._graphs[kind] = graph, list(tensors_of(static))
        graph, inputs = self._graphs[kind]
        for input_, tensor in zip(inputs, tensors_of(batch), strict=True):
            input_.copy_(tensor, non_blocking=True)
        loss, gradients = graph.replay()
        return loss.clone(), gradients

    def _derivatives(self, loss_fn: LossFn, batch: Any) -> Derivatives:
        loss = loss_fn(self._model, batch)
        gradients = torch.autograd.grad(loss, self._params, allow_unused=True)
        return loss.detach(), [
            # In the order of the parameter's memory, as backward() leaves it.
            g if g is None or g.stride() == p.stride() else torch.empty_like(p).copy_(g)
            for g, p in zip(gradients, self._params, strict=True)
        ]
