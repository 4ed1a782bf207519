"""Dtypes for averages, and complex tensors as real ones."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for averages of tensors with this dtype, at least as wide as float32."""
    return torch.promote_types(dtype, torch.float32)


def as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as a stack of its real and imaginary parts. Return a real tensor unchanged.

    Example:
        >>> as_real(torch.tensor([1 + 2j, 3 + 4j])).tolist()
        [[1.0, 3.0], [2.0, 4.0]]
    """
    return torch.view_as_real(tensor.resolve_conj()).movedim(-1, 0) if tensor.is_complex() else tensor
