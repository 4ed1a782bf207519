"""A single check of the compiled product against double backward.

Some versions of PyTorch silently compute wrong second derivatives of some operations.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from adahessian.base.errors import first_line
from adahessian.hessian.compiled import CompiledPass
from adahessian.hessian.double_backward import Request, double_backward
from adahessian.hessian.isolation import devices_of, random_state_kept

# Largest errors relative to double backward: of all parameters together, and of a single parameter. A single error is
# divided by at least the third number times the average product. The bias before a batch norm, for example, has no
# curvature except rounding errors. Rounding to tf32 or less moves units of ReLU networks across their kinks.
_REDUCED, _ROUNDED = (0.25, 0.5, 3e-2), (0.4, 0.8, 3e-2)
_EXACT = {torch.float64: (1e-6, 1e-5, 1e-3), torch.float32: (1e-2, 5e-2, 1e-3)}


class UnusableError(Exception):
    """Failure of a curvature pass, or disagreement with double backward."""


def compare(compiled: CompiledPass, batch: Any, request: Request, *, is_rounded: bool) -> tuple[str, bool]:
    """Describe how close a compiled product is to double backward, and return whether another batch can change that.

    A random loss is compared without dropout and without the compiler, which may draw random numbers in another order.
    Raise an UnusableError if they disagree or the compiled pass fails. Other errors come from the loss.
    """
    model, loss_fn, request = compiled.model, compiled.loss_fn, request._replace(num_probes=1)
    with random_state_kept(model):
        before = _random_states(model)
        try:
            exact = double_backward(model, loss_fn, batch, request)
        except torch.OutOfMemoryError:
            exact = None
        is_random = before != _random_states(model)
    with random_state_kept(model):
        try:
            found = compiled(batch, request, False)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler raises errors of any kind
            raise UnusableError(reason(error)) from error
    if exact is None:
        return "not compared with double backward, which does not fit into memory", False
    if not exact.loss.isfinite().all():
        return "not compared with double backward yet: the loss is not finite", True
    products = [each for each in exact.products[0] if each is not None and each.numel()]
    if products and not any(each.isfinite().all() for each in products):
        return "not compared with double backward yet: the second derivatives are not finite", True
    if is_random:
        with random_state_kept(model), ExitStack() as stack:
            for module in model.modules():
                if not isinstance(module, _NormBase):  # dropout is off, but batch norms use the batch's statistics
                    stack.callback(setattr, module, "training", module.training)
                    module.training = False
            before = _random_states(model)
            try:
                exact = double_backward(model, loss_fn, batch, request)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # the model may return something else in evaluation mode
                return "not compared with double backward: the loss cannot be computed without dropout", False
            found = compiled(batch, request, False, compiled=False)
            if before != _random_states(model):
                return "not compared with double backward: the loss is random even without dropout", False
    most, most_for_single, negligible = _ROUNDED if is_rounded else bounds_for(request.params)
    overall, worst = errors(found.products[0], exact.products[0], negligible=negligible)
    if not (overall <= most and worst <= most_for_single):
        raise UnusableError(f"it differs from double backward by {overall:.1%} in norm, {worst:.1%} for one parameter")
    how = ", compared without the compiler because the loss is random" if is_random else ""
    return f"within {overall:.1g} of double backward{how}", False


def reason(error: Exception) -> str:
    """Describe an error of the compiler or its backend in one line."""
    error = getattr(error, "inner_exception", error)
    return f"{type(error).__name__}: {first_line(error)[:200]}"


def errors(
    found: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    *,
    negligible: float = 1e-3,
    sum_: Callable[[Tensor], Tensor] = torch.Tensor.contiguous,
) -> tuple[float, float]:
    """Compute the relative error of all parameters together, and the largest error of a single parameter.

    Parameters whose expected product is not finite are ignored. If the tensors are shards, ``sum_`` must sum a tensor
    over all ranks.
    """
    own = [
        ((a.double() - b.double()).square().sum().item(), b.double().square().sum().item(), b.numel())
        if a is not None and b is not None and b.numel() and b.isfinite().all()
        else (0.0, 0.0, 0)
        for a, b in zip(found, expected, strict=True)
    ]
    squares = [each for each in sum_(torch.tensor(own, dtype=torch.float64)).tolist() if each[2]]
    total = sum(square for _, square, _ in squares)
    if total == 0:
        return (0.0, 0.0) if all(error == 0 for error, _, _ in squares) else (math.inf, math.inf)
    least = negligible**2 * total / sum(count for _, _, count in squares)
    worst = max(error / max(square, least * count) for error, square, count in squares)
    return math.sqrt(sum(error for error, _, _ in squares) / total), math.sqrt(worst)


def bounds_for(params: Sequence[Tensor]) -> tuple[float, float, float]:
    """Choose bounds by the precision in which products are computed."""
    dtypes = {param.dtype for param in params}
    if len(dtypes) > 1 or dtypes.isdisjoint(_EXACT):
        return _REDUCED
    (dtype,) = dtypes
    # On devices other than CPUs, float32 products often use tf32.
    is_exact = dtype == torch.float64 or all(param.device.type == "cpu" for param in params)
    return _EXACT[dtype] if is_exact else _REDUCED


def _random_states(model: nn.Module) -> list[bytes]:
    devices = [device for device in devices_of(model) if device.type not in ("cpu", "meta")]
    states = [torch.get_device_module(device).get_rng_state(device) for device in devices]
    return [bytes(state.tolist()) for state in (torch.get_rng_state(), *states)]
