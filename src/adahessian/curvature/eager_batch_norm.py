r"""Batch norm with its second derivative written out, for passes that are not compiled.

With :math:`\overline{u}` for the mean of u over the batch,

.. math::
    \hat x = r (x - \overline{x}), \quad r = (\sigma^2 + \epsilon)^{-1/2}, \quad y = w \hat x + b

and with g for the gradient of a loss by y, those by x, w and b are

.. math::
    g_x = w r P(g), \quad g_w = \sum g \hat x, \quad g_b = \sum g, \quad
    P(g) = g - \overline{g} - \overline{g \hat x} \, \hat x

To differentiate once more is to find the gradient of :math:`v \cdot g_x + v_w \cdot g_w + v_b \cdot g_b`:

.. math::
    \text{by } g &: w r P(v) + v_w \hat x + v_b \\
    \text{by } w &: r \sum g P(v) \\
    \text{by } x &: r (v_w - w r \, \overline{v \hat x}) P(g) - w r^2 \, \overline{g \hat x} \, P(v)
        - w r^2 \, \overline{g P(v)} \, \hat x

Torch takes a hundred operations to that, a layer, thirty of them sums over the batch. Here all sums come from three
operations, and every coefficient is one number a channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from adahessian.curvature.batch_norm import TORCHS_OWN, by_batch, fits
from adahessian.curvature.written_out import Pass, applied, gradient_in_torchs_operations


def batch_norm(
    of_pass: Pass,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.batch_norm``, in a pass; torch's own where the formulas above are not for it."""
    running = [each for each in (running_mean, running_var) if each is not None]
    constant = not any(each.requires_grad for each in running)
    usual = training is True and eps > 0 and constant and fits(input, *running, weight, bias)
    if usual and of_pass.takes(input, weight, bias):
        y: Tensor = applied(_BatchNorm, of_pass, input, weight, bias, running_mean, running_var, momentum, eps)
        return y
    return TORCHS_OWN(input, running_mean, running_var, weight, bias, training, momentum, eps)


class _BatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        of_pass: Pass,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        y, mean, rstd = torch.native_batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.eps = eps
        of_pass.remember(ctx)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        by_inputs: tuple[Tensor | None, ...]
        if Pass.is_last_gradient(ctx):
            by_inputs = applied(_Gradient, gradients[0], x, weight, mean, rstd, ctx.eps)
        else:
            by_inputs = gradient_in_torchs_operations(
                # Torch's own would be wrong: see adahessian.curvature.graph.
                lambda x, weight, bias: by_batch(x, weight, bias, ctx.eps)[0],
                (x, weight, bias),
                ctx.needs_input_grad[1:4],
                gradients,
            )
        return None, *by_inputs, None, None, None, None


class _Gradient(Function):
    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, eps: float
    ) -> tuple[Tensor, ...]:
        by_x, by_w, by_b = _native_gradient(g, x, weight, mean, rstd, eps, [True, True, True])
        ctx.save_for_backward(g, x, weight, mean, rstd, by_w, by_b)
        ctx.eps = eps
        return by_x, by_w, by_b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *along: Tensor) -> tuple[Tensor | None, ...]:
        g, x, weight, mean, rstd, sum_gx, sum_g = ctx.saved_tensors
        v, v_w, v_b = along
        count = x.numel() // weight.numel()
        channels = (1, -1, *(1,) * (x.dim() - 2))
        _, sum_vx, sum_v = _native_gradient(v, x, weight, mean, rstd, ctx.eps, [False, True, True])
        sum_vg = (v * g).sum([dim for dim in range(x.dim()) if dim != 1])
        mean_vx, mean_v, mean_gx, mean_g, mean_vg = torch.stack([sum_vx, sum_v, sum_gx, sum_g, sum_vg]).div_(count)

        mean_g_pv = torch.addcmul(mean_vg, mean_v, mean_g, value=-1).addcmul_(mean_vx, mean_gx, value=-1)
        scale = weight * rstd
        of_g = torch.addcmul(v_w, scale, mean_vx, value=-1).mul_(rstd)
        minus_of_v = scale * rstd * mean_gx
        of_x = minus_of_v * mean_vx - of_g * mean_gx - scale * rstd * mean_g_pv
        constant = minus_of_v * mean_v - of_g * mean_g
        centred = x - mean.view(channels)
        by_x = torch.addcmul(constant.view(channels), g, of_g.view(channels))
        by_x.addcmul_(v, minus_of_v.view(channels), value=-1).addcmul_(centred, (of_x * rstd).view(channels))
        constant = torch.addcmul(v_b, scale, mean_v, value=-1)
        by_g = torch.addcmul(constant.view(channels), v, scale.view(channels))
        by_g.addcmul_(centred, of_g.view(channels))
        return by_g, by_x, mean_g_pv.mul_(rstd).mul_(count), None, None, None


def _native_gradient(
    g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, eps: float, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_batch_norm_backward(
        g, x, weight, None, None, mean, rstd, True, eps, wanted
    )
    return found
