r"""Attention with its second derivative written out, for passes that are not compiled.

With rows of queries, keys and values, and :math:`\rho(u)` for the sum of :math:`P u` over a row,

.. math::
    P = \operatorname{softmax}(s \, Q K^\top + M), \quad O = P V, \quad S(u) = P (u - \rho(u))

and with g for the gradient of a loss by O, that by the scores is :math:`G = S(g V^\top)`, and those by Q, K and V are

.. math::
    g_Q = s \, G K, \quad g_K = s \, G^\top Q, \quad g_V = P^\top g

To differentiate once more is to find the gradient of :math:`v_Q \cdot g_Q + v_K \cdot g_K + v_V \cdot g_V`, with
:math:`W = s \, (v_Q K^\top + Q v_K^\top)`, :math:`A = S(W)` and
:math:`C = S((W - \rho(W)) (g V^\top - \rho(g V^\top)) + g v_V^\top)`:

.. math::
    \text{by } g &: A V + P v_V, & \quad \text{by } Q &: s \, (C K + G v_K) \\
    \text{by } V &: A^\top g, & \quad \text{by } K &: s \, (C^\top Q + G^\top v_Q)

Torch takes a hundred operations to all of it, most of them over one number for each query and key. Here it is a third.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from adahessian.curvature.written_out import KINDS, Pass, applied, gradient_in_torchs_operations, in_full_precision

_TORCHS_OWN = functional.scaled_dot_product_attention


def attention(
    of_pass: Pass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, in a pass.

    Torch's own with dropout, where queries share their keys, and where the mask is learned.
    """
    usual = dropout_p == 0 and not enable_gqa and not (is_causal and attn_mask is not None)
    if usual and _fit(query, key, value) and _is_constant(attn_mask, query, key) and of_pass.takes(query, key, value):
        if is_causal:
            shape = query.shape[-2], key.shape[-2]
            attn_mask = of_pass.constant(("causal", shape, query.dtype, query.device), partial(_causal, shape, query))
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        y: Tensor = applied(_Attention, of_pass, factor, attn_mask, query, key, value)
        return y
    return _TORCHS_OWN(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _fit(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether there is a key and a value for each other, and heads of all three, none of them empty."""
    return (
        query.dim() > 2
        and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
        and query.shape[-1] == key.shape[-1]
        and key.shape[-2] == value.shape[-2]
        and 0 not in (*query.shape, *value.shape)
    )


def _is_constant(mask: Tensor | None, query: Tensor, key: Tensor) -> bool:
    """Whether a mask, if there is one, is a tensor of torch's own that is not learned, and fits the scores."""
    if mask is None:
        return True
    scores = (*query.shape[:-1], key.shape[-2])
    return (
        type(mask) in KINDS
        and not mask.requires_grad
        and mask.dtype in (torch.bool, query.dtype)
        and mask.device == query.device
        and 2 <= mask.dim() <= len(scores)
        and all(size in (1, own) for size, own in zip(mask.shape, scores[-mask.dim() :], strict=True))
    )


def _causal(shape: tuple[int, int], like: Tensor) -> Tensor:
    return torch.full(shape, -math.inf, dtype=like.dtype, device=like.device).triu(1)


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, of_pass: Pass, scale: float, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        q, k, v = (each.reshape(-1, *each.shape[-2:]) for each in (query, key, value))
        shape = (*query.shape[:-1], key.shape[-2])
        if mask is not None and mask.dim() == 2 and mask.dtype != torch.bool:
            scores = torch.baddbmm(mask, q, k.mT, alpha=scale)
        else:
            scores = _times(q, k.mT, scale)
            if mask is not None and mask.dtype == torch.bool:
                scores.view(shape).masked_fill_(mask.logical_not(), -math.inf)
            elif mask is not None:
                scores.view(shape).add_(mask)
        # Of a row that may attend to nothing it makes zeros.
        weights = torch._safe_softmax(scores, -1)
        ctx.save_for_backward(query, key, value, mask, q, k, v, weights)
        ctx.scale = scale
        of_pass.remember(ctx)
        return _in_shape(torch.bmm(weights, v), (*query.shape[:-1], value.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, *saved = ctx.saved_tensors
        by_inputs: tuple[Tensor | None, ...]
        if Pass.is_last_gradient(ctx):
            by_inputs = applied(_Gradient, ctx.scale, gradients[0], query, key, value, *saved)
        else:
            by_inputs = gradient_in_torchs_operations(
                lambda query, key, value: _TORCHS_OWN(query, key, value, mask, scale=ctx.scale),
                (query, key, value),
                ctx.needs_input_grad[3:],
                gradients,
            )
        return None, None, None, *by_inputs


class _Gradient(Function):
    @staticmethod
    def forward(
        ctx: Any,
        scale: float,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, ...]:
        g = gradient.reshape(*weights.shape[:-1], -1)
        with in_full_precision(g):
            of_scores = _softmax_gradient(torch.bmm(g, v.mT), weights)
            by_inputs = _times(of_scores, k, scale), _times(of_scores.mT, q, scale), torch.bmm(weights.mT, g)
        ctx.save_for_backward(g, q, k, v, weights, of_scores)
        ctx.scale = scale
        ctx.shapes = gradient.shape, query.shape, key.shape, value.shape
        return tuple(map(_in_shape, by_inputs, ctx.shapes[1:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *along: Tensor) -> tuple[Tensor | None, ...]:
        g, q, k, v, weights, of_scores = ctx.saved_tensors
        scale = ctx.scale
        v_q, v_k, v_v = (each.reshape(own.shape) for each, own in zip(along, (q, k, v), strict=True))
        with in_full_precision(g):
            w = _centred(_times(v_q, k.mT, scale).baddbmm_(q, v_k.mT, alpha=scale), weights)
            c = _centred(torch.bmm(g, v.mT), weights).mul_(w).baddbmm_(g, v_v.mT)
            c = _softmax_gradient(c, weights)
            a = w.mul_(weights)
            by_g = torch.bmm(weights, v_v).baddbmm_(a, v)
            by_q = _times(c, k, scale).baddbmm_(of_scores, v_k, alpha=scale)
            by_k = _times(c.mT, q, scale).baddbmm_(of_scores.mT, v_q, alpha=scale)
            by_v = torch.bmm(a.mT, g)
        found = (each.view(shape) for each, shape in zip((by_g, by_q, by_k, by_v), ctx.shapes, strict=True))
        return None, *found, None, None, None, None


def _centred(u: Tensor, weights: Tensor) -> Tensor:
    """Without the mean of each row, in place."""
    return u.sub_((weights * u).sum(-1, keepdim=True))


def _times(first: Tensor, second: Tensor, scale: float) -> Tensor:
    """A batch of products, scaled."""
    # Of what is not to count nothing is read.
    return torch.baddbmm(first.new_empty(()), first, second, beta=0, alpha=scale)


def _in_shape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor in another shape that is no view, which no one may write to that a custom function has returned."""
    shaped: Tensor = torch.ops.aten._unsafe_view(tensor, list(shape))
    return shaped


def _softmax_gradient(by_weights: Tensor, weights: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten._softmax_backward_data(by_weights, weights, -1, weights.dtype)
    return found
