r"""Layer norm with its second derivative written out, for passes that are not compiled.

With :math:`\overline{u}` for the mean of u over the features of a sample,

.. math::
    \hat x = r (x - \overline{x}), \quad r = (\sigma^2 + \epsilon)^{-1/2}, \quad y = w \hat x + b

and with g for the gradient of a loss by y, those by x, w and b are

.. math::
    g_x = r P(w g), \quad g_w = \sum g \hat x, \quad g_b = \sum g, \quad
    P(u) = u - \overline{u} - \overline{u \hat x} \, \hat x

with sums over the samples. To differentiate once more is to find the gradient of
:math:`v \cdot g_x + v_w \cdot g_w + v_b \cdot g_b`, with :math:`a = r P(v)`:

.. math::
    \text{by } g &: w a + v_w \hat x + v_b \\
    \text{by } w &: \sum g a \\
    \text{by } x &: r P(g (v_w - r \, \overline{v \hat x} \, w)) - r \, \overline{w g \hat x} \, a
        - r \, \overline{w g a} \, \hat x

Torch takes eighty operations to that, a layer: every third of all that a Transformer's second derivative takes. Here it
is twenty, since r P of anything is torch's own gradient of a layer norm without weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from adahessian.curvature.written_out import Pass, applied, gradient_in_torchs_operations, in_full_precision

_TORCHS_OWN = functional.layer_norm


def layer_norm(
    of_pass: Pass,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.layer_norm``, in a pass; torch's own unless it is over the last dimension, with weights."""
    given = (input, weight) if bias is None else (input, weight, bias)
    shape = input.shape[-1:]
    usual = isinstance(normalized_shape, (tuple, list)) and shape == tuple(normalized_shape) != ()
    usual = usual and input.numel() > 0 and eps > 0
    if usual and all(each is not None and each.shape == shape for each in given[1:]) and of_pass.takes(*given):
        y: Tensor = applied(_LayerNorm, of_pass, eps, *given)
        return y
    return _TORCHS_OWN(input, normalized_shape, weight, bias, eps)


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx: Any, of_pass: Pass, eps: float, x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias[0] if bias else None, eps)
        ctx.save_for_backward(x, weight, mean, rstd, *bias)
        ctx.eps = eps
        of_pass.remember(ctx)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd, *bias = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        by_inputs: tuple[Tensor | None, ...]
        if Pass.is_last_gradient(ctx):
            by_inputs = applied(_Gradient, gradients[0], x, weight, mean, rstd)[: len(needed)]
        else:
            by_inputs = gradient_in_torchs_operations(
                partial(_in_plain_operations, eps=ctx.eps),
                (x, weight, *bias),
                needed,
                gradients,
            )
        return None, None, *by_inputs


class _Gradient(Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(g, x, weight, mean, rstd)
        return _native_gradient(g, x, weight.shape, mean, rstd, weight, [True, True, True])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *along: Tensor) -> tuple[Tensor | None, ...]:
        g, x, weight, mean, rstd = ctx.saved_tensors
        v, v_weight, v_bias = along
        normed = (x - mean).mul_(rstd)
        scaled = normed * (rstd / weight.numel())
        w_g = g * weight
        a = _projected(v, x, weight.shape, mean, rstd)
        with in_full_precision(g):
            of_w_g, of_a, of_scaled = _dot(v, scaled), _dot(w_g, scaled), _dot(w_g, a)
        by_x = torch.addcmul(g * v_weight, w_g, of_w_g, value=-1)
        by_x = _projected(by_x, x, weight.shape, mean, rstd)
        by_x.addcmul_(of_a, a, value=-1).addcmul_(of_scaled, scaled, value=-1)
        by_g = torch.addcmul(v_bias, v_weight, normed).addcmul_(weight, a)
        by_weight = a.mul_(g).sum_to_size(weight.shape)
        return by_g, by_x, by_weight, None, None


def _in_plain_operations(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    # Torch's own would be wrong: see adahessian.curvature.graph.
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return scaled if bias is None else scaled + bias


def _dot(first: Tensor, second: Tensor) -> Tensor:
    """The product of each sample, over its features."""
    product: Tensor = torch.linalg.vecdot(first, second)
    return product.unsqueeze(-1)


def _projected(u: Tensor, x: Tensor, shape: torch.Size, mean: Tensor, rstd: Tensor) -> Tensor:
    """Returns r P(u)."""
    return _native_gradient(u, x, shape, mean, rstd, None, [True, False, False])[0]


def _native_gradient(
    g: Tensor, x: Tensor, shape: torch.Size, mean: Tensor, rstd: Tensor, weight: Tensor | None, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    # Of the bias only whether there is one is asked.
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_layer_norm_backward(
        g, x, shape, mean, rstd, weight, weight, wanted
    )
    return found
