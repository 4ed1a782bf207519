"""How the cost of a step grows with the batch, the depth, the width and the number of probes."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from adahessian.lab.bench.cells import Cell
from adahessian.lab.bench.conditions import Conditions
from adahessian.lab.bench.contenders import SGD_NAME, named, with_probes
from adahessian.lab.bench.timing import Stopwatch
from adahessian.lab.bench.training import Mode
from adahessian.lab.bench.whole_step import measure_whole_steps
from adahessian.lab.bench.workloads import Workload

CONTENDERS = tuple(map(with_probes, (1, 2, 4)))
NAMES = (SGD_NAME, *(name for contender in CONTENDERS for name in contender.schedules))


def measure_growth(
    workload: Workload, mode: Mode, names: Collection[str], *, conditions: Conditions, stopwatch: Stopwatch
) -> Iterator[tuple[str, str, Cell]]:
    """The size, the optimizer and the cell: AdaHessian at every step beside SGD, with one size changed at a time.

    Args:
        workload: What to train, at the size to begin with.
        mode: How to run a step.
        names: Those of ``NAMES`` to measure. SGD is always there.
        conditions: What all cells have in common.
        stopwatch: Times the steps.
    """
    for size, resized in {workload.size: workload, **workload.at_other_sizes()}.items():
        contenders = named(CONTENDERS if resized is workload else CONTENDERS[:1], names)
        cells = measure_whole_steps(resized, mode, contenders, conditions=conditions, stopwatch=stopwatch)
        yield from ((size, name, cell) for name, cell in cells)
