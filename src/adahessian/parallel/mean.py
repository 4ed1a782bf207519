"""The mean of Hessian-vector products over micro-batches and over ranks."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from adahessian.algorithm.shapes import CurvatureShape, as_real
from adahessian.algorithm.state import curvature_dtype
from adahessian.base.shards import shard_like
from adahessian.parallel.ranks import Ranks


class ProductMean:
    r"""The weighted mean of the products H z over the ranks r and their micro-batches j, which all use the same z.

    .. math::
        \overline{H z} = \frac{\sum_r \sum_j w_{rj} \, H_{rj} z}{\sum_r \sum_j w_{rj}}

    One reduction per device and dtype sums a buffer of all products, marks of the blocks that took part in a loss, one
    flag per parameter that took part, and the weight. ``shapes`` are those of whole parameters.
    """

    def __init__(self, params: Sequence[Tensor], shapes: Sequence[CurvatureShape], num_probes: int) -> None:
        self._params, self._shapes = list(params), list(shapes)
        self._took_part = [False] * len(params)
        self._weight = 0.0
        *self._sums, self._marks = ([*params] for _ in range(num_probes + 1))  # replaced by views of the buffers
        self._buffers: list[tuple[Tensor, list[int]]] = []
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, param in enumerate(params):
            alike.setdefault((param.device, curvature_dtype(param)), []).append(i)
        for (device, dtype), own in alike.items():
            parts = [shapes[i].shape for i in own] * num_probes + [shapes[i].marked for i in own]
            sizes = [*map(math.prod, parts), len(own) + 1]
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
            views = (view.view(part) for view, part in zip(buffer.split(sizes), parts, strict=False))
            for tensors in (*self._sums, self._marks):
                for i in own:
                    tensors[i] = next(views)
            self._buffers.append((buffer, own))
        self.nbytes = sum(buffer.nbytes for buffer, _ in self._buffers)  # sent by each rank

    @torch.no_grad()
    def add(
        self, products: Sequence[Sequence[Tensor | None]], gradients: Sequence[Tensor | None], weight: float
    ) -> None:
        """Add the products of a batch, one list per probe, and the gradients of its loss.

        Parameters that took no part in the loss have None. A batch of weight 0 is ignored, even if it contains NaN.
        """
        if weight == 0:
            return
        self._weight += weight
        for sums, of_probe in zip(self._sums, products, strict=True):
            for i, (product, gradient) in enumerate(zip(of_probe, gradients, strict=True)):
                if product is not None and gradient is not None:
                    self._took_part[i] = True
                    sums[i].add_(as_real(product), alpha=weight)
                    self._marks[i].add_(self._shapes[i].touched(as_real(product), as_real(gradient)))

    @torch.no_grad()
    def result(self, ranks: Ranks | None) -> tuple[list[list[Tensor | None]], list[Tensor | None]]:
        """Return the mean of everything added, on this rank and on all others. With ranks, call it only once.

        In place of gradients, it returns marks, which are nonzero for the blocks that took part in a loss.
        """
        products: list[list[Tensor | None]] = [[None] * len(self._params) for _ in self._sums]
        marks: list[Tensor | None] = [None] * len(self._params)
        for buffer, own in self._buffers:
            weight = self._reduce(buffer, own, ranks)
            for i in [i for i in own if self._took_part[i]]:
                for of_probe, sums in zip(products, self._sums, strict=True):
                    of_probe[i] = _like(self._params[i], sums[i] / weight)
                marks[i] = _like(self._params[i], self._shapes[i].spread(self._marks[i]))
        return products, marks

    def _reduce(self, buffer: Tensor, own: list[int], ranks: Ranks | None) -> float | Tensor:
        """Sum a buffer over the ranks, and return the sum of the weights."""
        if ranks is None:
            return self._weight
        took_part = [self._took_part[i] for i in own]
        facts = buffer[-len(own) - 1 :]
        facts.copy_(torch.tensor([*took_part, self._weight], dtype=buffer.dtype), non_blocking=True)
        ranks.sum_(buffer)
        if not all(took_part):  # other ranks may differ, and only then is a sync worthwhile
            for i, count in zip(own, facts[:-1].tolist(), strict=True):
                self._took_part[i] = count > 0
        return facts[-1]


class ShardedMean:
    """The same mean for products that are already weighted, summed over ranks and sharded like ``params``."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = list(params)
        self._weight = 0.0
        self._lists: list[Sequence[Tensor | None]] = []

    def add(
        self, products: Sequence[Sequence[Tensor | None]], gradients: Sequence[Tensor | None], weight: float
    ) -> None:
        """Add the products and marks of a batch."""
        new = [*products, gradients]
        self._weight += weight
        self._lists = [list(map(_sum, *pair)) for pair in zip(self._lists, new, strict=True)] if self._lists else new

    def result(self, ranks: Ranks | None) -> tuple[list[list[Tensor | None]], list[Tensor | None]]:
        """Return the mean and the marks, as sharded tensors."""
        total = torch.tensor(self._weight, dtype=torch.float64, device=self._params[0].device)
        if ranks is not None:
            ranks.sum_(total)
        means = [
            [None if part is None else shard_like(param, part / total, param.shape) for part, param in pairs]
            for pairs in (zip(parts, self._params, strict=True) for parts in self._lists)
        ]
        return means[:-1], means[-1]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _like(param: Tensor, reals: Tensor) -> Tensor:
    return torch.complex(*reals) if param.is_complex() else reals
