"""Inverse roots of Kronecker factors. Newton-Schulz iterations handle all blocks of one size together."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from adahessian.algorithm.kronecker import TINY, Cut, Family, Gather, Stored, cat, over_shards
from adahessian.base.precision import accurate_matmul

_ROUNDING = 8  # the least damping, in units of the rounding error of the trace
_SMALL = 64  # a GPU is as fast with matrices of this size as with smaller ones
_ENOUGH = 2**24  # elements of factors that keep a device busy with their roots

Side = tuple[Family, int, Cut]  # the rows (0) or columns (1) of a family
Wholes = dict[tuple[Family, int], Tensor]  # traces over all ranks


def root_refreshes(
    families: Sequence[Family], stored: Stored, measurements: Tensor, least: float, gather: Gather | None = None
) -> list[Callable[[], None]]:
    """Return functions that refresh the inverse roots. Each function handles factors of one size.

    The damping is relative to the mean eigenvalue. After n measurements it is 1 / n, but at least ``least``, because
    factors from few measurements are unreliable. A root keeps its old value if the new one is not finite.
    """
    groups: list[tuple[int, list[Side]]] = []
    waiting: dict[int, list[Side]] = {}
    cuts = [(family, key, cut) for family in families for key, cut in enumerate(family.form.cuts[:2]) if cut]
    for family, key, cut in cuts:
        size = _SMALL if measurements.is_cuda and 1 < cut.size < _SMALL else cut.size
        waiting.setdefault(size, []).append((family, key, cut))
        if sum(sum(each.counts) * side.blocks for each, _, side in waiting[size]) * size**2 > _ENOUGH:
            groups.append((size, waiting.pop(size)))
    wholes: Wholes = {}
    if gather is not None and cuts:
        matrices = [family for family, key, _ in cuts if key == 0]
        traces = over_shards(matrices, [_trace(family.read(stored, 0))[None] for family in matrices], gather)
        wholes = {(family, 0): each.sum((0, 1)) for family, each in zip(matrices, traces, strict=True)}
    refresh = partial(_refresh, stored, measurements, least, wholes)
    return [partial(refresh, size, sides) for size, sides in (*groups, *waiting.items())]


def _refresh(
    stored: Stored, measurements: Tensor, least: float, wholes: Wholes, size: int, sides: Sequence[Side]
) -> None:
    dampings = measurements.clamp(min=1).reciprocal().clamp(min=least)
    factors, numbers = [], []
    for family, key, cut in sides:
        factor = family.read(stored, key)
        factors.append(pad(factor, [0, size - cut.size] * 2) if size > cut.size else factor)
        # The mean is over all blocks of a dimension, so that blocks keep their relative size.
        mean = (wholes[family, key] if (family, key) in wholes else _trace(factor)) / cut.length
        numbers.append(torch.stack([mean, family.spread(dampings)])[..., None].expand(2, *factor.shape[:2]))
    with accurate_matmul(factors[0]):
        roots = inverse_roots(
            cat([factor.flatten(0, 1) for factor in factors]),
            *cat([each.flatten(1).mT for each in numbers]).unbind(1),
            # No eigenvalue is larger than the trace, which is the mean times the length.
            condition=1.01 * max(cut.length for _, _, cut in sides) / least + 1.0,
        ).split([each[0].numel() for each in numbers])
    for (family, key, cut), factor, each in zip(sides, factors, roots, strict=True):
        old, root = family.read(stored, key + 2), each.view_as(factor)[..., : cut.size, : cut.size]
        is_valid = root.sum((-2, -1), keepdim=True).isfinite() & family.spread(measurements, 4).gt(0)
        family.write(stored, key + 2, torch.where(is_valid, root, old))


def _trace(factor: Tensor) -> Tensor:
    return factor.diagonal(dim1=-2, dim2=-1).sum((-2, -1))


def inverse_roots(factors: Tensor, means: Tensor, damping: Tensor, *, condition: float) -> Tensor:
    r"""Compute :math:`(L / \bar\lambda + \delta I)^{-1/2}` of a batch of matrices by coupled Newton-Schulz iterations.

    .. math::
        T = \tfrac{\rho}{2} (3 I - \rho^2 Z Y), \quad Y \leftarrow Y T, \quad Z \leftarrow T Z, \quad
        \rho^2 = \frac{3}{1 + l + l^2}

    ``condition`` bounds the condition of all matrices, which gives l, a lower bound of the square roots of Z Y's
    eigenvalues, all at most 1. The scale :math:`\rho` makes the bound 2.6 times as large per iteration while it is
    small (Chen and Chow, 2014). Without the scale, it is 1.5 times as large. The mean scales only the length of a
    direction, and dividing by the mean prevents overflow. The damping is raised if rounding errors of the iterations
    would exceed it.
    """
    size, eps = factors.shape[-1], torch.finfo(factors.dtype).eps
    a = factors / means.clamp(min=TINY)[:, None, None]
    diagonal = a.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(damping.maximum(_ROUNDING * eps * diagonal.sum(-1).clamp(min=size))[:, None])
    if size == 1:
        return a.rsqrt()
    # Both norms are at least the largest eigenvalue. The last factor allows for rounding errors.
    bound = a.abs().sum(-1, keepdim=True).amax(-2, keepdim=True).minimum(a.square().sum((-2, -1), keepdim=True).sqrt())
    bound = bound * 1.001
    eye = torch.eye(size, dtype=a.dtype, device=a.device).expand_as(a)
    y, z = a / bound, eye
    for number, rho in enumerate(_scales(min(condition, 1 / (_ROUNDING * eps)), eps)):
        # The first product is with the identity.
        start, cube = 1.5 * rho, -0.5 * rho**3
        step = torch.baddbmm(eye, z, y, beta=start, alpha=cube) if number else start * eye + cube * y
        y, z = y @ step, step @ z if number else step
    root = z * bound.rsqrt()
    return 0.5 * (root + root.mT)


@lru_cache
def _scales(condition: float, eps: float) -> list[float]:
    """Return the scale of each iteration that matrices of this condition need to reach rounding errors."""
    low, scales = condition**-0.5, []
    while low < 1 - eps**0.5:
        rho = (3 / (1 + low + low * low)) ** 0.5
        low = min(rho / 2 * low * (3 - rho * rho * low * low), 1.0)
        scales.append(rho)
    return [*scales, 1.0]  # the last iterations converge quadratically
