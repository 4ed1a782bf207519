"""Attention in plain operations, which torch.func can differentiate twice under autocast."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

_lock = threading.RLock()


@contextmanager
def plain_attention() -> Iterator[None]:
    """Replace ``F.scaled_dot_product_attention`` with :func:`attention`, for one thread at a time.

    PyTorch's math kernel mixes dtypes when ``torch.func`` differentiates it under autocast.
    """
    with _lock:
        original = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = attention
        try:
            yield
        finally:
            F.scaled_dot_product_attention = original


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
    r"""Compute scaled dot-product attention, with the arguments of PyTorch's function.

    .. math::
        \operatorname{softmax}(s \, Q K^\top + M) \, V
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    # PyTorch's softmax of bfloat16 to float32, as under CUDA's autocast, has tangents of mixed dtypes.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        weights = scores.softmax(-1)
    else:
        is_hidden = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask.eq(-math.inf)
        if attn_mask.dtype != torch.bool:
            scores = scores + attn_mask.masked_fill(is_hidden, 0.0)
        # As in PyTorch, a row without any key attends to nothing. Scores of -inf would make all derivatives NaN.
        scores = scores.masked_fill(is_hidden, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).masked_fill(is_hidden.all(-1, keepdim=True), 0.0)
    if dropout_p > 0:
        weights = F.dropout(weights, dropout_p)
    return weights.to(value.dtype) @ value
