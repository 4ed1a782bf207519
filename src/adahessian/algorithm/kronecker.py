r"""Curvature that rotates: Kronecker factors of Hessian-vector products.

For a matrix of shape (m, n) with Hessian :math:`A \otimes B` and a product :math:`Y = H z` with a Rademacher z,

.. math::
    E[Y Y^\top] = \operatorname{tr}(B^2) \, A^2, \quad E[Y^\top Y] = \operatorname{tr}(A^2) \, B^2

so Newton's step :math:`H^{-1} M` is :math:`L^{-1/2} M R^{-1/2}` up to one scale, where L and R are running means of
:math:`Y Y^\top / n` and :math:`Y^\top Y / m`. L and R are block-diagonal. One probe serves all parameters, so they
sketch the rows of H squared, with the share of other layers, as the paper's diagonal does.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from adahessian.algorithm.shapes import CurvatureShape, Estimate, Total, here_alone, not_finite_in

# Below this a curvature counts as zero. Its square root is still far from float32's smallest number.
_TINY = 1e-30
_BETA_SIGNAL = 0.99
_VECTOR_DAMPING = 0.1  # of the mean curvature of a vector


@dataclass(frozen=True)
class Cut:
    """A dimension, cut into nearly equal blocks; the last one is padded with zeros."""

    length: int
    block_size: int

    @cached_property
    def blocks(self) -> int:
        """The number of blocks."""
        return max(math.ceil(self.length / self.block_size), 1)

    @cached_property
    def size(self) -> int:
        """The size of a block."""
        return math.ceil(self.length / self.blocks)

    def split(self, rows: Tensor) -> Tensor:
        """From (..., length, k) to (..., blocks, size, k)."""
        missing = self.blocks * self.size - self.length
        padded: Tensor = pad(rows, (0, 0, 0, missing)) if missing else rows
        blocks: Tensor = padded.unflatten(-2, (self.blocks, self.size))
        return blocks

    def join(self, blocks: Tensor) -> Tensor:
        """From (..., blocks, size, k) to (..., length, k)."""
        joined: Tensor = blocks.flatten(-3, -2)
        return joined.narrow(-2, 0, self.length)


class Rotation(CurvatureShape):
    """A curvature that rotates the momentum."""

    @property
    def marked(self) -> tuple[int, ...]:  # noqa: D102
        return self.shape

    @abstractmethod
    def fold(self, stored: Sequence[Tensor], estimate: Estimate, weight: Tensor) -> None:
        """Fold one measurement into the running means, in place."""

    @abstractmethod
    def rotate(self, momentum: Tensor, stored: Sequence[Tensor]) -> Tensor:
        """Apply the inverse root of the curvature to a momentum."""

    def reduce(  # noqa: D102
        self,
        probes: Sequence[Tensor] | None,
        products: Sequence[Tensor],
        gradient: Tensor | None,
        *,
        signed: bool = False,
        total: Total = here_alone,
    ) -> Estimate:
        if gradient is None:
            return self._reduce(products, torch.ones_like(products[0], dtype=torch.bool))
        return self._reduce(products, self.touched(torch.stack(tuple(products)).ne(0).any(0), gradient))

    @abstractmethod
    def _reduce(self, products: Sequence[Tensor], took_part: Tensor) -> Estimate:
        """Reduce products to means and to marks of what the loss reached. The signs of the probes cancel."""

    def touched(self, product: Tensor, gradient: Tensor) -> Tensor:  # noqa: D102
        return product.ne(0).logical_or_(gradient.ne(0))

    def spread(self, marks: Tensor) -> Tensor:  # noqa: D102
        return marks


@dataclass(frozen=True)
class Elementwise(Rotation):
    """Mean squares of the elements of a vector, with damping relative to their mean."""

    shape: tuple[int, ...]

    @property
    def stored(self) -> dict[str, tuple[int, ...]]:  # noqa: D102
        return {"hessian_square": self.shape}

    def _reduce(self, products: Sequence[Tensor], took_part: Tensor) -> Estimate:
        squares = torch.stack([product.square() for product in products]).mean(0)
        return Estimate((squares, took_part.to(squares)), not_finite_in(squares.sqrt()))

    def fold(self, stored: Sequence[Tensor], estimate: Estimate, weight: Tensor) -> None:  # noqa: D102
        (old,), (new, reached) = stored, estimate.values
        old.copy_(torch.where(estimate.not_finite.bool(), old, old + weight * reached * (new - old)))

    def rotate(self, momentum: Tensor, stored: Sequence[Tensor]) -> Tensor:  # noqa: D102
        rms = stored[0].sqrt()
        return momentum / (rms + _VECTOR_DAMPING * rms.mean() + _TINY)


@dataclass(frozen=True)
class Matrix(Rotation):
    """Block-diagonal factors of the rows and of the columns.

    The rows of a table have no neighbours and get a diagonal. Dimensions after the second count as columns, except in a
    stack of matrices, whose first dimension counts them.
    """

    shape: tuple[int, ...]
    block_size: int
    is_table: bool = False
    is_stack: bool = False

    @cached_property
    def rows(self) -> Cut:
        """The dimension of the left factor."""
        return Cut(self.shape[self.is_stack], 1 if self.is_table else self.block_size)

    @cached_property
    def columns(self) -> Cut:
        """The dimension of the right factor."""
        return Cut(math.prod(self.shape[self.is_stack + 1 :]), self.block_size)

    @property
    def stored(self) -> dict[str, tuple[int, ...]]:  # noqa: D102
        stack = self.shape[: int(self.is_stack)]
        left, right = ((*stack, cut.blocks, cut.size, cut.size) for cut in (self.rows, self.columns))
        return {"left_factor": left, "right_factor": right, "left_root": left, "right_root": right}

    def _as_matrix(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(1 + self.is_stack)

    def _reduce(self, products: Sequence[Tensor], took_part: Tensor) -> Estimate:
        matrices = [self._as_matrix(product) for product in products]
        left = sum((_outer(self.rows.split(y)) for y in matrices), torch.zeros(()).to(matrices[0]))
        right = sum((_outer(self.columns.split(y.mT)) for y in matrices), torch.zeros(()).to(matrices[0]))
        left = left / (self.columns.length * len(products))
        right = right / (self.rows.length * len(products))
        not_finite = torch.stack([left.sum(), right.sum()]).isfinite().all().logical_not()
        took_part = self._as_matrix(took_part)
        reached = took_part.any(-1, keepdim=True), took_part.any(-2).unsqueeze(-1)
        by_row, by_column = (cut.split(r.to(left)) for cut, r in zip((self.rows, self.columns), reached, strict=True))
        return Estimate((left, right, by_row, by_column), not_finite)

    def fold(self, stored: Sequence[Tensor], estimate: Estimate, weight: Tensor) -> None:  # noqa: D102
        for old, new, reached in zip(stored[:2], estimate.values[:2], estimate.values[2:], strict=True):
            # Rows that the loss did not reach keep their mean. Scaling both sides keeps the factor semidefinite.
            keep = torch.where(reached.bool(), (1 - weight).sqrt(), 1.0)
            old.copy_(torch.where(estimate.not_finite.bool(), old, keep * old * keep.mT + weight * new))

    def rotate(self, momentum: Tensor, stored: Sequence[Tensor]) -> Tensor:  # noqa: D102
        _, _, left, right = stored
        m = self._as_matrix(momentum).to(left.dtype)
        m = self.rows.join(left @ self.rows.split(m))
        return self.columns.join(right @ self.columns.split(m.mT)).mT.reshape(momentum.shape)


def _outer(blocks: Tensor) -> Tensor:
    return blocks @ blocks.mT


def fold_rotations(
    shapes: Sequence[Any], stored: Sequence[Sequence[Tensor]], estimates: Sequence[Estimate], weights: Tensor
) -> None:
    """Fold one measurement of each parameter into its running means, in place."""
    for shape, tensors, estimate, weight in zip(shapes, stored, estimates, weights.unbind(), strict=True):
        shape.fold(tensors, estimate, weight)


def refresh_roots(
    shapes: Sequence[CurvatureShape],
    stored: Sequence[Sequence[Tensor]],
    measurements: Tensor,
    least: float,
    not_finite: Tensor,
) -> None:
    """Compute the inverse roots of all factors, those of one size at once.

    The damping is relative to the mean eigenvalue. After n measurements it is 3 / n, at most 1 and at least ``least``,
    because the factors of few measurements are unreliable. Roots stay where the measurement was not finite.
    """
    dampings = (3 / measurements.clamp(min=1)).clamp(min=least, max=1.0).unbind()
    sides: dict[int, list[tuple[Tensor, Tensor, int, Tensor, Tensor]]] = {}
    for shape, tensors, damping, stays in zip(shapes, stored, dampings, not_finite.unbind(), strict=True):
        if isinstance(shape, Matrix):
            for factor, root, cut in zip(tensors[:2], tensors[2:], (shape.rows, shape.columns), strict=True):
                sides.setdefault(cut.size, []).append((factor, root, cut.length, damping, stays))
    for size, members in sides.items():
        counts = [factor.numel() // size**2 for factor, *_ in members]
        means = [
            # Over all blocks of a dimension, so that blocks keep their relative size.
            (factor.diagonal(dim1=-2, dim2=-1).sum((-2, -1)) / length).unsqueeze(-1).expand(factor.shape[:-2]).flatten()
            for factor, _, length, _, _ in members
        ]
        roots = inverse_roots(
            torch.cat([factor.reshape(-1, size, size) for factor, *_ in members]),
            torch.cat(means),
            torch.cat([damping.expand(count) for (_, _, _, damping, _), count in zip(members, counts, strict=True)]),
            # No eigenvalue is larger than the trace, which is the mean times the length.
            condition=1.01 * max(length for _, _, length, _, _ in members) / least + 1.0,
        )
        for (_, root, _, _, stays), part in zip(members, roots.split(counts), strict=True):
            root.copy_(torch.where(stays, root, part.view_as(root)))


def inverse_roots(factors: Tensor, means: Tensor, damping: Tensor, *, condition: float) -> Tensor:
    r"""Compute :math:`(L + \delta \bar\lambda I)^{-1/2}` of a batch of matrices by coupled Newton-Schulz iterations.

    .. math::
        T = \tfrac{\rho}{2} (3 I - \rho^2 Z Y), \quad Y \leftarrow Y T, \quad Z \leftarrow T Z, \quad
        \rho^2 = \frac{3}{1 + l + l^2}

    The damping gives l, a lower bound of the square roots of Z Y's eigenvalues, all at most 1. This scale makes the
    bound 2.6 times as large per iteration while it is small (Chen and Chow, 2014). Without the scale it is 1.5 times.
    ``condition`` bounds the condition of all matrices.
    """
    size = factors.shape[-1]
    means, damping = means.clamp(min=_TINY)[:, None, None], damping[:, None, None]
    if size == 1:
        return (factors + damping * means).rsqrt()
    eye = torch.eye(size, dtype=factors.dtype, device=factors.device)
    a = factors / means + damping * eye
    # Both norms are at least the largest eigenvalue. Rounding must not exceed it, hence the last factor.
    bound = a.abs().sum(-1, keepdim=True).amax(-2, keepdim=True).minimum(a.square().sum((-2, -1), keepdim=True).sqrt())
    bound = bound * 1.001
    y, z = a / bound, eye.expand_as(a)
    low, tolerance = (damping / bound).sqrt(), torch.finfo(factors.dtype).eps ** 0.5
    goes_on = torch.ones_like(bound, dtype=torch.bool)
    for _ in range(_iterations(condition)):
        square = 3 / (1 + low + low * low)
        half = square.sqrt() / 2
        product = z @ y
        residual = (eye - product).abs().amax((-2, -1), keepdim=True)
        step = torch.where(goes_on, 3 * half * eye - (half * square) * product, eye)
        # A block that this step makes exact stops, because rounding errors grow from then on.
        goes_on = goes_on & (residual > tolerance)
        y, z = y @ step, step @ z
        low = (half * low * (3 - square * low * low)).clamp(max=1.0)
        if factors.device.type == "cpu" and not goes_on.any():  # elsewhere this would synchronize
            break
    root = z * (bound * means).rsqrt()
    return 0.5 * (root + root.mT)


def _iterations(condition: float) -> int:
    """Return how many iterations reach rounding errors for matrices of this condition."""
    low, number = condition**-0.5, 3  # the last ones converge quadratically
    while low < 0.99:
        square = 3 / (1 + low + low * low)
        low *= square**0.5 / 2 * (3 - square * low * low)
        number += 1
    return number


def take_rotated_steps(
    params: Sequence[Tensor],
    states: Sequence[Any],
    shapes: Sequence[Any],
    stored: Sequence[Sequence[Tensor]],
    number: Any,
    group: dict[str, Any],
) -> None:
    r"""Take the step of this number, in place.

    .. math::
        m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad \theta \leftarrow (1 - \eta \lambda) \theta - \eta \, c \, u
    """
    lr, beta1 = float(group["lr"]), float(group["betas"][0])
    for param, state, shape, own in zip(params, states, shapes, stored, strict=True):
        square, grad = state["grad_square"], param.grad
        assert grad is not None
        state["exp_avg"].lerp_(grad.neg() if group["maximize"] else grad, 1 - beta1)
        square.lerp_(grad.to(square.dtype).square().sum(), 1 - _BETA_SIGNAL)
        update = rotated_update(state["exp_avg"], square, shape, own, number, beta1)
        param.mul_(1 - lr * group["weight_decay"]).sub_(update.to(param.dtype), alpha=lr)


def rotated_update(
    exp_avg: Tensor, grad_square: Tensor, shape: Rotation, stored: Sequence[Tensor], number: float, beta1: float
) -> Tensor:
    r"""Rotate a momentum, and scale it.

    .. math::
        u = L^{-1/2} m R^{-1/2}, \quad s = \frac{|\hat m|}{\sqrt{\overline{|g|^2}}}, \quad
        c = \min\Big(\frac{s \, |m|_1}{\langle m, u \rangle}, \frac{1}{\mathrm{rms}(u)}\Big)

    A step of AdamW lowers the loss by about :math:`\eta s |m|_1`. The scale c matches that, so AdamW's learning rate
    applies, and no update is longer than AdamW's longest.
    """
    m = exp_avg.to(grad_square.dtype)
    u = shape.rotate(m, stored)
    if u.numel():
        u = u / (u.abs().amax() + _TINY)  # the scale cancels, but squares would overflow without curvature
    signal = (m.norm() / (1 - beta1**number)) / ((grad_square / (1 - _BETA_SIGNAL**number)).sqrt() + _TINY)
    scale = signal * m.abs().sum() / ((m * u).sum() + _TINY)
    rms = u.norm() / u.count_nonzero().clamp(min=1).sqrt()  # rows of a table that did not occur do not count
    update: Tensor = u * scale.clamp(min=0.0).minimum(1 / (rms + _TINY))
    return update


def condition(shape: Rotation, stored: Sequence[Tensor], damping: float) -> dict[str, Tensor]:
    """The condition of the damped factors, and the share of their directions that damping dominates. For diagnosis."""
    if not isinstance(shape, Matrix):
        return {}
    values = [torch.linalg.eigvalsh(factor.double()).flatten() for factor in stored[:2]]
    relative = [
        each / (each.sum() / cut.length + _TINY) for each, cut in zip(values, (shape.rows, shape.columns), strict=True)
    ]
    damped = torch.cat(relative) + damping
    return {"condition": damped.max() / damped.min(), "damped": torch.cat(relative).lt(damping).double().mean()}


@lru_cache(maxsize=65536)
def rotation_for(shape: tuple[int, ...], block_size: int, kind: str) -> Rotation:
    """Choose the curvature's shape for a parameter."""
    if len(shape) < 2 or 0 in shape:
        return Elementwise(shape)
    return Matrix(shape, block_size, is_table=kind == "table", is_stack=kind == "stack" and len(shape) > 2)
