"""Cells of the paper's tables: which runs fill each, and what these came to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, TypeAlias

from adahessian.lab.paper.numbers import SEEDS
from adahessian.lab.report.costs import step_time
from adahessian.lab.report.document import Table
from adahessian.lab.report.groups import Group
from adahessian.lab.report.tables import counted_seeds, shown_final, shown_seeds
from adahessian.lab.settings import OPTIMIZER_TITLES, OptimizerName
from adahessian.lab.tasks.registry import EXPERIMENTS


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The result of an optimizer on a task."""

    task: str
    optimizer: OptimizerName
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What is not as the task has it."""

    metric: str | None = None
    """Which of the final numbers; None is the task's own."""

    seeds: int = SEEDS
    """How many runs the paper has."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """The mean of other cells, if all of them are measured."""

    of: Sequence[Cell]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The time of a step of a cell's runs, over that of another optimizer."""

    of: Cell
    base: OptimizerName


Entry: TypeAlias = str | Cell | Average | Cost


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table of the paper, with the paper's numbers as text and ours as cells."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    note: str = ""

    @property
    def cells(self) -> Iterator[Cell]:
        """What we have to measure for it."""
        return (entry for row in self.rows for entry in row if isinstance(entry, Cell))

    def filled(self, groups: Sequence[Group]) -> Table:
        """With what was measured, and empty where nothing was."""
        return Table(headings=self.headings, rows=[[shown(entry, groups) for entry in row] for row in self.rows])


def runs_of(cell: Cell, groups: Sequence[Group]) -> Group | None:
    """The runs that fill a cell; where there are some under several conditions, the most."""
    fitting = [
        group
        for group in groups
        if group.experiment.name == cell.task
        and group.optimizer == cell.optimizer
        and _same(group.changed, cell.settings)
    ]
    return max(fitting, key=lambda group: len(group.finished), default=None)


def _same(changed: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    # A learning rate that was typed has fewer digits than one that was multiplied.
    return changed.keys() == settings.keys() and all(
        math.isclose(value, settings[name], rel_tol=1e-3) if isinstance(value, int | float) else value == settings[name]
        for name, value in changed.items()
    )


def shown(entry: Entry, groups: Sequence[Group]) -> str:
    """What stands in a table for an entry; nothing if it is not measured."""
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Average):
        return _shown_average(entry, groups)
    if isinstance(entry, Cost):
        return _shown_cost(entry, groups)
    group = runs_of(entry, groups)
    if group is None:
        return ""
    metric = group.experiment.metric
    result = shown_final(group, entry.metric or metric.name, metric.digits)
    if not group.finished:
        return f"{result} ({counted_seeds(group.diverged)})"
    return f"{result} ({shown_seeds(group)})" if result else ""


def _shown_average(average: Average, groups: Sequence[Group]) -> str:
    means = []
    for cell in average.of:
        group = runs_of(cell, groups)
        spread = None if group is None else group.final(cell.metric or group.experiment.metric.name)
        if spread is None:
            return ""
        means.append(spread.mean)
    return f"{mean(means):.2f}"


def _shown_cost(cost: Cost, groups: Sequence[Group]) -> str:
    group = runs_of(cost.of, groups)
    time = None if group is None else step_time(group, groups, (cost.base,))
    return "" if time is None or time.ratio is None else f"{time.ratio:.2f}"


def described(cell: Cell) -> str:
    """A cell in words."""
    values = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in cell.settings.items())
    return ", ".join(filter(None, [EXPERIMENTS[cell.task].title, OPTIMIZER_TITLES[cell.optimizer], values]))
