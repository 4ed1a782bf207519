r"""GELU with its second derivative written out, for passes that are not compiled.

With g for the gradient of a loss by :math:`f(x)`, that by x is :math:`g f'(x)`, and the gradient of
:math:`v \cdot g f'(x)` is

.. math::
    \text{by } g : v f'(x), \qquad \text{by } x : v g f''(x)

where, :math:`\varphi` and :math:`\Phi` being the density and the distribution of a normal variable,

.. math::
    f(x) = x \, \Phi(x), \qquad f''(x) = (2 - x^2) \, \varphi(x)

and, where the distribution is approximated,

.. math::
    f(x) = \tfrac{1}{2} x (1 + t), \qquad f''(x) = (1 - t^2) (u' + \tfrac{1}{2} x u'' - x t u'^2), \qquad
    t = \tanh u, \quad u = \kappa (x + c x^3)

Torch takes three times as many operations to these, each over the widest layers that a transformer has.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from adahessian.curvature.written_out import Pass, applied, are_plain, gradient_in_torchs_operations

TORCHS_OWN = functional.gelu
_KAPPA, _C = math.sqrt(2 / math.pi), 0.044715


def gelu(of_pass: Pass, input: Tensor, *, approximate: str = "none") -> Tensor:
    """``torch.nn.functional.gelu``, in a pass; torch's own where tensors are not plain ones."""
    if approximate in _SECOND_DERIVATIVE and are_plain(input):
        y: Tensor = applied(_Gelu, of_pass, input, approximate)
        return y
    return TORCHS_OWN(input, approximate=approximate)


class _Gelu(Function):
    @staticmethod
    def forward(ctx: Any, of_pass: Pass, x: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.of_pass, ctx.approximate = of_pass, approximate
        return TORCHS_OWN(x, approximate=approximate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if ctx.of_pass.is_at_gradient:
            return None, applied(_Gradient, gradients[0], x, ctx.approximate), None
        (by_x,) = gradient_in_torchs_operations(
            lambda x: TORCHS_OWN(x, approximate=ctx.approximate), (x,), (True,), gradients
        )
        return None, by_x, None


class _Gradient(Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(g, x)
        ctx.approximate = approximate
        return _native_gradient(g, x, approximate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *along: Tensor) -> tuple[Tensor | None, ...]:
        (v,) = along
        g, x = ctx.saved_tensors
        by_x = _SECOND_DERIVATIVE[ctx.approximate](x).mul_(g).mul_(v)
        return _native_gradient(v, x, ctx.approximate), by_x, None


def _second_derivative(x: Tensor) -> Tensor:
    square = x * x
    density = (square * -0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    return density.mul_(square.neg_().add_(2))


def _second_derivative_approximated(x: Tensor) -> Tensor:
    # It is even, and t of |x| is 1 - 2 q with q = sigmoid(-2 u): small where 1 - t^2 is, which so keeps its digits.
    # With s = x^2 + 1 / 3c, u' is 3 kappa c s, and x u'' / 2 is 3 kappa c (s - 1 / 3c).
    factor, shift = 3 * _KAPPA * _C, 1 / (3 * _C)
    x = x.abs()
    s = x * x
    q = torch.addcmul(x, x, s, value=_C).mul_(-2 * _KAPPA).sigmoid_()
    s.add_(shift).clamp_(max=1e4)  # far out, where q is zero, its square is not to overflow
    x_t = torch.addcmul(x, x, q, value=-2)
    inner = x_t.mul_(s).mul_(s).mul_(-factor).add_(s, alpha=2).sub_(shift).mul_(4 * factor)
    found: Tensor = torch.ops.aten.sigmoid_backward(inner, q)  # inner q (1 - q), and 1 - t^2 is 4 q (1 - q)
    return found


_SECOND_DERIVATIVE = {"none": _second_derivative, "tanh": _second_derivative_approximated}


def _native_gradient(g: Tensor, x: Tensor, approximate: str) -> Tensor:
    found: Tensor = torch.ops.aten.gelu_backward(g, x, approximate=approximate)
    return found
