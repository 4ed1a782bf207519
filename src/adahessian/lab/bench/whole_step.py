"""The whole training step: its time beside SGD's, its memory, its optimizer's state."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from statistics import median

import torch

import adahessian
from adahessian.algorithm.state import shape_of
from adahessian.lab.bench.cells import Cell, unavailable
from adahessian.lab.bench.conditions import Conditions
from adahessian.lab.bench.contenders import REFERENCE, SGD_NAME, Contender
from adahessian.lab.bench.memory import Held, held, peak_bytes, state_bytes
from adahessian.lab.bench.timing import Candidate, Stopwatch, median_ratio
from adahessian.lab.bench.training import Mode, Training
from adahessian.lab.bench.workloads import Task, Workload, make_task
from adahessian.parallel.mean import ProductMean

_WARMUP_PERIODS = 1
_MOST_COMPILED_VERSIONS = 64


def measure_whole_steps(
    workload: Workload, mode: Mode, contenders: Iterable[Contender], *, conditions: Conditions, stopwatch: Stopwatch
) -> Iterator[tuple[str, Cell]]:
    """The name and the cell of SGD and of each contender on one workload in one mode.

    Each is set up, measured and let go by itself, so that its memory is its own. Only SGD stays: all others take turns
    with it. What fails becomes a cell that says why.
    """
    steps = _WholeSteps(workload, mode, conditions, stopwatch)
    with room_for_compiled_code(mode):
        for contender in (REFERENCE, *contenders):
            yield from steps.measure(contender)


@contextmanager
def room_for_compiled_code(mode: Mode) -> Iterator[None]:
    """Let one function be compiled for many contenders, and forget all that was compiled when they are through."""
    if mode == "eager":
        yield
        return
    with torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED_VERSIONS):
        yield
    torch.compiler.reset()


class _WholeSteps:
    def __init__(self, workload: Workload, mode: Mode, conditions: Conditions, stopwatch: Stopwatch) -> None:
        self._workload = workload
        self._mode = mode
        self._conditions = conditions
        self._stopwatch = stopwatch
        self._device = torch.device(conditions.device)
        self._reference: Training | None = None

    def measure(self, contender: Contender) -> Iterator[tuple[str, Cell]]:
        """The name and the cell of each of a contender's schedules."""
        if contender is REFERENCE and self._device.type == "cuda":
            # Whoever runs first pays for what libraries allocate once: let that be nobody.
            with suppress(Exception):
                contender.start(self._task(), self._mode).step()
        before = held(self._device)
        started = time.perf_counter()
        try:
            task = self._task()
            training = contender.start(task, self._mode)
            training.step()
        except Exception as error:
            cell = unavailable(error)
            yield from ((name, cell) for name in contender.schedules)
            return
        if contender is REFERENCE:
            self._reference = training
        for name, every in contender.schedules.items():
            try:
                let_measure_every(training, every)
                self._stopwatch.seconds(Candidate(training.step), _WARMUP_PERIODS * every)
                compile_seconds = time.perf_counter() - started
                cell = self._numbers(task, training, every, before) | {"compile_seconds": compile_seconds}
            except Exception as error:
                cell = unavailable(error)
            yield name, cell
            started = time.perf_counter()

    def _task(self) -> Task:
        return make_task(
            self._workload,
            device=self._device,
            channels_last=self._conditions.channels_last,
            seed=self._conditions.seed,
        )

    def _numbers(self, task: Task, training: Training, every: int, before: Held | None) -> Cell:
        own = Candidate(training.step, every)
        peak = peak_bytes(
            lambda: self._stopwatch.seconds(own, every),
            before,
            device=self._device,
            captured=self._mode == "captured",
        )
        turns = {"own": own}
        if self._reference is not None and self._reference is not training:
            turns[SGD_NAME] = Candidate(self._reference.step)
        seconds = self._stopwatch.in_turns(turns)
        of_sgd = seconds["own"] if training is self._reference else seconds.get(SGD_NAME)

        loss = training.step().item()
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss has become {loss}")
        return {
            "milliseconds": 1e3 * median(seconds["own"]),
            "time_to_sgd": None if of_sgd is None else median_ratio(seconds["own"], of_sgd),
            "peak_bytes": peak,
            "state_bytes_per_parameter": state_bytes(training.optimizer) / task.parameter_count,
            "reduced_bytes_per_parameter": _reduced_bytes(training, task.parameter_count),
            "parameters": task.parameter_count,
            "curvature": None if training.curvature is None else training.curvature(),
        }


def _reduced_bytes(training: Training, parameters: int) -> float | None:
    """What each of several processes would hand to the reduction of a measurement."""
    if not isinstance(training.optimizer, adahessian.AdaHessian):
        return None
    groups = training.optimizer.param_groups
    shapes = {param: shape_of(param, group) for group in groups for param in group["params"]}
    num_probes = max(group["num_probes"] for group in groups)
    return ProductMean(list(shapes), list(shapes.values()), num_probes).nbytes / parameters


def let_measure_every(training: Training, steps: int) -> None:
    """Set the steps from one measurement to the next, for an optimizer that measures."""
    if isinstance(training.optimizer, adahessian.AdaHessian):
        for group in training.optimizer.param_groups:
            group["curvature_every"] = steps
