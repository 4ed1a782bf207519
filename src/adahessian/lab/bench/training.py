"""One whole training step as a function, in each mode: what the benchmark calls again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import adahessian
from adahessian.hessian.isolation import isolated
from adahessian.lab.bench.workloads import Batch, Task, mean_loss

Mode = Literal["eager", "compiled", "captured"]
MODES: tuple[Mode, ...] = get_args(Mode)

LossFn: TypeAlias = Callable[[nn.Module, Batch], Tensor]
Step: TypeAlias = Callable[[], Tensor]

_WARMUP_STEPS_BEFORE_CAPTURE = 3


@dataclass(frozen=True)
class Training:
    """A network in training."""

    optimizer: Optimizer
    step: Step
    """Takes one whole step and returns its loss."""

    curvature: Callable[[], str] | None = None
    """Says how the curvature is computed, once a step has been taken: not every network can be compiled."""


def plain(task: Task, optimizer: Optimizer, mode: Mode) -> Training:
    """The loop that everybody writes, for an optimizer that asks for gradients alone."""
    if mode == "captured":
        return Training(optimizer, _captured(task, optimizer))
    loss_fn = mean_loss if mode == "eager" else _compiled_loss()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(task.model, task.batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(optimizer, step)


def with_curvature(
    task: Task,
    optimizer: adahessian.AdaHessian,
    mode: Mode,
    *,
    batch_fraction: float,
    product_dtype: torch.dtype | None = None,
) -> Training:
    """The whole step of AdaHessian: gradient and curvature from one pass where both are of the whole batch."""
    curvature = adahessian.Curvature(
        task.model,
        mean_loss,
        optimizer,
        batch_fraction=batch_fraction,
        compile=mode != "eager",
        product_dtype=product_dtype,
    )
    whole_step = adahessian.TrainingStep(curvature, capture=mode == "captured")
    return Training(optimizer, lambda: whole_step(task.batch), lambda: curvature.engine.description)


def with_graph_of_gradient(task: Task, optimizer: Optimizer, *, every: int) -> Training:
    """The loop of optimizers that differentiate the gradients themselves, in every so many steps, the first included.

    Args:
        task: What to train.
        optimizer: The optimizer.
        every: Steps from one that needs the graph to the next.
    """
    ordinary = plain(task, optimizer, "eager")
    steps = 0

    def step() -> Tensor:
        nonlocal steps
        steps += 1
        if (steps - 1) % every:
            return ordinary.step()
        optimizer.zero_grad()
        # As for a compiled pass, which changes kernels only: gradients and buffers are the training's own.
        with isolated(task.model, {}, compiled=True):
            loss = mean_loss(task.model, task.batch)
            loss.backward(create_graph=True)
            optimizer.step()
        return loss.detach()

    return Training(optimizer, step)


@cache
def _compiled_loss() -> LossFn:
    # One for all: networks of the same structure share the code that was compiled for the first of them.
    return torch.compile(mean_loss, fullgraph=True, dynamic=False)


def _captured(task: Task, optimizer: Optimizer) -> Step:
    """The whole step in one CUDA graph."""
    params = task.parameters
    loss_fn = _loss_to_capture(task)

    def step() -> Tensor:
        loss = loss_fn(task.model, task.batch)
        # Not backward(): the nodes that accumulate gradients belong to the stream they were first used on.
        for param, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
            # As backward() does: taken as it is, or copied where it lies in memory in another order than its parameter.
            same_order = gradient.stride() == param.stride()
            param.grad = gradient if same_order else torch.empty_like(param).copy_(gradient)
        optimizer.step()
        return loss.detach()

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(_WARMUP_STEPS_BEFORE_CAPTURE):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay(alive: Step = step) -> Tensor:
        # The graph knows only the addresses of what the step uses: something must keep that alive.
        graph.replay()
        return loss

    return replay


def _loss_to_capture(task: Task) -> LossFn:
    """The compiled loss; as it is written where there are recurrent layers, which torch does not compile."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in task.model.modules())
    return mean_loss if recurrent else _compiled_loss()
