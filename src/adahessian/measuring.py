"""What takes part in a measurement: looked up and checked once, and then recognised."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from adahessian import state as states
from adahessian.averaging import Blocks
from adahessian.fused import Fusion, Member
from adahessian.sharding import is_sharded, local
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
        self.groups = [group for _, group, _ in members]
        self.positions = [position for _, _, position in members]
        here = [local(param) for param in self.params] if of_shards else self.params
        self.is_sharded = any(map(is_sharded, self.params))
        self.blocks: list[Blocks] = list(map(states.blocks, here, self.groups))
        self.dtypes = [param.dtype for param in here]
        self.fused, self.plain = fusion.split(list(zip(here, self.groups, self.positions, strict=True)))
        self._places = list(map(_PLACE, self.params))
        self._ids = list(map(id, self.params))
        self._look = _look(self.params, groups)

    def is_current(self, params: Sequence[Tensor], groups: Sequence[Group]) -> bool:
        """Whether all of it is still so for these parameters; shards may be others at any time."""
        # By identity, as tensors are compared by their elements.
        same = not self.is_sharded and list(map(id, params)) == self._ids
        return same and _look(params, groups) == self._look

    def checked(self, what: str, tensors: Sequence[object]) -> list[Tensor]:
        """Tensors that are to be in the shapes of the parameters and on their devices.

        Raises:
            ValueError: If one is none, or is not.
        """
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
