"""Curvature shapes: what is stored for a parameter, and how it divides a step.

The paper averages the Hessian diagonal over blocks of neighbouring weights (spatial averaging),

    D_s[i b + j] = (D[i b + 1] + ... + D[i b + b]) / b,    1 <= j <= b,

so each block has one value (:class:`Blocks`). :class:`Factored` stores one value per row and one per column. State,
checkpoints, shards and diagnostics read ``stored`` and work with every shape.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

AveragingName = Literal["auto", "none", "kernel", "row", "factored"]
AVERAGINGS: tuple[str, ...] = get_args(AveragingName)

# The value of a block that took no part in the measured loss. All other values are magnitudes.
UNTOUCHED = -1.0

# Sums a tensor over the ranks that share a parameter.
Total = Callable[[Tensor], Tensor]


class Estimate(NamedTuple):
    """One measurement of a parameter."""

    # For a diagonal, one tensor of magnitudes per entry of ``stored``, with UNTOUCHED where a block took no part.
    values: tuple[Tensor, ...]
    not_finite: Tensor  # whether the square of any value is inf or NaN, which drops the whole measurement


def as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as a stack of its real and imaginary parts. Return a real tensor unchanged.

    >>> as_real(torch.tensor([1 + 2j, 3 + 4j])).tolist()
    [[1.0, 3.0], [2.0, 4.0]]
    """
    return torch.view_as_real(tensor.resolve_conj()).movedim(-1, 0) if tensor.is_complex() else tensor


def here_alone(tensor: Tensor) -> Tensor:
    """Return the sum over shards for a parameter that is not sharded, which is the tensor itself."""
    return tensor


class CurvatureShape(ABC):
    """The form in which a parameter's curvature is stored and used. Complex tensors are passed as real ones."""

    shape: tuple[int, ...]

    @property
    @abstractmethod
    def stored(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the state's tensors."""

    @property
    def unsharded(self) -> set[str]:
        """The names of tensors that every rank has as a whole. The first dimension of all others is sharded."""
        return {"hessian_column"}

    @property
    def marked(self) -> tuple[int, ...]:
        """The shape of the marks of :meth:`touched`."""
        return self.shape

    def touched(self, product: Tensor, gradient: Tensor) -> Tensor:
        """Mark the elements, or the blocks of a diagonal, that took part in a loss."""
        return product.ne(0).logical_or_(gradient.ne(0))

    def spread(self, marks: Tensor) -> Tensor:
        """Expand the marks of :meth:`touched` to the parameter's elements."""
        return marks


class Diagonal(CurvatureShape):
    """A curvature that divides the momentum element by element."""

    @property
    def marked(self) -> tuple[int, ...]:  # noqa: D102
        return next(iter(self.stored.values()))

    def reduce(
        self,
        probes: Sequence[Tensor] | None,
        products: Sequence[Tensor],
        gradient: Tensor | None,
        *,
        signed: bool = False,
        total: Total = here_alone,
    ) -> Estimate:
        """Reduce the probes z and products H z of one parameter to the stored values.

        ``probes=None`` means probes of all ones. A block whose gradient and products are all exactly zero took no part
        in the loss. Without a gradient, every block counts as measured. ``signed`` averages D over a block instead of
        ``|D|``, and ``total`` sums over the ranks that hold the parameter's other shards.
        """
        diagonal = hutchinson(probes, products, signed=signed)
        first, *rest = self._average(diagonal, signed, total)
        # A nonzero value already shows that the block took part. Checking this first is cheaper, but only on a CPU.
        if gradient is not None and not (first.device.type == "cpu" and first.all()):
            first = first.masked_fill(self.touched(diagonal, gradient).logical_not_(), UNTOUCHED)
        values = (first, *rest)
        return Estimate(values, reduce(torch.logical_or, map(not_finite_in, values)))

    @abstractmethod
    def _average(self, diagonal: Tensor, signed: bool, total: Total) -> tuple[Tensor, ...]:
        """Average a diagonal to one tensor per entry of ``stored``."""

    def steady(self, values: Sequence[Tensor], total: Total = here_alone) -> tuple[Tensor, ...]:
        r"""Average the squares with their mean over the tensor, :math:`(D^2 + \overline{D^2}) / 2`."""
        return tuple(map(_steadied, values, (total, here_alone)))  # only the first can be sharded

    def view(self, elements: Tensor) -> Tensor:
        """View a tensor of the parameter's shape so that :meth:`denominator` broadcasts against it."""
        return elements

    @abstractmethod
    def denominator(self, stored: Sequence[Tensor], power: float, eps: float) -> Tensor:
        r"""Compute :math:`\bar D^k + \epsilon`, which divides the momentum."""


@dataclass(frozen=True)
class Blocks(Diagonal):
    """One value per block.

    A block is ``row_length`` consecutive elements of the last dimension (the last block of a row may be shorter), or
    all elements that differ in the last ``kernel_dims`` dimensions only.
    """

    shape: tuple[int, ...]
    kernel_dims: int = 0
    row_length: int = 1

    @cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of ``hessian_rms``."""
        if self.kernel_dims:
            return self.shape[: -self.kernel_dims] + (1,) * self.kernel_dims
        if self.row_length > 1:
            return (*self.shape[:-1], math.ceil(self.shape[-1] / self.row_length))
        return self.shape

    @property
    def stored(self) -> dict[str, tuple[int, ...]]:  # noqa: D102
        return {"hessian_rms": self.stored_shape}

    def _average(self, diagonal: Tensor, signed: bool, total: Total) -> tuple[Tensor]:
        return (self._over_blocks(diagonal if signed else diagonal.abs(), torch.mean).abs(),)

    def view(self, elements: Tensor) -> Tensor:  # noqa: D102
        return elements if self._split_rows is None else elements.view(self._split_rows)

    def denominator(self, stored: Sequence[Tensor], power: float, eps: float) -> Tensor:  # noqa: D102
        (rms,) = stored
        return self._expand((rms if power == 1 else rms.pow(power)) + eps)

    def touched(self, product: Tensor, gradient: Tensor) -> Tensor:  # noqa: D102
        return self._over_blocks(super().touched(product, gradient), torch.any)

    def spread(self, marks: Tensor) -> Tensor:  # noqa: D102
        spread = torch.empty(self.shape, dtype=marks.dtype, device=marks.device)
        self.view(spread).copy_(self._expand(marks))
        return spread

    @cached_property
    def _remainder(self) -> int:
        """The length of the last block of each row if it is shorter, else 0."""
        return self.shape[-1] % self.row_length if self.row_length > 1 else 0

    @cached_property
    def _split_rows(self) -> tuple[int, ...] | None:
        """The shape with an extra dimension for the elements of a block."""
        if self.row_length == 1 or self._remainder:
            return None
        return (*self.shape[:-1], self.shape[-1] // self.row_length, self.row_length)

    def _expand(self, values: Tensor) -> Tensor:
        if self.row_length == 1:
            return values
        if self._split_rows is not None:
            return values.unsqueeze(-1)
        return values.repeat_interleave(self.row_length, dim=-1).narrow(-1, 0, self.shape[-1])

    def _over_blocks(self, elements: Tensor, reduction: Callable[..., Tensor]) -> Tensor:
        if self.kernel_dims:
            return reduction(elements, dim=tuple(range(-self.kernel_dims, 0)), keepdim=True)
        if self.row_length == 1:
            return elements
        whole, rest = elements.tensor_split([self.shape[-1] - self._remainder], dim=-1)
        values = reduction(whole.unflatten(-1, (-1, self.row_length)), dim=-1)
        return torch.cat([values, reduction(rest, dim=-1, keepdim=True)], dim=-1) if self._remainder else values


@dataclass(frozen=True)
class Factored(Diagonal):
    r"""One value per row and one per column, so m + n values instead of m n.

    .. math::
        r_i = \overline{D_{i \cdot}^2}, \quad c_j = \overline{D_{\cdot j}^2}, \quad
        \bar D_{ij}^2 = \frac{\bar r_i \, \bar c_j}{\overline{\bar c}}

    All dimensions after the first count as one.
    """

    shape: tuple[int, ...]

    @property
    def stored(self) -> dict[str, tuple[int, ...]]:  # noqa: D102
        return {"hessian_row": (self.shape[0], *(1,) * len(self._columns)), "hessian_column": (1, *self.shape[1:])}

    def _average(self, diagonal: Tensor, signed: bool, total: Total) -> tuple[Tensor, Tensor]:
        squares = diagonal.square()
        sums = squares.sum(0, keepdim=True)
        sums_and_count = total(torch.cat([sums.flatten(), sums.new_full((1,), len(squares))]))
        column = (sums_and_count[:-1] / sums_and_count[-1]).view(sums.shape)
        return squares.mean(self._columns, keepdim=True).sqrt_(), column.sqrt_()

    def denominator(self, stored: Sequence[Tensor], power: float, eps: float) -> Tensor:  # noqa: D102
        row, column = stored
        norm = column.square().mean().sqrt().clamp(min=torch.finfo(column.dtype).tiny)
        # A row that was never measured is infinite, and infinity times a column of zeros would be NaN.
        rms = (row * (column / norm)).masked_fill(row.isinf(), math.inf)
        return (rms if power == 1 else rms.pow(power)).add_(eps)

    def touched(self, product: Tensor, gradient: Tensor) -> Tensor:  # noqa: D102
        return super().touched(product, gradient).any(dim=self._columns, keepdim=True)

    def spread(self, marks: Tensor) -> Tensor:  # noqa: D102
        return marks.expand(self.shape)

    @property
    def _columns(self) -> tuple[int, ...]:
        return tuple(range(1, len(self.shape)))


def hutchinson(probes: Sequence[Tensor] | None, products: Sequence[Tensor], *, signed: bool) -> Tensor:
    r"""Estimate the Hessian diagonal, :math:`D = \overline{z \odot (H z)}`, the mean over the probes.

    The signs of a single probe are skipped unless ``signed`` needs them, because :math:`|z \odot (H z)| = |H z|`.
    """
    if probes is None or (len(products) == 1 and not signed):
        return products[0]
    return torch.stack([z * product for z, product in zip(probes, products, strict=True)]).mean(0)


def not_finite_in(values: Tensor) -> Tensor:
    """Return whether the square of any value is inf or NaN, without a device sync."""
    # Values are magnitudes or -1, so the largest value has the largest square. It is NaN if any value is NaN.
    largest = values.max() if values.numel() else values.new_zeros(())
    return largest.square().isfinite().logical_not()


def _steadied(values: Tensor, total: Total) -> Tensor:
    touched = values >= 0
    squares = values.square()
    known = total(torch.stack([squares.where(touched, 0.0).sum(), touched.sum().to(squares.dtype)]))
    mean = known[0] / known[1].clamp(min=1)
    return squares.add_(mean).mul_(0.5).sqrt_().where(touched, values)


@lru_cache(maxsize=65536)
def shape_for(shape: tuple[int, ...], averaging: AveragingName, block_size: int, parts: int = 1) -> Diagonal:
    """Choose the curvature shape for a tensor of this shape, or for a stack of ``parts`` of these tensors.

    >>> shape_for((16, 3, 3, 3), "auto", 32).stored
    {'hessian_rms': (16, 3, 1, 1)}
    >>> shape_for((4, 10), "auto", 4).stored
    {'hessian_rms': (4, 3)}
    """
    rank = len(shape)
    stacked = shape if parts == 1 else (parts, *shape)
    if averaging == "auto":
        averaging = "kernel" if rank in (4, 5) else "row"
    # Vectors and scalars are never averaged.
    if rank < 2 or averaging == "none" or 0 in shape[1:]:
        return Blocks(stacked)
    if averaging == "factored":
        return Factored(stacked) if parts == 1 else Blocks(stacked)
    if averaging == "kernel":
        return Blocks(stacked, kernel_dims=rank - 2)
    if block_size >= shape[-1]:
        return Blocks(stacked, kernel_dims=1)  # the whole row is one block
    return Blocks(stacked, row_length=block_size)
