"""The plan of a step: buckets of parameters that share a device, a dtype and an implementation.

A plan is built once and reused. It is rebuilt when a parameter, a state or an option that affects the buckets has been
replaced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import chain, repeat
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from adahessian.algorithm import kronecker
from adahessian.algorithm.fused import FusedTensors, can_draw, can_fuse
from adahessian.algorithm.probes import draw_like, probe_key
from adahessian.algorithm.roots import root_refreshes
from adahessian.algorithm.shapes import Blocks, Estimate, as_real, hutchinson
from adahessian.algorithm.state import COUNTS, Group, State, init_state, new_counts, shape_here, shape_of, state_problem
from adahessian.algorithm.update import fold_measurement, measurement_weight, take_step
from adahessian.base.errors import first_line
from adahessian.base.log import logger
from adahessian.base.shards import (
    agree,
    gather,
    gather_over,
    is_sharded,
    local,
    local_part,
    rows_cut_by,
    sum_over_shards,
)

# Options that buckets depend on. All others may change from step to step.
_DECISIVE = operator.itemgetter("block_size", "averaging", "signed", "fused", "capturable", "sparse")
_FORM = operator.attrgetter("shape", "dtype", "device")
_MOST_SELECTIONS = 16
_SMALL = 2**25  # elements. Temporary copies of fewer elements need little memory
# Roots cost more than the rest of a measurement. After this many measurements, another one hardly changes the factors.
_ALWAYS_REFRESHED, _REFRESH_EVERY = 20, 3

Places = tuple[int, ...]
States = Mapping[Tensor, State]
Measurement = dict[Tensor, Estimate]
Lists = Sequence[Sequence[Any]]  # of tensors, one list per probe
Run = Callable[[Hashable, Sequence[Callable[[], Any]]], Any]

_COMPILED: ContextVar[tuple[bool, Run | None]] = ContextVar("compiled", default=(False, None))


@contextmanager
def updates_compiled(enabled: bool, run: Run | None = None) -> Iterator[None]:
    """Inside the context, compile the arithmetic of curvature that rotates, which has many small kernels.

    ``run(key, updates)`` runs updates that are independent of each other. It may replay earlier updates with the same
    key, because they did the same computation in the same memory.
    """
    token = _COMPILED.set((enabled, run))
    try:
        yield
    finally:
        _COMPILED.reset(token)


def _one_by_one(key: Hashable, updates: Sequence[Callable[[], Any]]) -> None:
    for update in updates:
        update()


class Bucket:
    """Parameters of one group that share device, dtype and implementation.

    ``positions`` identify the parameters in probes. ``is_fused`` selects the fused kernels.
    """

    def __init__(
        self, group: Group, params: list[Tensor], positions: list[int], state: States, *, is_fused: bool
    ) -> None:
        self.group = group
        self.params = params
        self.here = list(map(local, params))
        self.shapes: list[Any] = [shape_here(param, group) for param in params]
        self.families = kronecker.families_of(self.shapes) if "damping" in group else None
        self.is_sharded = any(map(is_sharded, params))
        cut_by = _matrices_cut_by(params[0], group)
        self._gather = None if cut_by is None else partial(gather_over, *cut_by)
        self.is_complex = params[0].is_complex()
        self._positions = positions
        self.kernels = FusedTensors(self.here, self.shapes, positions, signed=group["signed"]) if is_fused else None
        self._drawing = self.kernels
        if self.families is not None and all(map(can_draw, self.here)):
            elements = [Blocks(tuple(param.shape)) for param in self.here]
            self._drawing = FusedTensors(self.here, elements, positions, signed=False)
        self._counts: dict[str, Tensor] = {}
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        # Tensors for numbers that change from step to step: step counts, lr, beta1, decay, counts of measurements.
        wide, each = torch.promote_types(params[0].dtype, torch.float32), (len(params),)
        self._numbers = [self.here[0].new_zeros(shape, dtype=wide) for shape in (each, (), (), (), each)]
        self._find_states(state)

    def _find_states(self, state: States) -> None:
        self._known = [state.get(param) for param in self.params]
        self._tensors = self._tensors_of_states()
        self._states = [
            own if own and {"exp_avg", *shape.stored, *COUNTS} <= own.keys() else None
            for own, shape in zip(self._known, self.shapes, strict=True)
        ]
        self._selections: dict[Places, Bucket] = {}
        # Used only once all parameters have a state.
        self._exp_avgs = [local(own["exp_avg"]) for own in self._states if own]
        pairs = zip(self._states, self.shapes, strict=True)
        self._stored = [tuple(local(own[key]) for key in shape.stored) for own, shape in pairs if own]

    def is_current(self, state: States) -> bool:
        """Return whether the states and shards are still the ones that this bucket was built for."""
        return (
            all(map(operator.is_, map(state.get, self.params), self._known))
            and all(map(operator.is_, self._tensors_of_states(), self._tensors))
            and not (self.is_sharded and not all(map(operator.is_, map(local, self.params), self.here)))
        )

    def select(self, places: Places, state: States) -> Bucket:
        """Return a bucket of the parameters at these places."""
        if len(places) == len(self.params):
            return self
        if places not in self._selections:
            if len(self._selections) >= _MOST_SELECTIONS:
                self._selections.clear()
            params, positions = [self.params[i] for i in places], [self._positions[i] for i in places]
            self._selections[places] = Bucket(self.group, params, positions, state, is_fused=self.kernels is not None)
        return self._selections[places]

    def draw(self, probe: int, out: Sequence[Tensor] | None) -> list[Tensor]:
        """Draw one probe of the next measurement. Sharded parameters get a probe for the whole parameter."""
        key = probe_key(self.group["seed"], self.group["measurements"], probe)
        if self._drawing is None or self.is_sharded:
            return list(map(draw_like, self.params, repeat(key), self._positions, out or repeat(None)))
        signs = out or [torch.empty_like(param, memory_format=torch.contiguous_format) for param in self.params]
        self._drawing.draw(signs, key)
        return list(signs)

    def reduce(self, probes: Lists | None, products: Lists, gradients: Sequence[Tensor] | None) -> list[Estimate]:
        """Reduce probes and products to the values that this rank stores."""
        probes = None if probes is None else list(map(self._prepare, probes))
        products = list(map(self._prepare, products))
        gradients = None if gradients is None else self._prepare(gradients)
        if self.families is not None:
            estimates: list[Estimate] = self._run(kronecker.reduce_rotations, self.families, products, gradients)
            return estimates
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

    def _prepare(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Take the parts of whole tensors that this rank reduces, and view complex tensors as real ones."""
        if self.is_complex:
            return list(map(as_real, tensors))
        # Factors of cut matrices need whole products.
        if self._gather is not None:
            return list(map(gather, tensors))
        return list(map(local_part, tensors, self.params)) if self.is_sharded else tensors

    def complete(self, places: Places, state: dict[Tensor, State]) -> None:
        """Create missing states of the parameters at these places, and keep each kind of count in one tensor."""
        if self._counts and all(self._states[i] for i in places):
            return
        for i in places:
            init_state(state[self.params[i]], self.params[i], self.group)
        for name in COUNTS:
            counts = new_counts(name, len(self.params), self.here[0], self.group)
            # A CUDA graph that the user captured knows the address of each step.
            is_joined = name != "step" or not self.group["capturable"]
            for param, place in zip(self.params, counts.unbind(), strict=True):
                own = state.get(param)
                if own and (is_joined or not isinstance(own.get(name), Tensor)):
                    if name in own:  # copying a number from the host would synchronize
                        place.copy_(torch.as_tensor(own[name]))
                    own[name] = place if is_joined else place.clone()
            if is_joined:
                self._counts[name] = counts
        self._find_states(state)

    def begin_step(self, measurement: Measurement, state: States) -> None:
        """Count a step and fold a measurement, which may cover only some of the parameters."""
        self._add("step", 1)
        if measurement and (places := tuple(i for i, param in enumerate(self.params) if param in measurement)):
            measured = self.select(places, state)
            measured._fold([measurement[param] for param in measured.params])
            if self.families is not None and (due := measured._due_for_roots()):
                measured.select(due, state)._refresh_roots()

    def step(self, state: States) -> None:
        """Finish the step that :meth:`begin_step` began."""
        if self.group["capturable"]:
            self._take_step(self._count("step"))
            return
        counts = self._count("step").tolist()
        # Parameters that sometimes have no gradient have taken fewer steps, which changes their bias correction.
        for count in sorted(set(counts)):
            self.select(tuple(i for i, own in enumerate(counts) if own == count), state)._take_step(count)

    def _fold(self, estimates: Sequence[Estimate]) -> None:
        not_finite = torch.stack([estimate.not_finite for estimate in estimates]).bool()
        measurements = self._count("measurements") + 1
        weights = measurement_weight(measurements, float(self.group["betas"][1]))
        if self.kernels is not None:
            values = [estimate.values[0] for estimate in estimates]
            self.kernels.fold([each[0] for each in self._stored], values, not_finite.int(), weights)
        elif self.families is not None:
            self._run(kronecker.fold_rotations, self.families, self._stored, estimates, weights, not_finite)
        else:
            of_params = zip(self._stored, estimates, weights.unbind(), not_finite.unbind(), strict=True)
            for tensors, estimate, weight, flag in of_params:
                for stored, values_of_one in zip(tensors, estimate.values, strict=True):
                    fold_measurement(stored, values_of_one, weight, flag)
        self._add("measurements", not_finite.logical_not())
        self._add("dropped", not_finite)

    def _due_for_roots(self) -> Places:
        """Return the places of parameters whose roots this measurement refreshes."""
        every, warmup, steps = self.group["curvature_every"], self.group["curvature_warmup"], self.group["steps"]
        earlier = [steps] * len(self.params) if self.group["capturable"] else (self._count("step") - 1).int().tolist()
        # The measurements that a parameter should have had by then. Reading their true number would synchronize.
        counts = [min(steps, warmup) + max(steps - warmup, 0) // every for steps in earlier]
        return tuple(i for i, n in enumerate(counts) if n < _ALWAYS_REFRESHED or n % _REFRESH_EVERY == 0)

    def _take_step(self, number: float | Tensor) -> None:
        """Take the step with this number, or with one number per parameter if it is a tensor."""
        group = self.group
        grads = [param.grad for param in self.params if param.grad is not None]
        if self.is_sharded:
            grads = list(map(local, grads))
        if self.families is not None:
            self._take_rotated_steps(grads, number)
            return
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
        if self.kernels is not None:
            rms = [each[0] for each in self._stored]
            self.kernels.step(self.here, grads, self._exp_avgs, rms, eps=eps, power=power, **scales)
            return
        lists = [self.here, grads, self._exp_avgs]
        if self.is_complex:
            lists = [list(map(as_real, each)) for each in lists]
        # Views are recreated, because users may replace the memory of a parameter.
        members = zip(self.shapes, self._stored, *lists, strict=True)
        rows = [[*map(shape.view, each), shape.denominator(stored, power, eps)] for shape, stored, *each in members]
        take_step(*map(list, zip(*rows, strict=True)), **scales)

    def _refresh_roots(self) -> None:
        """Refresh the inverse roots of all factors, in a CUDA graph if enabled."""
        families, stored, least, run = self.families or [], self._stored, self.group["damping"], _COMPILED.get()[1]
        counts = self._count("measurements") if run is None else self._numbers[-1].copy_(self._count("measurements"))
        refreshes = root_refreshes(families, stored, counts, least, self._gather)
        (run if run and self._gather is None else _one_by_one)((least, *self._addresses()), refreshes)

    def _take_rotated_steps(self, grads: list[Tensor], number: float | Tensor) -> None:
        """Take the step with this number, compiled and captured if enabled and possible."""
        families, group = self.families or [], self.group
        tensors = self.here, grads, self._exp_avgs, self._stored
        is_compiled, run = _COMPILED.get()
        if self._gather is not None or not (is_compiled or run):
            kronecker.take_rotated_steps(families, *tensors, number, group, self._gather)
            return
        # Compilers and graphs treat numbers as constants. Filling a tensor does not synchronize, but copying one does.
        values = number, group["lr"], group["betas"][0], group["weight_decay"]
        for place, value in zip(self._numbers, values, strict=False):
            is_here = isinstance(value, Tensor) and value.device == place.device
            place.copy_(value.reshape(place.shape)) if is_here else place.fill_(float(value))
        numbers, lr, beta1, decay, _ = self._numbers
        given = {"lr": lr, "betas": (beta1,), "weight_decay": decay, "maximize": group["maximize"], "capturable": True}
        own = [partial(self._run, kronecker.take_rotated_steps, (f,), *tensors, numbers, given) for f in families]
        (run or _one_by_one)((group["maximize"], *self._addresses(*grads)), own)

    def _addresses(self, *others: Tensor) -> Iterator[int]:
        """Return the addresses of these tensors and of all tensors that updates read or change."""
        return map(Tensor.data_ptr, chain(others, self._numbers, self.here, self._exp_avgs, *self._stored))

    def _run(self, function: Callable[..., Any], families: Sequence[kronecker.Family], *args: Any) -> Any:
        """Call a function of curvature that rotates, compiled if enabled and possible."""
        if self._gather is not None or not _COMPILED.get()[0]:
            return function(families, *args)
        key = function, *families
        if key not in self._compiled:
            # The compiler counts versions of a function per code object, so each bucket needs its own.
            own = FunctionType(function.__code__.replace(), function.__globals__, argdefs=function.__defaults__)
            # Reordering loops fails in torch 2.11, because it meets kernels for lists of tensors.
            inductor: Any = {"loop_ordering_after_fusion": False}
            self._compiled[key] = torch.compile(own, fullgraph=True, dynamic=False, options=inductor)
        try:
            return self._compiled[key](families, *args)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            logger.warning("The arithmetic of AdaHessianKron is not compiled: %s", first_line(error))
            self._compiled[key] = function
            return function(families, *args)

    def _count(self, name: str) -> Tensor:
        """Return the counts of all parameters in one tensor."""
        return self._counts[name] if name in self._counts else torch.stack([own[name] for own in self._states if own])

    def _add(self, name: str, numbers: int | Tensor) -> None:
        if name in self._counts:
            self._counts[name].add_(numbers)
        else:
            counts = [own[name] for own in self._states if own]
            torch._foreach_add_(counts, numbers if isinstance(numbers, int) else list(numbers.to(counts[0]).unbind()))

    def _tensors_of_states(self) -> list[Any]:
        return [value for own in self._known if own for value in own.values()]


class Plan:
    """The buckets of all groups without ``sparse=True``."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self._look: list[Any] = []
        self._is_small = True
        self._state: dict[Tensor, State] = {}
        self._places: dict[Places, list[tuple[Bucket, list[int]]]] = {}

    def refresh(self, groups: Sequence[Group], state: dict[Tensor, State]) -> None:
        """Rebuild the plan if groups or states have changed. Raise a RuntimeError if a state misfits its parameter."""
        look = list(map(_look, groups))
        self._state = state
        if look == self._look and all(bucket.is_current(state) for bucket in self.buckets):
            return
        self._look, self._places = [], {}
        self.buckets = list(_make_buckets(groups, state))
        self._is_small = sum(param.numel() for bucket in self.buckets for param in bucket.here) <= _SMALL
        self._look = look

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
        """Reduce probes and products to a measurement of all parameters that have a product."""
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
        if any(bucket.is_sharded for bucket in self.buckets):
            flags = agree([estimate.not_finite for estimate in measurement.values()], list(measurement))
            for param, flag in zip(measurement, flags, strict=True):
                measurement[param] = measurement[param]._replace(not_finite=flag)
        return measurement

    def step(self, ready: Collection[int], measurement: Measurement) -> None:
        """Take a step with all parameters that have a gradient, in the groups with these ids.

        Parameters of other groups only get a state.
        """
        chosen = []
        for bucket in self.buckets:
            places = tuple([i for i, param in enumerate(bucket.params) if param.grad is not None])
            if places:
                bucket.complete(places, self._state)
                if id(bucket.group) in ready:
                    chosen.append(bucket.select(places, self._state))
        with self._run_together():
            for bucket in chosen:
                bucket.begin_step(measurement, self._state)
        with self._run_together():
            for bucket in chosen:
                bucket.step(self._state)

    @contextmanager
    def _run_together(self) -> Iterator[None]:
        """Inside the context, collect the updates of all buckets, and run them in one call at the end."""
        is_compiled, run = _COMPILED.get()
        keys: list[Hashable] = []
        updates: list[Callable[[], Any]] = []

        def collect(key: Hashable, some: Sequence[Callable[[], Any]]) -> None:
            keys.append(key)
            updates.extend(some)

        with updates_compiled(is_compiled, collect if run else None):
            yield
        if run and updates:
            # Large updates fill a device on their own. In parallel, their temporary copies would need memory at once.
            run(tuple(keys), updates if self._is_small else [partial(_one_by_one, None, updates)])

    def _split(self, params: Sequence[Tensor]) -> list[tuple[Bucket, list[int]]]:
        """Return the buckets of these parameters, with each parameter's index in this list."""
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


def draw_some(
    groups: Sequence[Group], params: Sequence[Tensor], probe: int, out: Sequence[Tensor] | None
) -> list[Tensor]:
    """Draw one probe for these parameters only, with the same signs as :meth:`Plan.draw`."""
    known = {
        param: (probe_key(group["seed"], group["measurements"], probe), position)
        for param, group, position in parameters_of(groups)
    }
    places: Sequence[Tensor | None] = out or [None] * len(params)
    return [draw_like(param, *known[param], place) for param, place in zip(params, places, strict=True)]


def parameters_of(groups: Sequence[Group]) -> Iterator[tuple[Tensor, Group, int]]:
    """Iterate over parameters with their groups and probe positions, leaving out groups with ``sparse=True``.

    A complex parameter uses two positions, because it counts as two real ones.
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
                f"state: 'exp_avg' has dtype {known['exp_avg'].dtype}, but its parameter has {param.dtype}. Cast the "
                "model before the first step, or load the optimizer's state_dict again after casting."
            )
        here = local(param)
        of_shard = {key: local(value) for key, value in known.items()} if known else None
        is_fused = can_fuse(here, shape_here(param, group), group, of_shard)
        key = (id(group), here.device, here.dtype, _matrices_cut_by(param, group), is_fused)
        _, params, positions = found.setdefault(key, (group, [], []))
        params.append(param)
        positions.append(position)
    for (*_, is_fused), (group, params, positions) in found.items():
        yield Bucket(group, params, positions, state, is_fused=is_fused)


def _matrices_cut_by(param: Tensor, group: Group) -> tuple[Any, int] | None:
    """Return what cuts the rows of a matrix or vector with curvature that rotates. It does not cut those of a stack."""
    shape = shape_of(param, group) if is_sharded(param) else None
    return rows_cut_by(param) if isinstance(shape, kronecker.Rotation) and not shape.is_stack else None


def _has_shape(param: Tensor) -> bool:
    """Return whether a parameter has a shape and strides, which lazy parameters and sparse layouts lack."""
    return param.layout is torch.strided and not is_lazy(param)


def _look(group: Group) -> tuple[Any, ...]:
    """Return what a plan depends on, for comparison. The lists take no Python call per parameter."""
    params = group["params"]
    if group["sparse"]:
        return (id(group), len(params))
    params = list(filter(_has_shape, params))
    options = (*_DECISIVE(group), isinstance(group["lr"], Tensor), group.get("kind"), group.get("conv_groups"))
    return id(group), options, list(map(id, params)), list(map(_FORM, params)), list(map(Tensor.stride, params))
