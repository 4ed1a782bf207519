"""What takes part in a measurement: looked up once, then recognised. Draws its probes and averages its diagonals."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adahessian import state as states
from adahessian.averaging import Blocks, Estimate, estimate_all
from adahessian.curvature.hutchinson import accumulation_dtype, as_reals
from adahessian.curvature.probes import ProbeKey, rademacher_like, start_of
from adahessian.fused import Fusion, Member
from adahessian.sharding import is_sharded, local, local_part
from adahessian.state import Group
from adahessian.stepping import decisive_settings, forms

_PLACE = operator.attrgetter("shape", "device")
_DTYPE = operator.attrgetter("dtype")


class Measuring:
    """Parameters in the order in which they are measured, with their blocks.

    Args:
        members: The parameters.
        groups: All groups of the optimizer.
        fusion: Decides which parameters the fused kernels take.
        of_shards: Whether it is about what is on this rank of those that are spread over several.
    """

    def __init__(self, members: Sequence[Member], groups: Sequence[Group], fusion: Fusion, *, of_shards: bool) -> None:
        self.params = [param for param, _, _ in members]
        self._groups = [group for _, group, _ in members]
        self._positions = [position for _, _, position in members]
        self._is_sharded = any(map(is_sharded, self.params))
        here = [local(param) for param in self.params] if of_shards else self.params
        self._blocks: list[Blocks] = list(map(states.blocks, here, self._groups))
        self._fused, self._plain = fusion.split(list(zip(here, self._groups, self._positions, strict=True)))
        self._places = list(map(_PLACE, self.params))
        self._ids = list(map(id, self.params))
        self._look = _look(self.params, groups)

    def is_current(self, params: Sequence[Tensor], groups: Sequence[Group]) -> bool:
        """Whether all of it is still so for these parameters; shards may be others at any time."""
        # By identity, as tensors are compared by their elements.
        same = not self._is_sharded and list(map(id, params)) == self._ids
        return same and _look(params, groups) == self._look

    def draw(self, probe: int, out: Sequence[Tensor] | None) -> list[Tensor]:
        """The signs of a probe of the measurement that is due, in new tensors or in those that are given."""
        signs = list(out) if out is not None else [torch.empty(0)] * len(self.params)
        for tensors, chosen in self._fused:
            if out is None:
                for i in chosen:
                    signs[i] = torch.empty_like(self.params[i], memory_format=torch.contiguous_format)
            of_groups = [self._groups[i] for i in chosen]
            keys = [start_of(group["seed"], group["measurements"], probe) for group in of_groups]
            tensors.draw([signs[i] for i in chosen], keys)
        drawn = rademacher_like(
            [self.params[i] for i in self._plain],
            [
                ProbeKey(self._groups[i]["seed"], self._groups[i]["measurements"], self._positions[i])
                for i in self._plain
            ],
            probe,
        )
        for i, sign in zip(self._plain, drawn, strict=True):
            signs[i] = sign if out is None else signs[i].copy_(sign)
        return signs

    def estimates(self, diagonal: Sequence[object], gradients: Sequence[object] | None) -> dict[Tensor, Estimate]:
        """Diagonals averaged over the blocks of what is here of each parameter.

        Raises:
            ValueError: If a diagonal or a gradient is no tensor in the shape and on the device of its parameter.
        """
        parts = self._checked("diagonal", diagonal)
        slopes = None if gradients is None else self._checked("gradient", gradients)
        if self._is_sharded:
            parts = list(map(local_part, parts, self.params))
            slopes = None if slopes is None else list(map(local_part, slopes, self.params))
        found: dict[Tensor, Estimate] = {}
        for tensors, chosen in self._fused:
            averages = tensors.average(
                [parts[i] for i in chosen], None if slopes is None else [slopes[i] for i in chosen]
            )
            found |= dict(zip([self.params[i] for i in chosen], map(Estimate, *averages), strict=True))
        plain = estimate_all(
            [self._blocks[i] for i in self._plain],
            [as_reals(parts[i].to(accumulation_dtype(self.params[i].dtype))) for i in self._plain],
            None if slopes is None else [as_reals(slopes[i]) for i in self._plain],
            [self._groups[i]["averaging"] for i in self._plain],
        )
        return found | dict(zip([self.params[i] for i in self._plain], plain, strict=True))

    def _checked(self, what: str, tensors: Sequence[object]) -> list[Tensor]:
        found = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        if list(map(_PLACE, found)) != self._places:
            for param, tensor in zip(self.params, tensors, strict=True):
                place = f"a {type(tensor).__name__}"
                if isinstance(tensor, Tensor):
                    place = f"one of shape {tuple(tensor.shape)} on {tensor.device}"
                wanted = f"one of shape {tuple(param.shape)} on {param.device}"
                if place != wanted:
                    raise ValueError(f"a parameter needs a {what} like itself, {wanted}, but was fed {place}")
        return found


def _look(params: Sequence[Tensor], groups: Sequence[Group]) -> list[Any]:
    # Of parameters that are not measured nothing but the dtype is asked, by which the others have their positions: they
    # may have no shape yet.
    of_groups = [
        (id(group), decisive_settings(group), list(map(id, group["params"])), list(map(_DTYPE, group["params"])))
        for group in groups
    ]
    return [forms(params), of_groups]
