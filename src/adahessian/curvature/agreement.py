"""The check of a product against torch's double backward, once, on the batch that it is first used on.

Some versions of torch return wrong second derivatives for some operations without a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from adahessian.curvature.isolation import devices_of
from adahessian.curvature.ways import Found, Problem, Way, double_backward
from adahessian.messages import say


class Bounds(NamedTuple):
    """How large errors relative to double backward may be."""

    overall: float
    """Of all parameters together."""

    single: float
    """Of a single one."""

    negligible: float
    """A share of the average product. What is smaller in a parameter, such as the bias before a batch norm, which has
    no curvature but by rounding, is measured by this share."""


# Rounding to tf32 or less moves units of ReLU networks across their kinks, and with them some per cent of the product.
_EXACT = {torch.float64: Bounds(1e-6, 1e-5, 1e-3), torch.float32: Bounds(1e-2, 5e-2, 1e-3)}
_REDUCED = Bounds(0.25, 0.5, 3e-2)


class UnfitError(Exception):
    """A way that does not work for this model."""


class Reference(NamedTuple):
    """What double backward finds."""

    diagonal: list[Tensor | None]
    """The diagonal, along the probes of the measurement that is due."""

    is_random: bool
    """Whether the pass draws random numbers."""

    @property
    def is_finite(self) -> bool:
        """Whether any parameter has a finite diagonal: else there is nothing to compare with."""
        found = [each for each in self.diagonal if each is not None and each.numel()]
        return not found or any(each.isfinite().all() for each in found)


def reference(problem: Problem, part: object) -> Reference | None:
    """What to compare with; None if it does not fit into memory."""
    try:
        with problem.random_streams_untouched():
            before = _random_states(problem.model)
            found = double_backward(problem, written_out=False)(part, problem.draw, False)
            is_random = before != _random_states(problem.model)
    except torch.OutOfMemoryError:
        say("the curvature is not compared with that by double backward, which does not fit into memory")
        return None
    return Reference(found.diagonal, is_random)


def agreement(
    problem: Problem, part: object, found: Found, way: Way, expected: Reference | None, *, rounded: bool, compiled: bool
) -> str:
    """How well a product agrees with double backward, in words.

    Args:
        problem: The loss.
        part: The part of the batch that the product was computed on.
        found: The product.
        way: How it was computed, without the compiler. Where the loss is random it is compared instead, with dropout
            off: the compiler may draw random numbers in another order.
        expected: What to compare with.
        rounded: Whether the product was rounded on purpose.
        compiled: Whether it was compiled.

    Raises:
        UnfitError: If it does not agree.
    """
    if expected is None:
        return "not compared with double backward for want of memory"
    if not expected.is_finite:
        return "not compared with double backward, which is not finite"
    diagonal = expected.diagonal
    if expected.is_random:
        with problem.random_streams_untouched(), _without_dropout(problem.model):
            before = _random_states(problem.model)
            try:
                diagonal = double_backward(problem, written_out=False)(part, problem.draw, False).diagonal
            except torch.OutOfMemoryError:
                raise
            except Exception:  # as of models that return something else when they do not train
                return "not compared with double backward, as the loss cannot be computed without dropout"
            found = way(part, problem.draw, False)
            if before != _random_states(problem.model):
                return "not compared with double backward, as the loss is random even without dropout"
    bounds = _REDUCED if rounded else _bounds(problem.parameters)
    overall, worst = errors(found.diagonal, diagonal, negligible=bounds.negligible)
    if not (overall <= bounds.overall and worst <= bounds.single):
        raise UnfitError(
            f"it differs from double backward by {overall:.1%} in norm, by {worst:.1%} for a single parameter, so that "
            "an operation of the model is differentiated wrongly, or rounding is felt as much as that"
        )
    how = ", compared without the compiler as the loss is random" if expected.is_random and compiled else ""
    return f"within {overall:.1g} of double backward{how}"


def errors(
    found: Sequence[Tensor | None], expected: Sequence[Tensor | None], *, negligible: float = 1e-3
) -> tuple[float, float]:
    """The relative error of all parameters together, and the largest of a single one.

    Args:
        found: The products.
        expected: What they are compared with.
        negligible: The share of the average product that a smaller one is measured by.

    Raises:
        UnfitError: If nothing that is expected is finite.
    """
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None and b.numel()]
    finite = [(a, b) for a, b in pairs if b.isfinite().all()]
    if pairs and not finite:
        raise UnfitError("the second derivatives are not finite, so that none can be compared with double backward")
    squares = [
        ((a.double() - b.double()).square().sum().item(), b.double().square().sum().item(), b.numel())
        for a, b in finite
    ]
    total = sum(square for _, square, _ in squares)
    elements = sum(count for _, _, count in squares)
    if total == 0:
        return (0.0, 0.0) if all(error == 0 for error, _, _ in squares) else (math.inf, math.inf)
    least = negligible**2 * total / elements
    worst = max(error / max(square, least * count) for error, square, count in squares)
    return math.sqrt(sum(error for error, _, _ in squares) / total), math.sqrt(worst)


def _bounds(params: Sequence[Tensor]) -> Bounds:
    """How large errors may be, by the precision that products are computed in."""
    dtypes = {param.dtype for param in params}
    if len(dtypes) > 1 or dtypes.isdisjoint(_EXACT):
        return _REDUCED
    (dtype,) = dtypes
    # On other devices than a CPU float32 is often tf32.
    on_cpu = all(param.device.type == "cpu" for param in params)
    return _EXACT[dtype] if on_cpu or dtype == torch.float64 else _REDUCED


def _random_states(model: nn.Module) -> list[bytes]:
    states = [torch.get_rng_state()]
    for device in devices_of(model):
        if device.type != "cpu":
            states.append(torch.get_device_module(device).get_rng_state(device))
    return [bytes(state.tolist()) for state in states]


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Put all modules but those that count batches into evaluation mode: batch norm is to stay what it is."""
    training = [module for module in model.modules() if module.training and not isinstance(module, _NormBase)]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
