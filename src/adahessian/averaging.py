"""Spatial averaging: from a tensor's shape to its blocks.

The paper averages the Hessian diagonal over blocks of neighbouring weights,

    D_s[i b + j] = (D[i b + 1] + ... + D[i b + b]) / b,    1 <= j <= b,

so one value serves a whole block. :class:`Blocks` says which elements of a tensor share a block. What belongs to a
block is stored once, and is brought back to the elements by broadcasting, never by copying.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

Layout = Literal["auto", "kernel", "row", "none"]
Averaging = Literal["magnitude", "signed"]

LAYOUTS: tuple[str, ...] = get_args(Layout)
AVERAGINGS: tuple[str, ...] = get_args(Averaging)


@dataclass(frozen=True)
class Blocks:
    """The blocks of a tensor.

    A block is ``row_length`` consecutive elements of the last dimension (the last block of a row may be shorter), or
    all elements that differ in the last ``kernel_dims`` dimensions only. Dimensions are counted from the end, so the
    blocks of a tensor are also those of a stack of such tensors.
    """

    shape: tuple[int, ...]
    kernel_dims: int = 0
    row_length: int = 1

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of a tensor that holds one value a block."""
        if self.kernel_dims:
            return self.shape[: -self.kernel_dims] + (1,) * self.kernel_dims
        if self.row_length > 1:
            return (*self.shape[:-1], math.ceil(self.shape[-1] / self.row_length))
        return self.shape

    def split(self, elements: Tensor) -> list[Tensor]:
        """Views of a full tensor against which those of :meth:`split_blocks` broadcast."""
        if self.row_length == 1:
            return [elements]
        length = self.shape[-1]
        remainder = length % self.row_length
        whole = elements if not remainder else elements.narrow(-1, 0, length - remainder)
        views = [torch.unflatten(whole, -1, (length // self.row_length, self.row_length))]
        if remainder:
            views.append(elements.narrow(-1, length - remainder, remainder))
        return views

    def split_blocks(self, values: Tensor) -> list[Tensor]:
        """Views of a tensor of one value a block, in the order of :meth:`split`."""
        if self.row_length == 1:
            return [values]
        whole = self.shape[-1] // self.row_length
        views = [values.narrow(-1, 0, whole).unsqueeze(-1)]
        if self.shape[-1] % self.row_length:
            views.append(values.narrow(-1, whole, 1))
        return views

    def average(self, diagonal: Tensor, averaging: Averaging) -> Tensor:
        """The mean of each block: of ``|D|`` (magnitude, the authors' code) or of ``D`` (signed, the paper)."""
        if averaging == "magnitude":
            diagonal = diagonal.abs()
        if self.kernel_dims:
            return diagonal.mean(dim=tuple(range(-self.kernel_dims, 0)), keepdim=True)
        if self.row_length == 1:
            return diagonal
        whole, *rest = self.split(diagonal)
        return torch.cat([whole.mean(-1), *(shorter.mean(-1, keepdim=True) for shorter in rest)], dim=-1)


@lru_cache(maxsize=65536)
def blocks_of(shape: torch.Size, layout: Layout, block_size: int) -> Blocks:
    """The blocks of a tensor of this shape.

    ``"kernel"`` averages over every dimension after the second, as for the weights of convolutions; ``"row"`` over
    ``block_size`` consecutive elements of a row; ``"none"`` not at all. ``"auto"`` takes three and more dimensions for
    a convolution and two for a matrix. Vectors and scalars are never averaged.

    >>> blocks_of(torch.Size([16, 3, 3, 3]), "auto", 32).block_shape
    (16, 3, 1, 1)
    >>> blocks_of(torch.Size([4, 10]), "auto", 4).block_shape
    (4, 3)
    """
    plain = tuple(shape)
    if layout == "auto":
        layout = "kernel" if len(plain) > 2 else "row"
    if len(plain) < 2 or layout == "none" or 0 in plain:
        return Blocks(plain)
    if layout == "kernel":
        return Blocks(plain, kernel_dims=len(plain) - 2)
    if block_size >= plain[-1]:
        return Blocks(plain, kernel_dims=1)  # the whole row is one block
    return Blocks(plain, row_length=block_size)
