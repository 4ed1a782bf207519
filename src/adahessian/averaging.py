"""Spatial averaging: from a tensor's shape to its blocks.

The paper averages the Hessian diagonal over blocks of neighbouring weights,

    D_s[i b + j] = (D[i b + 1] + ... + D[i b + b]) / b,    1 <= j <= b,

so one value serves a whole block. :class:`Blocks` says which elements of a tensor share a block. What belongs to a
block is stored once and brought back to the elements by broadcasting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Layout = Literal["auto", "kernel", "row", "none"]
Averaging = Literal["magnitude", "signed"]

LAYOUTS: tuple[str, ...] = get_args(Layout)
AVERAGINGS: tuple[str, ...] = get_args(Averaging)

# The estimate of a block that took no part in the measured loss; all others are magnitudes.
UNTOUCHED = -1.0

# Below so many elements, one copy costs less than the views or calls that would save it.
SMALL = 1 << 16


@dataclass(frozen=True)
class Blocks:
    """The blocks of a tensor.

    A block is ``row_length`` consecutive elements of the last dimension (the last block of a row may be shorter), or
    all elements that differ in the last ``kernel_dims`` dimensions only.
    """

    shape: tuple[int, ...]
    kernel_dims: int = 0
    row_length: int = 1

    @cached_property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of a tensor that holds one value a block."""
        if self.kernel_dims:
            return self.shape[: -self.kernel_dims] + (1,) * self.kernel_dims
        if self.row_length > 1:
            return (*self.shape[:-1], math.ceil(self.shape[-1] / self.row_length))
        return self.shape

    @cached_property
    def _remainder(self) -> int:
        """Length of the last, shorter block of each row; 0 if there is none."""
        return self.shape[-1] % self.row_length

    @cached_property
    def _small(self) -> bool:
        return math.prod(self.shape) < SMALL

    @cached_property
    def _rows_of_blocks(self) -> tuple[int, ...] | None:
        """The shape with a dimension for the elements of a block; None where the tensor is better taken as it is."""
        if self.row_length == 1 or self._remainder or self._small:
            return None
        return (*self.shape[:-1], self.shape[-1] // self.row_length, self.row_length)

    def view(self, elements: Tensor) -> Tensor:
        """A full tensor, viewed so that the result of :meth:`expand` broadcasts against it."""
        return elements if self._rows_of_blocks is None else elements.view(self._rows_of_blocks)

    def expand(self, values: Tensor) -> Tensor:
        """One value a block, in a shape that broadcasts against the result of :meth:`view`."""
        if self.row_length == 1:
            return values
        if self._rows_of_blocks is not None:
            return values.unsqueeze(-1)
        if self._small:
            return values.index_select(-1, _block_numbers(self.shape[-1], self.row_length, values.device))
        return values.repeat_interleave(self.row_length, dim=-1).narrow(-1, 0, self.shape[-1])

    def average(self, diagonal: Tensor, averaging: Averaging) -> Tensor:
        """The mean of each block: of ``|D|`` (magnitude, the authors' code) or of ``D`` (signed, the paper)."""
        return self._over_blocks(diagonal.abs() if averaging == "magnitude" else diagonal, torch.mean)

    def _over_blocks(self, elements: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
        """One value a block: what a function of torch's makes of its elements."""
        if self.kernel_dims:
            return reduce(elements, dim=tuple(range(-self.kernel_dims, 0)), keepdim=True)
        if self.row_length == 1:
            return elements
        whole, rest = elements.tensor_split([self.shape[-1] - self._remainder], dim=-1)
        values = reduce(whole.reshape(*whole.shape[:-1], whole.shape[-1] // self.row_length, self.row_length), dim=-1)
        return torch.cat([values, reduce(rest, dim=-1, keepdim=True)], dim=-1) if self._remainder else values

    def estimate(self, diagonal: Tensor, gradient: Tensor | None, averaging: Averaging) -> Estimate:
        """What a measured diagonal, and the gradient of the same loss, say about each block.

        A block whose gradient and curvature are all exactly zero took no part in the loss: its curvature is unknown.
        Without a gradient every block counts as measured.
        """
        values = self._values(diagonal, gradient, averaging)
        # Magnitudes, or -1: the largest square is that of the largest, which is NaN if any is.
        largest = values.max() if values.numel() else values.new_zeros(())
        return Estimate(values, largest.square().isfinite().logical_not())

    def _values(self, diagonal: Tensor, gradient: Tensor | None, averaging: Averaging) -> Tensor:
        values = self.average(diagonal, averaging).abs()
        # Of a curvature that is not 0 the gradient need not be asked; on a CPU finding out costs less than asking.
        if gradient is None or (values.device.type == "cpu" and values.all()):
            return values
        touched = self._over_blocks(diagonal.ne(0).logical_or_(gradient.ne(0)), torch.any)
        return values.masked_fill(touched.logical_not_(), UNTOUCHED)

    @cached_property
    def run_length(self) -> int | None:
        """How many elements follow each other in every block; None where blocks differ in that."""
        if self.kernel_dims:
            return math.prod(self.shape[-self.kernel_dims :])
        return None if self.row_length > 1 and self._remainder else self.row_length


def estimate_all(
    blocks: Sequence[Blocks],
    diagonals: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    averaging: Sequence[Averaging],
) -> list[Estimate]:
    """:meth:`Blocks.estimate` of many tensors. On a CPU small ones are taken together: each call costs microseconds."""
    found: dict[int, Estimate] = {}
    together: dict[tuple[torch.dtype, int, Averaging], list[int]] = {}
    for i, (of, diagonal, how) in enumerate(zip(blocks, diagonals, averaging, strict=True)):
        if of.run_length and of._small and diagonal.device.type == "cpu":
            together.setdefault((diagonal.dtype, of.run_length, how), []).append(i)
        else:
            found[i] = of.estimate(diagonal, None if gradients is None else gradients[i], how)
    for (_, length, how), chosen in together.items():
        counts = [math.prod(blocks[i].block_shape) for i in chosen]
        rows = torch.cat([diagonals[i].reshape(-1, length) for i in chosen])
        slopes = None if gradients is None else torch.cat([gradients[i].reshape(-1, length) for i in chosen])
        values = Blocks((sum(counts), length), kernel_dims=1)._values(rows, slopes, how)
        not_finite = torch.zeros(len(chosen), dtype=torch.int32)
        not_finite.index_add_(0, numbered(counts), values.flatten().square().isfinite().logical_not().int())
        for i, part, flag in zip(chosen, values.split(counts), not_finite.bool().unbind(), strict=True):
            found[i] = Estimate(part.view(blocks[i].block_shape), flag)
    return [found[i] for i in range(len(blocks))]


def steadied(values: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    r"""Estimates that half count for themselves and half for their tensor's mean, :math:`(D^2 + \overline{D^2}) / 2`.

    Args:
        values: The estimates of a tensor's blocks, or of those that are on this rank.
        total: Adds up what ranks have found that share the tensor.
    """
    touched = values >= 0
    squares = values.square()
    known = total(torch.stack([squares.where(touched, 0.0).sum(), touched.sum().to(squares.dtype)]))
    mean = known[0] / known[1].clamp(min=1)
    return squares.add_(mean).mul_(0.5).sqrt_().where(touched, values)


def numbered(counts: Sequence[int]) -> Tensor:
    """Of each element the number of its part, where parts of these sizes follow each other."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts), output_size=sum(counts))


class Estimate(NamedTuple):
    """A measured curvature."""

    values: Tensor
    """The magnitude of each block's average; :data:`UNTOUCHED` where the loss did not depend on the block."""

    not_finite: Tensor
    """Whether any of them, squared, is infinite or NaN: then the whole of it is to be dropped."""


@lru_cache(maxsize=1024)
def _block_numbers(length: int, row_length: int, device: torch.device) -> Tensor:
    """The number of the block that each element of a row belongs to."""
    return torch.arange(length, device=device) // row_length


@lru_cache(maxsize=65536)
def blocks_of(shape: torch.Size, layout: Layout, block_size: int, *, parts: int = 1) -> Blocks:
    """The blocks of a tensor of this shape, or of its ``parts``, stacked in front.

    ``"kernel"`` averages over every dimension after the second, as for the weights of convolutions; ``"row"`` over
    ``block_size`` consecutive elements of a row; ``"none"`` not at all. ``"auto"`` takes three and more dimensions for
    a convolution and two for a matrix. Vectors and scalars are never averaged.

    >>> blocks_of(torch.Size([16, 3, 3, 3]), "auto", 32).block_shape
    (16, 3, 1, 1)
    >>> blocks_of(torch.Size([4, 10]), "auto", 4).block_shape
    (4, 3)
    """
    rank = len(shape)
    stacked = tuple(shape) if parts == 1 else (parts, *shape)
    if layout == "auto":
        layout = "kernel" if rank > 2 else "row"
    if rank < 2 or layout == "none" or 0 in shape[1:]:
        return Blocks(stacked)
    if layout == "kernel":
        return Blocks(stacked, kernel_dims=rank - 2)
    if block_size >= shape[-1]:
        return Blocks(stacked, kernel_dims=1)  # the whole row is one block
    return Blocks(stacked, row_length=block_size)
