r"""Convolutions with their second derivative written out, for passes that are not compiled.

With :math:`x * w` for the convolution of an image with a kernel, and g for the gradient of a loss by it, the gradients
by x and w are those that torch computes with kernels made for them, :math:`X(g, w)` and :math:`W(g, x)`. All three are
linear in either argument and adjoint to each other:

.. math::
    g \cdot (x * w) = X(g, w) \cdot x = W(g, x) \cdot w

So the gradient of :math:`v \cdot X(g, w) + v_w \cdot W(g, x) + v_b \cdot \sum g` is

.. math::
    \text{by } g : v * w + x * v_w + v_b, \qquad \text{by } x : X(g, v_w), \qquad \text{by } w : W(g, v)

Torch has those by x and w from convolutions with kernels as large as the images, for which GPUs have no fast code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from adahessian.curvature.written_out import Pass, applied, gradient_in_torchs_operations

Size: TypeAlias = int | Sequence[int]
# Stride, padding, dilation, whether transposed and its output's padding, groups: as torch's operations take them.
_Geometry: TypeAlias = tuple[list[int], list[int], list[int], bool, list[int], int]


def convolution(dims: int) -> Callable[..., Tensor]:
    """``torch.nn.functional.conv1d``, ``conv2d`` or ``conv3d``, in a pass.

    Torch's own where sizes are no integers, such as padding by a name, and where tensors are not plain ones or not of a
    batch.
    """
    torchs_own = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}[dims]

    def convolve(
        of_pass: Pass,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Size = 1,
        padding: str | Size = 0,
        dilation: Size = 1,
        groups: int = 1,
    ) -> Tensor:
        given = (input, weight) if bias is None else (input, weight, bias)
        sizes = [_integers(each) for each in (stride, padding, dilation)]
        usual = None not in sizes and input.dim() == weight.dim() == 2 + dims and input.numel() > 0
        if usual and of_pass.takes(*given):
            y: Tensor = applied(_Convolution, of_pass, (*sizes, False, [0] * dims, groups), *given)
            return y
        return torchs_own(input, weight, bias, stride, padding, dilation, groups)

    return convolve


def _integers(given: Any) -> list[int] | None:
    # One for all dimensions stays one: torch's operations take it for each of them.
    sizes = list(given) if isinstance(given, (tuple, list)) else [given]
    return sizes if all(type(size) is int for size in sizes) else None


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, of_pass: Pass, geometry: _Geometry, x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        of_pass.remember(ctx)
        return _convolved(x, weight, *bias, geometry=geometry)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (g,) = gradients
        needed = ctx.needs_input_grad[2:]
        if Pass.is_last_gradient(ctx):
            return None, None, *applied(_Gradient, ctx.geometry, needed, g, x, weight)
        by_inputs = gradient_in_torchs_operations(
            lambda x, weight: _convolved(x, weight, geometry=ctx.geometry), (x, weight), needed[:2], gradients
        )
        by_bias = (g.sum([dim for dim in range(g.dim()) if dim != 1]) if each else None for each in needed[2:])
        return None, None, *by_inputs, *by_bias


class _Gradient(Function):
    @staticmethod
    def forward(
        ctx: Any, geometry: _Geometry, needed: tuple[bool, ...], g: Tensor, x: Tensor, weight: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(g, x, weight)
        ctx.geometry = geometry
        ctx.set_materialize_grads(False)
        wanted = [*needed, False][:3]
        return _gradients(g, x, weight, geometry=geometry, wanted=wanted)[: len(needed)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *along: Tensor | None) -> tuple[Tensor | None, ...]:
        g, x, weight = ctx.saved_tensors
        v, v_weight, v_bias = (*along, None)[:3]
        by_g = None
        if v_weight is not None:
            by_g = _convolved(x, v_weight, geometry=ctx.geometry)
        if v is not None:
            through = _convolved(v, weight, geometry=ctx.geometry)
            by_g = through if by_g is None else by_g.add_(through)
        if v_bias is not None:
            over_channels = v_bias.view(1, -1, *(1,) * (g.dim() - 2))
            by_g = over_channels.expand_as(g) if by_g is None else by_g.add_(over_channels)
        wanted = [v_weight is not None and ctx.needs_input_grad[3], v is not None and ctx.needs_input_grad[4], False]
        by_x = by_weight = None
        if any(wanted):
            # Of what is not wanted only the shape counts.
            at_x, at_weight = x if v is None else v, weight if v_weight is None else v_weight
            by_x, by_weight, _ = _gradients(g, at_x, at_weight, geometry=ctx.geometry, wanted=wanted)
        return None, None, by_g, by_x, by_weight


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, geometry: _Geometry) -> Tensor:
    return torch.convolution(x, weight, bias, *geometry)


def _gradients(
    g: Tensor, x: Tensor, weight: Tensor, *, geometry: _Geometry, wanted: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    found: tuple[Tensor | None, Tensor | None, Tensor | None] = torch.ops.aten.convolution_backward(
        g, x, weight, [weight.shape[0]], *geometry, wanted
    )
    return found
