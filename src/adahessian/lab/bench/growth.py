"""How the cost of a step grows with the batch, the depth, the width and the number of probes."""

from __future__ import annotations

from collections.abc import Iterator

from adahessian.lab.bench.cells import Cell
from adahessian.lab.bench.conditions import Conditions
from adahessian.lab.bench.contenders import with_probes
from adahessian.lab.bench.timing import Stopwatch
from adahessian.lab.bench.training import Mode
from adahessian.lab.bench.whole_step import measure_whole_steps
from adahessian.lab.bench.workloads import Workload

PROBES = (1, 2, 4)


def measure_growth(
    workload: Workload, mode: Mode, *, conditions: Conditions, stopwatch: Stopwatch
) -> Iterator[tuple[str, str, Cell]]:
    """The size, the optimizer and the cell: AdaHessian at every step beside SGD, with one size changed at a time."""
    for size, resized in {workload.size: workload, **workload.at_other_sizes()}.items():
        contenders = [with_probes(count) for count in (PROBES if resized is workload else PROBES[:1])]
        cells = measure_whole_steps(resized, mode, contenders, conditions=conditions, stopwatch=stopwatch)
        yield from ((size, name, cell) for name, cell in cells)
