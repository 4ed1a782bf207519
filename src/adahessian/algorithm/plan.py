"""The plan of a step: which parameters share a device, a dtype and an implementation, with all that belongs to them.

A plan is made once and then recognized. It is made anew when a parameter, an option that matters or a state has been
exchanged for another.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from adahessian.algorithm.fused import FusedTensors, can_fuse
from adahessian.algorithm.probes import draw_like, probe_key
from adahessian.algorithm.shapes import Blocks, Estimate, denominators, hutchinson, views
from adahessian.algorithm.state import COUNTS, Group, State, init_state, new_counts, shape_of, state_problem
from adahessian.algorithm.update import fold_measurement, measurement_weight, take_step
from adahessian.base.dtypes import as_real
from adahessian.base.shards import agree, is_sharded, local, local_part, sum_over_shards

# Options that decide how a bucket works. All others may change from step to step.
_DECISIVE = operator.itemgetter("block_size", "averaging", "signed", "fused", "capturable", "sparse")
_FORM = operator.attrgetter("shape", "dtype", "device")
_MOST_SELECTIONS = 16

Places = tuple[int, ...]
States = Mapping[Tensor, State]
Measurement = dict[Tensor, Estimate]
Lists = Sequence[Sequence[Any]]  # of tensors, one list per probe


class Bucket:
    """Parameters of one group that share device, dtype and implementation.

    Their probes are drawn by ``positions``. ``kernels`` are the fused kernels, if they take these parameters.
    """

    def __init__(
        self, group: Group, params: list[Tensor], positions: list[int], state: States, kernels: FusedTensors | None
    ) -> None:
        self.group = group
        self.params = params
        self.here = list(map(local, params))
        self.shapes = [shape_of(shard, group) for shard in self.here]
        self.is_sharded = any(map(is_sharded, params))
        self.is_complex = params[0].is_complex()
        self._positions = positions
        self.kernels = kernels
        self._counts: dict[str, Tensor] = {}
        self._find_states(state)

    def _find_states(self, state: States) -> None:
        self._known = [state.get(param) for param in self.params]
        self._tensors = self._tensors_of_states()
        self._states = [
            own if own and {"exp_avg", *shape.stored, *COUNTS} <= own.keys() else None
            for own, shape in zip(self._known, self.shapes, strict=True)
        ]
        self._selections: dict[Places, Bucket] = {}
        # For use as soon as all parameters have a state.
        self._exp_avgs = [local(own["exp_avg"]) for own in self._states if own]
        pairs = zip(self._states, self.shapes, strict=True)
        self._stored = [tuple(local(own[key]) for key in shape.stored) for own, shape in pairs if own]

    def is_current(self, state: States) -> bool:
        """Whether states and shards are still the ones that this bucket knows."""
        return (
            all(map(operator.is_, map(state.get, self.params), self._known))
            and all(map(operator.is_, self._tensors_of_states(), self._tensors))
            and not (self.is_sharded and not all(map(operator.is_, map(local, self.params), self.here)))
        )

    def select(self, places: Places, state: States) -> Bucket:
        """Return the bucket of some of the parameters."""
        if len(places) == len(self.params):
            return self
        if places not in self._selections:
            if len(self._selections) >= _MOST_SELECTIONS:
                self._selections.clear()
            params, positions = [self.params[i] for i in places], [self._positions[i] for i in places]
            kernels = None if self.kernels is None else self.kernels.select(places)
            self._selections[places] = Bucket(self.group, params, positions, state, kernels)
        return self._selections[places]

    def draw(self, probe: int, out: Sequence[Tensor] | None) -> list[Tensor]:
        """Draw one probe of the next measurement, of whole parameters where they are sharded."""
        key = probe_key(self.group["seed"], self.group["measurements"], probe)
        if self.kernels is None or self.is_sharded:
            return list(map(draw_like, self.params, repeat(key), self._positions, out or repeat(None)))
        signs = out or [torch.empty_like(param, memory_format=torch.contiguous_format) for param in self.params]
        self.kernels.draw(signs, key)
        return list(signs)

    def reduce(self, probes: Lists | None, products: Lists, gradients: Sequence[Tensor] | None) -> list[Estimate]:
        """Reduce probes and products to what is stored of the parameters on this rank."""
        for prepare in (local_part,) * self.is_sharded + (_as_real,) * self.is_complex:
            probes = None if probes is None else [list(map(prepare, each, self.params)) for each in probes]
            products = [list(map(prepare, each, self.params)) for each in products]
            gradients = None if gradients is None else list(map(prepare, gradients, self.params))
        of_params = list(zip(*products, strict=True))
        nothing = [None] * len(self.params)
        signs = nothing if probes is None else zip(*probes, strict=True)
        signed = self.group["signed"]
        totals = [partial(sum_over_shards, param) for param in self.params]
        if self.kernels is None:
            members = zip(self.shapes, signs, of_params, gradients or nothing, totals, strict=True)
            estimates = [shape.reduce(z, p, g, signed=signed, total=total) for shape, z, p, g, total in members]
        else:
            diagonals = [hutchinson(z, product, signed=signed) for z, product in zip(signs, of_params, strict=True)]
            values, flags = self.kernels.reduce(diagonals, gradients)
            estimates = [Estimate((each,), flag) for each, flag in zip(values, flags.unbind(), strict=True)]
        if not (self.group["steady_start"] and self.group["measurements"] == 0):
            return estimates
        return [
            Estimate(shape.steady(estimate.values, total), estimate.not_finite)
            for shape, estimate, total in zip(self.shapes, estimates, totals, strict=True)
        ]

    def complete(self, places: Places, state: dict[Tensor, State]) -> None:
        """Make the states that some of the parameters lack, and keep the counts of all in one tensor each."""
        if self._counts and all(self._states[i] for i in places):
            return
        for i in places:
            init_state(state[self.params[i]], self.params[i], self.group)
        for name in COUNTS:
            self._counts[name] = new_counts(name, len(self.params), self.here[0], self.group)
            for param, place in zip(self.params, self._counts[name].unbind(), strict=True):
                if own := state.get(param):
                    place.copy_(torch.as_tensor(own.get(name, 0.0)))
                    own[name] = place
        self._find_states(state)

    def step(self, measurement: Measurement, state: States) -> None:
        """Take one step, with a new measurement of some of the parameters."""
        self._add("step", 1)
        if measurement and (places := tuple(i for i, param in enumerate(self.params) if param in measurement)):
            measured = self.select(places, state)
            measured._fold([measurement[param] for param in measured.params])
        if self.group["capturable"]:
            self._take_step(self._count("step"))
            return
        counts = self._count("step").tolist()
        if counts.count(counts[0]) == len(counts):
            self._take_step(counts[0])
            return
        # Parameters without a gradient now and then have taken fewer steps, which changes their bias correction.
        for count in sorted(set(counts)):
            self.select(tuple(i for i, own in enumerate(counts) if own == count), state)._take_step(count)

    def _fold(self, estimates: Sequence[Estimate]) -> None:
        not_finite = torch.stack([estimate.not_finite for estimate in estimates]).bool()
        weights = measurement_weight(self._count("measurements") + 1, float(self.group["betas"][1]))
        if self.kernels is not None:
            values = [estimate.values[0] for estimate in estimates]
            self.kernels.fold([each[0] for each in self._stored], values, not_finite.int(), weights)
        else:
            of_params = zip(self._stored, estimates, weights.unbind(), not_finite.unbind(), strict=True)
            for tensors, estimate, weight, flag in of_params:
                for stored, values_of_one in zip(tensors, estimate.values, strict=True):
                    fold_measurement(stored, values_of_one, weight, flag)
        self._add("measurements", not_finite.logical_not())
        self._add("dropped", not_finite)

    def _take_step(self, number: float | Tensor) -> None:
        """Take the step of this number; a tensor holds one number per parameter."""
        group = self.group
        lr, beta1 = group["lr"], float(group["betas"][0])
        if isinstance(lr, Tensor):
            lr = lr.squeeze() if group["capturable"] else lr.item()
        eps, power = float(group["eps"]), float(group["hessian_power"])
        scales = {
            "gradient_scale": -1.0 if group["maximize"] else 1.0,
            "step_scale": lr / (beta1**number - 1),
            "decay": 1 - lr * float(group["weight_decay"]),
            "momentum_weight": 1 - beta1,
        }
        grads = [param.grad for param in self.params if param.grad is not None]
        if self.is_sharded:
            grads = list(map(local, grads))
        if self.kernels is not None:
            rms = [each[0] for each in self._stored]
            self.kernels.step(self.here, grads, self._exp_avgs, rms, eps=eps, power=power, **scales)
            return
        lists = [self.here, grads, self._exp_avgs]
        if self.is_complex:
            lists = [list(map(as_real, each)) for each in lists]
        # Views are made anew, because users may exchange the memory of a parameter.
        params, grads, exp_avgs = views(self.shapes, *lists)
        take_step(params, grads, exp_avgs, denominators(self.shapes, self._stored, power, eps), **scales)

    def _count(self, name: str) -> Tensor:
        """The counts of all parameters in one tensor."""
        return self._counts[name] if self._counts else torch.stack([own[name] for own in self._states if own])

    def _add(self, name: str, numbers: int | Tensor) -> None:
        if self._counts:
            self._counts[name].add_(numbers)
        else:
            counts = [own[name] for own in self._states if own]
            torch._foreach_add_(counts, numbers if isinstance(numbers, int) else list(numbers.to(counts[0]).unbind()))

    def _tensors_of_states(self) -> list[Any]:
        return [value for own in self._known if own for value in own.values()]


class Plan:
    """The buckets of all groups but sparse ones."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self._look: list[Any] = []
        self._state: dict[Tensor, State] = {}
        self._places: dict[Places, list[tuple[Bucket, list[int]]]] = {}

    def refresh(self, groups: Sequence[Group], state: dict[Tensor, State]) -> None:
        """Make the plan anew if it is not that of these groups and states.

        Raises:
            RuntimeError: If a state does not fit its parameter.
        """
        look = list(map(_look, groups))
        if look == self._look and all(bucket.is_current(state) for bucket in self.buckets):
            return
        self._look, self._places = [], {}
        self.buckets = list(_make_buckets(groups, state))
        self._look, self._state = look, state

    def draw(self, params: Sequence[Tensor], probe: int, out: Sequence[Tensor] | None) -> list[Tensor]:
        """Draw one probe of the next measurement."""
        signs = [torch.empty(0)] * len(params)
        for bucket, numbers in self._split(params):
            drawn = bucket.draw(probe, None if out is None else [out[k] for k in numbers])
            for k, tensor in zip(numbers, drawn, strict=True):
                signs[k] = tensor
        return signs

    def reduce(
        self, params: Sequence[Tensor], probes: Lists | None, products: Lists, gradients: Sequence[Any] | None
    ) -> Measurement:
        """Reduce the probes and products of parameters to a measurement of those that have a product."""
        took_part = [k for k, product in enumerate(products[0]) if product is not None] if products else []
        measurement: Measurement = {}
        for bucket, numbers in self._split([params[k] for k in took_part]):
            numbers = [took_part[k] for k in numbers]
            estimates = bucket.reduce(
                None if probes is None else [[each[k] for k in numbers] for each in probes],
                [[each[k] for k in numbers] for each in products],
                None if gradients is None else [gradients[k] for k in numbers],
            )
            measurement.update(zip(bucket.params, estimates, strict=True))
        sharded = [
            param for bucket in self.buckets if bucket.is_sharded for param in bucket.params if param in measurement
        ]
        if sharded:
            flags = agree([measurement[param].not_finite for param in sharded], sharded)
            for param, flag in zip(sharded, flags, strict=True):
                measurement[param] = measurement[param]._replace(not_finite=flag)
        return measurement

    def step(self, ready: Collection[int], measurement: Measurement) -> None:
        """Take a step with all parameters that have a gradient, in the groups of these ids.

        The parameters of other groups only get their state.
        """
        for bucket in self.buckets:
            places = tuple([i for i, param in enumerate(bucket.params) if param.grad is not None])
            if places:
                bucket.complete(places, self._state)
                if id(bucket.group) in ready:
                    bucket.select(places, self._state).step(measurement, self._state)

    def _split(self, params: Sequence[Tensor]) -> list[tuple[Bucket, list[int]]]:
        """Find the buckets of parameters, with the place of each in this list."""
        key = tuple(map(id, params))
        if key not in self._places:
            numbers = {number: k for k, number in enumerate(key)}
            found = []
            for bucket in self.buckets:
                places = tuple(i for i, param in enumerate(bucket.params) if id(param) in numbers)
                if places:
                    chosen = bucket.select(places, self._state)
                    found.append((chosen, [numbers[id(param)] for param in chosen.params]))
            if len(self._places) >= _MOST_SELECTIONS:
                self._places.clear()
            self._places[key] = found
        return self._places[key]


def parameters_of(groups: Sequence[Group]) -> Iterator[tuple[Tensor, Group, int]]:
    """Each parameter with its group and the position by which its probes are drawn; sparse groups are left out.

    A complex parameter takes two positions, because it counts as two real ones.
    """
    position = 0
    for group in groups:
        for param in group["params"] if not group["sparse"] else ():
            yield param, group, position
            position += 2 if param.is_complex() else 1


def _make_buckets(groups: Sequence[Group], state: States) -> Iterator[Bucket]:
    found: dict[tuple[Any, ...], tuple[Group, list[Tensor], list[int]]] = {}
    for param, group, position in parameters_of(groups):
        if not _has_shape(param):
            continue
        known = state.get(param)
        if known and (problem := state_problem(known, param, group)) is not None:
            raise RuntimeError(problem)
        if known and known.get("exp_avg", param).dtype != param.dtype:
            raise RuntimeError(
                f"state: 'exp_avg' has dtype {known['exp_avg'].dtype}, but its parameter {param.dtype}. Cast the model "
                "before the first step, or load the optimizer's state_dict again afterwards."
            )
        here = local(param)
        of_shard = {key: local(value) for key, value in known.items()} if known and "hessian_rms" in known else None
        fused = can_fuse(here, shape_of(here, group), group, of_shard)
        _, params, positions = found.setdefault((id(group), here.device, here.dtype, fused), (group, [], []))
        params.append(param)
        positions.append(position)
    for (_, _, _, fused), (group, params, positions) in found.items():
        kernels = None
        if fused:
            shards = list(map(local, params))
            blocks = [shape for shard in shards if isinstance(shape := shape_of(shard, group), Blocks)]
            kernels = FusedTensors(shards, blocks, positions, signed=group["signed"])
        yield Bucket(group, params, positions, state, kernels)


def _has_shape(param: Tensor) -> bool:
    """Whether a parameter has a shape and strides, unlike lazy ones and frozen ones in sparse layouts."""
    return param.layout is torch.strided and not is_lazy(param)


def _as_real(tensor: Tensor, _: Tensor) -> Tensor:
    return as_real(tensor)


def _look(group: Group) -> tuple[Any, ...]:
    """What a plan depends on, to be compared. Lists are made without a call of the interpreter per parameter."""
    params = group["params"]
    if group["sparse"]:
        return (id(group), len(params))
    params = list(filter(_has_shape, params))
    options = (*_DECISIVE(group), isinstance(group["lr"], Tensor))
    return id(group), options, list(map(id, params)), list(map(_FORM, params)), list(map(Tensor.stride, params))
