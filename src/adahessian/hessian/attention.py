"""Attention and softmax in plain operations, which torch.func can differentiate twice under autocast."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

_lock = threading.RLock()
_SOFTMAXES = ("softmax", "log_softmax", "cross_entropy")


@contextmanager
def plain_attention() -> Iterator[None]:
    """Replace ``F.scaled_dot_product_attention`` with :func:`attention`, and cast for softmax, in one thread at a time.

    PyTorch's math kernel mixes dtypes when ``torch.func`` differentiates it under autocast. So does a softmax that
    casts to float32 itself, as under CUDA's autocast.
    """
    with _lock:
        originals = {name: getattr(F, name) for name in ("scaled_dot_product_attention", *_SOFTMAXES)}
        vars(F).update({name: _cast_first(originals[name]) for name in _SOFTMAXES})
        F.scaled_dot_product_attention = attention
        try:
            yield
        finally:
            vars(F).update(originals)


def _cast_first(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Cast the first argument as CUDA's autocast does."""

    def cast(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.is_cuda and torch.is_autocast_enabled("cuda"):
            input = input.to(torch.promote_types(input.dtype, torch.float32))
        return function(input, *args, **kwargs)

    return cast


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
    # Softmax itself would cast under CUDA's autocast.
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
