"""Whether a curvature pass can be compiled, whether that pays off, and how it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adahessian.curvature.functional import Buffers, Derivatives, FunctionalLoss, Product, in_channels_last

# Compiling takes a minute or two. A model with fewer parameters is not worth it unless asked for.
WORTH_COMPILING = 100_000

Compiled = Callable[[Sequence[Tensor], Buffers, Sequence[Tensor], Any], Derivatives]


def missing_compiler(device: torch.device) -> str | None:
    """What the machine lacks for compiling, if anything."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Triton is not installed, or does not support this GPU"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler was found"
    return None


def compile_derivatives(
    loss: FunctionalLoss, product: Product, *, tangent_dtype: torch.dtype | None, channels_last: bool
) -> Compiled:
    """Gradient, ``z * (H z)`` and buffers of a loss as one compiled function.

    Args:
        loss: The loss.
        product: The way to the second derivative.
        tangent_dtype: What the operands of products that only feed ``H z`` are rounded to; None for not at all.
        channels_last: Whether images and kernels are brought into that order of memory, and the results back.
    """
    from adahessian.curvature.tangents import TangentPass, mark  # loads the compiler

    def derivatives(parameters: Sequence[Tensor], buffers: Buffers, probe: Sequence[Tensor], batch: Any) -> Derivatives:
        shapes = list(parameters)
        if product == "forward_over_reverse":
            probe = [mark(z) for z in probe]
        if channels_last:
            parameters, probe, batch = in_channels_last([list(parameters), list(probe), batch])
        value, gradients, diagonal, after = loss.derivatives(product, parameters, buffers, probe, batch)
        gradients = [_in_order_of(g, param) for g, param in zip(gradients, shapes, strict=True)]
        diagonal = [_in_order_of(d, param) for d, param in zip(diagonal, shapes, strict=True)]
        return value, gradients, diagonal, after

    # The compiler counts the versions of a function by its code, and allows eight: each model needs code of its own.
    derivatives.__code__ = derivatives.__code__.replace()
    compiled: Compiled = torch.compile(
        derivatives,
        fullgraph=True,
        dynamic=False,
        options={
            # Random numbers as without the compiler: the pass sees the dropout that the gradient will see.
            "fallback_random": True,
            "post_grad_custom_pre_pass": TangentPass(tangent_dtype),
        },
    )
    return compiled


def _in_order_of(tensor: Tensor, param: Tensor) -> Tensor:
    """A tensor in the order of a parameter's memory."""
    if tensor.dim() == 4 and not param.is_contiguous():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()
