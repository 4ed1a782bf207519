"""A training that leaves no trace: model, optimizer, scaler, random streams and loaders are as before."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from adahessian.curvature.isolation import devices_of, random_streams_untouched
from adahessian.curvature.passes import CurvaturePass
from adahessian.curvature.stopwatch import Stopwatch
from adahessian.optimizer import AdaHessian


@contextmanager
def training_taken_back(
    model: nn.Module,
    optimizer: Optimizer,
    curvature: CurvaturePass[Any] | None,
    scaler: GradScaler,
    batches: Iterable[Any],
) -> Iterator[None]:
    """Take back whatever training does meanwhile, bit by bit. Tensors keep their addresses, as captured graphs ask.

    Args:
        model: What is trained.
        optimizer: By which.
        curvature: The curvature pass of the steps, if there is one.
        scaler: The scaler of the steps, which may be disabled.
        batches: Where the batches come from.
    """
    optimizers = list(_with_parts(optimizer))
    with ExitStack() as stack:
        stack.enter_context(random_streams_untouched(devices_of(model)))
        stack.enter_context(_generators_put_back(batches))
        for holder in (*optimizers, curvature, getattr(curvature, "_scaled_loss", None)):
            if holder is not None:
                stack.enter_context(_attributes_put_back(holder))
        stack.enter_context(_scaler_put_back(scaler))
        stack.enter_context(_groups_put_back(optimizers))
        stack.enter_context(_model_put_back(model, optimizers))
        # Steps write into copies; the states themselves come back with the other attributes.
        copies = {id(each.state): _copied(each.state) for each in optimizers}
        for each in optimizers:
            each.state = copies[id(each.state)]
            if isinstance(each, AdaHessian):
                each._forget_transients()
        if curvature is not None:
            curvature._stopwatch = Stopwatch()
        yield


def _with_parts(optimizer: Optimizer) -> Iterator[Optimizer]:
    """An optimizer and those that it is made of, as :class:`adahessian.DenseAndSparse` is of two."""
    yield optimizer
    for part in vars(optimizer).values():
        if isinstance(part, Optimizer):
            yield from _with_parts(part)


def _copied(states: Mapping[Tensor, Any]) -> defaultdict[Tensor, Any]:
    return defaultdict(dict, {param: copy.deepcopy(state) for param, state in states.items()})


@contextmanager
def _attributes_put_back(holder: object) -> Iterator[None]:
    """States, a measurement that no step has used, counts of time, and what torch's schedules remember of steps."""
    attributes = dict(vars(holder))
    try:
        yield
    finally:
        vars(holder).clear()
        vars(holder).update(attributes)


@contextmanager
def _scaler_put_back(scaler: GradScaler) -> Iterator[None]:
    """Its scale. Of a step that was begun before, with other gradients, it is to know nothing meanwhile."""
    attributes = dict(vars(scaler))
    try:
        for name in ("_scale", "_growth_tracker"):
            if isinstance(value := attributes.get(name), Tensor):
                setattr(scaler, name, value.clone())
        if (steps := attributes.get("_per_optimizer_states")) is not None:
            scaler._per_optimizer_states = defaultdict(steps.default_factory)
        yield
    finally:
        vars(scaler).clear()
        vars(scaler).update(attributes)


@contextmanager
def _groups_put_back(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    groups = [(group, dict(group)) for optimizer in optimizers for group in optimizer.param_groups]
    tensors = _with_values(each for group, _ in groups for each in group.values() if isinstance(each, Tensor))
    try:
        yield
    finally:
        for group, settings in groups:
            group.clear()
            group.update(settings)
        _write_back(tensors)


@contextmanager
def _model_put_back(model: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Parameters, those that only an optimizer knows too, with their gradients; buffers and modes."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    params = {*model.parameters(), *(param for group in groups for param in group["params"])}
    gradients = [(param, param.grad) for param in params]
    modules = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    tensors = _with_values((*params, *model.buffers()))
    try:
        # Taken away rather than copied: whoever holds them finds them as they were.
        for param in params:
            param.grad = None
        yield
    finally:
        for module, mode, buffers in modules:
            module.training = mode
            module._buffers.clear()
            module._buffers.update(buffers)
        _write_back(tensors)
        for param, gradient in gradients:
            param.grad = gradient


@contextmanager
def _generators_put_back(batches: Iterable[Any]) -> Iterator[None]:
    """A loader and its sampler may have generators of their own, by which they shuffle."""
    holders = (batches, batches.sampler) if isinstance(batches, DataLoader) else ()
    found = (getattr(holder, "generator", None) for holder in holders)
    generators = [(each, each.get_state()) for each in found if isinstance(each, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in generators:
            generator.set_state(state)


def _with_values(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


@torch.no_grad()
def _write_back(tensors: Iterable[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in tensors:
        tensor.copy_(value)
