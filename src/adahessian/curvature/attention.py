"""Attention in plain operations, which every kind of differentiation and autocast agree on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode


class PlainAttention(TorchFunctionMode):
    """Inside, ``scaled_dot_product_attention`` is computed by :func:`attention`.

    Torch's own math kernel mixes dtypes when ``torch.func`` differentiates it under autocast.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass every other function on."""
        if func is F.scaled_dot_product_attention:
            return attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


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
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        # Not minus infinity: a row without any key would become NaN, and so would all derivatives.
        least = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~attn_mask, least) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = scores.softmax(-1)
    if dropout_p > 0:
        weights = F.dropout(weights, dropout_p)
    return weights.to(value.dtype) @ value
