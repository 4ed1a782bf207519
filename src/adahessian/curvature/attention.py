"""Attention in plain operations, which every kind of differentiation and autocast agree on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from adahessian.curvature.replaced import Replaced, replaced_by_name

_FUSED = F.scaled_dot_product_attention


@contextmanager
def plain_attention() -> Iterator[None]:
    """Inside, attention is computed by :func:`attention`, whichever name it is called by.

    Torch's own math kernel mixes dtypes when ``torch.func`` differentiates it under autocast. Modes are off inside
    ``F.multi_head_attention_forward``, which looks the function up by its name.
    """
    with Replaced({_FUSED: attention}), replaced_by_name([(F, "scaled_dot_product_attention", attention)]):
        yield


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Scaled dot-product attention, with the arguments of torch's function.

    .. math::
        \operatorname{softmax}(s \, Q K^\top + M) \, V
    """
    if query.is_nested:
        return _FUSED(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale) @ key.transpose(-2, -1)
    blind = None
    # What is shut out is so by a sum: unlike a choice, that leaves nothing to do to any derivative.
    if is_causal:
        scores = scores + scores.new_full(scores.shape[-2:], -math.inf).triu(1)
    elif attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill(~attn_mask, -math.inf)
        # As torch does: a row without any key attends to nothing. Of minus infinities alone all derivatives are NaN.
        blind = attn_mask.eq(-math.inf).all(-1, keepdim=True)
        scores = scores + attn_mask.masked_fill(blind, 0.0)
    weights = scores.softmax(-1)
    if dropout_p > 0:
        weights = F.dropout(weights, dropout_p)
    attended = weights.to(value.dtype) @ value
    return attended if blind is None else attended.masked_fill(blind, 0.0)
