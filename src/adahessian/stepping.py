"""What takes part in a step of a group: looked up and checked once, and then recognised."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from adahessian import state as states
from adahessian.averaging import Blocks
from adahessian.fused import FusedTensors, Fusion, Member
from adahessian.sharding import is_sharded, local
from adahessian.state import Group, State

Item = TypeVar("Item")

# All other settings may change from step to step.
_DECISIVE = ("block_size", "blocks", "averaging", "foreach", "fused", "capturable")


class Stepping:
    """The parameters of a group that have a gradient, with their blocks and states.

    Args:
        group: The group.
        params: Those of its parameters that have a gradient.
        state: The states of all parameters, where there are any.

    Raises:
        RuntimeError: If a state does not fit its parameter.
    """

    def __init__(self, group: Group, params: list[Tensor], state: Mapping[Tensor, State]) -> None:
        self.group = group
        self.params = params
        for param in params:
            known = state.get(param)
            if known and (problem := states.misfit(known, param, states.blocks(param, group))) is not None:
                raise RuntimeError(problem)
        # What is on this rank: the shards of sharded parameters, with theirs of the state.
        self.here: list[Tensor] = [local(param) for param in params]
        self.blocks: list[Blocks] = [states.blocks(shard, group) for shard in self.here]
        self.states: list[State] = []
        self.fused: list[tuple[FusedTensors, list[int]]] = []
        self.plain: list[int] = []
        self._settings = decisive_settings(group)
        self._ids = list(map(id, params))
        self._forms = forms(params)
        self._whole_states: list[State] = []
        self._tensors: list[Tensor] = []
        self._sharded = any(here is not param for here, param in zip(self.here, params, strict=True))
        self._counter: Tensor | None = None

    def complete(self, state: dict[Tensor, State], fusion: Fusion) -> None:
        """Make the states that are missing, and decide which parameters the fused kernels take."""
        if self.states or not self.params:
            return
        for param in self.params:
            states.complete(state[param], param, self.group)
        self._whole_states = [state[param] for param in self.params]
        if not self.group["capturable"]:
            self._join_counts()
        self._tensors = _tensors_of(self._whole_states)
        self.states = [
            {key: local(value) for key, value in whole.items()} if is_sharded(param) else whole
            for param, whole in zip(self.params, self._whole_states, strict=True)
        ]
        self.fused, self.plain = fusion.split([self.member(i) for i in range(len(self.params))], self.states)

    def is_current(self, params: list[Tensor], state: Mapping[Tensor, State]) -> bool:
        """Whether all of it is still so for these parameters."""
        return (
            # By identity, as tensors are compared by their elements.
            list(map(id, params)) == self._ids
            and len(self._whole_states) == len(params)
            and self._settings == decisive_settings(self.group)
            and forms(params) == self._forms
            and all(map(operator.is_, map(state.get, params), self._whole_states))
            and all(map(operator.is_, _tensors_of(self._whole_states), self._tensors))
            and not (self._sharded and not all(map(operator.is_, map(local, params), self.here)))
        )

    def count(self) -> list[float]:
        """Count a step; returns the count of each parameter, unless these are on the device."""
        if self._counter is None:
            torch._foreach_add_([state["step"] for state in self._whole_states], 1)
            return []
        self._counter.add_(1)
        counts: list[float] = self._counter.tolist()
        return counts

    def gradient(self, i: int) -> Tensor:
        """The gradient of a parameter, as far as it is on this rank."""
        gradient = self.params[i].grad
        assert gradient is not None
        return gradient if self.here[i] is self.params[i] else local(gradient)

    def gradients(self, chosen: list[int]) -> list[Tensor]:
        """The gradients of several parameters, as far as they are on this rank."""
        if self._sharded:
            return [self.gradient(i) for i in chosen]
        return [self.params[i].grad for i in chosen]  # type: ignore[misc]

    def is_flat(self) -> bool:
        """Whether all gradients are zero. Reading waits for the device."""
        return not any(self.gradient(i).any() for i in range(len(self.params)))

    def member(self, i: int) -> Member:
        """A parameter as the fused kernels know it; its position is of no account in a step."""
        return self.here[i], self.group, 0

    def _join_counts(self) -> None:
        """Keep the step counts of all parameters in one tensor, of which each has its own element."""
        self._counter = torch.stack([state["step"] for state in self._whole_states])
        for state, count in zip(self._whole_states, self._counter.unbind(), strict=True):
            state["step"] = count


def picked(items: list[Item], chosen: list[int]) -> list[Item]:
    """Those that are chosen, by numbers that ascend; nearly always these are all of them."""
    return items if len(chosen) == len(items) else [items[i] for i in chosen]


_LOOK = operator.attrgetter("shape", "dtype", "device")


def forms(params: Sequence[Tensor]) -> list[Any]:
    """What tensors look like, to be compared."""
    # Without a call of the interpreter for each: a model may have hundreds.
    return [*map(_LOOK, params), *map(Tensor.stride, params)]


def decisive_settings(group: Group) -> tuple[Any, ...]:
    """The settings that decide how a step is taken, and a measurement."""
    return (*(group[name] for name in _DECISIVE), isinstance(group["lr"], Tensor))


def _tensors_of(of_params: list[State]) -> list[Tensor]:
    return [state[key] for key in ("exp_avg", "hessian_rms", "step") for state in of_params]
