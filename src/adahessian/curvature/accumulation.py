"""The mean of measurements, over micro-batches and over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from adahessian.averaging import Blocks
from adahessian.curvature.hutchinson import accumulation_dtype, as_reals
from adahessian.distributed import Ranks
from adahessian.sharding import local, sharded_like

Measured = tuple[dict[Tensor, Tensor], dict[Tensor, Tensor]]


class WeightedMean:
    r"""The weighted mean of signed diagonals: magnitudes come after it.

    .. math::
        D = \frac{\sum_r \sum_j w_{rj} \, z \odot (H_{rj} z)}{\sum_r \sum_j w_{rj}}

    over the ranks r and their micro-batches j, all with the same z. What each rank has is in one buffer, so that one
    reduction serves all: diagonals, which blocks took part, which parameters did, and the weights.

    Args:
        params: The parameters, in the order of what is added.
        blocks: The blocks of each; those of the shard on this rank, if shards are added.
    """

    def __init__(self, params: Sequence[Tensor], blocks: Sequence[Blocks]) -> None:
        self.params = list(params)
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, param in enumerate(params):
            alike.setdefault((param.device, accumulation_dtype(param.dtype).to_real()), []).append(i)
        self._parts = [_Part([params[i] for i in own], [blocks[i] for i in own], own) for own in alike.values()]

    def add(self, diagonal: Sequence[Tensor | None], gradients: Sequence[Tensor | None], weight: float) -> None:
        """Add a measurement: None for a parameter that took no part in the loss."""
        for part in self._parts:
            part.add([diagonal[i] for i in part.numbers], [gradients[i] for i in part.numbers], weight)

    @property
    def nbytes(self) -> int:
        """What each rank hands to the reduction."""
        return sum(part.nbytes for part in self._parts)

    def result(self, ranks: Ranks | None) -> Measured:
        """The mean of each parameter that took part anywhere, and for each what is not 0 where a block did."""
        diagonal: dict[Tensor, Tensor] = {}
        touched: dict[Tensor, Tensor] = {}
        for part in self._parts:
            part.result(ranks, diagonal, touched)
        return diagonal, touched


class _Part:
    """Parameters of one device and dtype."""

    def __init__(self, params: list[Tensor], blocks: list[Blocks], numbers: list[int]) -> None:
        self.numbers = numbers
        self._params = params
        self._blocks = blocks
        sizes = [math.prod(of.shape) for of in blocks]
        counts = [math.prod(of.block_shape) for of in blocks]
        dtype = accumulation_dtype(params[0].dtype).to_real()
        self._buffer = torch.zeros(sum(sizes) + sum(counts) + len(params) + 1, dtype=dtype, device=params[0].device)
        self._means, touched, self._took_part, self._weight = self._buffer.split(
            [sum(sizes), sum(counts), len(params), 1]
        )
        self._elements = [each.view(of.shape) for each, of in zip(self._means.split(sizes), blocks, strict=True)]
        self._touched = [each.view(of.block_shape) for each, of in zip(touched.split(counts), blocks, strict=True)]
        self._seen = [False] * len(params)

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    @torch.no_grad()
    def add(self, diagonal: Sequence[Tensor | None], gradients: Sequence[Tensor | None], weight: float) -> None:
        if weight == 0:
            return
        self._weight += weight
        for i, (values, gradient) in enumerate(zip(diagonal, gradients, strict=True)):
            if values is None or gradient is None:
                continue
            values, gradient = as_reals(local(values)), as_reals(local(gradient))
            self._elements[i].add_(values, alpha=weight)
            self._touched[i].add_(self._blocks[i].average((values.ne(0) | gradient.ne(0)).to(values), "magnitude"))
            self._took_part[i] += 1
            self._seen[i] = True

    @torch.no_grad()
    def result(self, ranks: Ranks | None, diagonal: dict[Tensor, Tensor], touched: dict[Tensor, Tensor]) -> None:
        if ranks is not None:
            ranks.sum_(self._buffer)
            if not all(self._seen):  # perhaps others have: only then is it worth waiting for the device
                self._seen = self._took_part.gt(0).tolist()
        self._means /= self._weight
        for param, of, seen, elements, blocks in zip(
            self._params, self._blocks, self._seen, self._elements, self._touched, strict=True
        ):
            if seen:
                # As if it were a gradient: one value for all elements of a block.
                spread = torch.empty_like(elements)
                of.view(spread).copy_(of.expand(blocks))
                diagonal[param], touched[param] = (_in_form_of(param, each) for each in (elements, spread))


def _in_form_of(param: Tensor, reals: Tensor) -> Tensor:
    if param.is_complex():
        return torch.complex(*reals)
    return reals if reals.shape == param.shape else sharded_like(param, reals, param.shape)
