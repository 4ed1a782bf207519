r"""The approximate GELU with its second derivative written out, for passes that are not compiled.

.. math::
    f(x) = \tfrac{1}{2} x (1 + t), \qquad f''(x) = (1 - t^2) (u' + \tfrac{1}{2} x u'' - x t u'^2), \qquad
    t = \tanh u, \quad u = \kappa (x + c x^3)

With g for the gradient of a loss by :math:`f(x)`, that by x is :math:`g f'(x)`, and the gradient of
:math:`v \cdot g f'(x)` is

.. math::
    \text{by } g : v f'(x), \qquad \text{by } x : v g f''(x)

Torch takes twice as many operations to that, each over the widest layers that a transformer has. The exact GELU and
SiLU, where it takes few, are left to it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from adahessian.curvature.written_out import Pass, applied, gradient_in_torchs_operations

_TORCHS_OWN = functional.gelu
_KAPPA, _C = math.sqrt(2 / math.pi), 0.044715


def gelu(of_pass: Pass, input: Tensor, *, approximate: str = "none") -> Tensor:
    """``torch.nn.functional.gelu``, in a pass; torch's own if it is exact, and where tensors are not plain ones."""
    if approximate == "tanh" and of_pass.takes(input):
        y: Tensor = applied(_Gelu, of_pass, input)
        return y
    return _TORCHS_OWN(input, approximate=approximate)


def _approximate(x: Tensor) -> Tensor:
    return _TORCHS_OWN(x, approximate="tanh")


class _Gelu(Function):
    @staticmethod
    def forward(ctx: Any, of_pass: Pass, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        of_pass.remember(ctx)
        return _approximate(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if Pass.is_last_gradient(ctx):
            return None, applied(_Gradient, gradients[0], x)
        return None, *gradient_in_torchs_operations(_approximate, (x,), (True,), gradients)


class _Gradient(Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(g, x)
        return _gradient(g, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *along: Tensor) -> tuple[Tensor, ...]:
        (v,) = along
        g, x = ctx.saved_tensors
        return _gradient(v, x), _second_derivative(x).mul_(g).mul_(v)


def _gradient(g: Tensor, x: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.gelu_backward(g, x, approximate="tanh")
    return found


def _second_derivative(x: Tensor) -> Tensor:
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
