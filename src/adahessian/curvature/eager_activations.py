r"""GELU and SiLU with their second derivatives written out, for passes that are not compiled.

With g for the gradient of a loss by :math:`f(x)`, that by x is :math:`g f'(x)`, and the gradient of
:math:`v \cdot g f'(x)` is

.. math::
    \text{by } g : v f'(x), \qquad \text{by } x : v g f''(x)

For SiLU, with :math:`\sigma` for the sigmoid of x,

.. math::
    f(x) = x \sigma, \qquad f''(x) = \sigma (1 - \sigma) (2 + x (1 - 2 \sigma))

For GELU, with :math:`\varphi` and :math:`\Phi` for the density and the distribution of a normal variable,

.. math::
    f(x) = x \, \Phi(x), \qquad f''(x) = (2 - x^2) \, \varphi(x)

and, where that distribution is approximated,

.. math::
    f(x) = \tfrac{1}{2} x (1 + t), \qquad f''(x) = (1 - t^2) (u' + \tfrac{1}{2} x u'' - x t u'^2), \qquad
    t = \tanh u, \quad u = \kappa (x + c x^3)

Torch takes twice to three times as many operations to these, each over the widest layers that a transformer has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from adahessian.curvature.written_out import Pass, applied, gradient_in_torchs_operations

TORCHS_GELU, TORCHS_SILU = functional.gelu, functional.silu
_KAPPA, _C = math.sqrt(2 / math.pi), 0.044715


def gelu(of_pass: Pass, input: Tensor, *, approximate: str = "none") -> Tensor:
    """``torch.nn.functional.gelu``, in a pass; torch's own where tensors are not plain ones."""
    if approximate in _GELU and of_pass.takes(input):
        return _activated(of_pass, input, _GELU[approximate])
    return TORCHS_GELU(input, approximate=approximate)


def silu(of_pass: Pass, input: Tensor, inplace: bool = False) -> Tensor:
    """``torch.nn.functional.silu``, in a pass; torch's own in place, and where tensors are not plain ones."""
    if not inplace and of_pass.takes(input):
        return _activated(of_pass, input, _SILU)
    return TORCHS_SILU(input, inplace=inplace)


def _activated(of_pass: Pass, x: Tensor, activation: _Activation) -> Tensor:
    y: Tensor = applied(_Activated, of_pass, x, activation)
    return y


class _Activation(NamedTuple):
    """A function of single numbers: itself, :math:`g f'(x)` from g and x, and :math:`f''(x)`."""

    function: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    second_derivative: Callable[[Tensor], Tensor]


class _Activated(Function):
    @staticmethod
    def forward(ctx: Any, of_pass: Pass, x: Tensor, activation: _Activation) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        of_pass.remember(ctx)
        return activation.function(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if Pass.is_last_gradient(ctx):
            return None, applied(_Gradient, gradients[0], x, ctx.activation), None
        (by_x,) = gradient_in_torchs_operations(ctx.activation.function, (x,), (True,), gradients)
        return None, by_x, None


class _Gradient(Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, activation: _Activation) -> Tensor:
        ctx.save_for_backward(g, x)
        ctx.activation = activation
        return activation.gradient(g, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *along: Tensor) -> tuple[Tensor | None, ...]:
        (v,) = along
        g, x = ctx.saved_tensors
        by_x = ctx.activation.second_derivative(x).mul_(g).mul_(v)
        return ctx.activation.gradient(v, x), by_x, None


def _second_derivative_of_silu(x: Tensor) -> Tensor:
    # It is even: where the sigmoid of -|x| is small it keeps its digits.
    x = x.abs()
    q = x.neg().sigmoid_()
    inner = torch.addcmul(x, x, q, value=-2).neg_().add_(2)
    return _with_slope_of_sigmoid(inner, q)


def _second_derivative_of_gelu(x: Tensor) -> Tensor:
    square = x * x
    density = (square * -0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    return density.mul_(square.neg_().add_(2))


def _second_derivative_of_approximate_gelu(x: Tensor) -> Tensor:
    # It is even, and t of |x| is 1 - 2 q with q = sigmoid(-2 u): small where 1 - t^2 is, which so keeps its digits.
    # With s = x^2 + 1 / 3c, u' is 3 kappa c s, and x u'' / 2 is 3 kappa c (s - 1 / 3c).
    factor, shift = 3 * _KAPPA * _C, 1 / (3 * _C)
    x = x.abs()
    s = x * x
    q = torch.addcmul(x, x, s, value=_C).mul_(-2 * _KAPPA).sigmoid_()
    s.add_(shift).clamp_(max=1e4)  # far out, where q is zero, its square is not to overflow
    x_t = torch.addcmul(x, x, q, value=-2)
    inner = x_t.mul_(s).mul_(s).mul_(-factor).add_(s, alpha=2).sub_(shift)
    return _with_slope_of_sigmoid(inner.mul_(4 * factor), q)  # 1 - t^2 is 4 q (1 - q)


def _with_slope_of_sigmoid(inner: Tensor, q: Tensor) -> Tensor:
    r"""A product with :math:`q (1 - q)`."""
    found: Tensor = torch.ops.aten.sigmoid_backward(inner, q)
    return found


_SILU = _Activation(TORCHS_SILU, torch.ops.aten.silu_backward, _second_derivative_of_silu)
_GELU = {
    "none": _Activation(TORCHS_GELU, torch.ops.aten.gelu_backward, _second_derivative_of_gelu),
    "tanh": _Activation(
        partial(TORCHS_GELU, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward, approximate="tanh"),
        _second_derivative_of_approximate_gelu,
    ),
}
