"""What is not measured yet, and the commands that would measure it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adahessian.lab.paper.cells import Cell, PaperTable, described, runs_of
from adahessian.lab.paper.overhead import unmeasured
from adahessian.lab.report.groups import Group


def missing_runs(tables: Iterable[PaperTable], groups: Sequence[Group]) -> dict[str, list[str]]:
    """Commands, each with the cells that it fills. A cell with fewer seeds than the paper's has is not full.

    Args:
        tables: The paper's tables.
        groups: The runs at hand.
    """
    commands: dict[str, list[str]] = {}
    for table in tables:
        for cell in table.cells:
            seeds = missing_seeds(cell, groups)
            if seeds:
                filled = f"{table.title.partition(':')[0]}: {described(cell)}"
                if len(seeds) < cell.seeds:
                    filled += f" ({cell.seeds - len(seeds)} of {cell.seeds} seeds are there)"
                cells = commands.setdefault(train_command(cell, seeds), [])
                if filled not in cells:
                    cells.append(filled)
    return commands


def missing_benches(benches: Mapping[Path, dict[str, Any]]) -> dict[str, list[str]]:
    """Commands of the benchmark, for a machine with a GPU, each with what it fills."""
    return {
        f"adahessian bench --parts overhead --workloads {workload}": [f"Table 8: time of a step, {workload}"]
        for workload in unmeasured(benches)
    }


def missing_seeds(cell: Cell, groups: Sequence[Group]) -> list[int]:
    """Seeds that a cell lacks, as many as the paper has more."""
    group = runs_of(cell, groups)
    there = [] if group is None else [run.seed for run in group.runs]
    others = [seed for seed in range(1, cell.seeds + len(there) + 1) if seed not in there]
    return others[: max(0, cell.seeds - len(there))]


def train_command(cell: Cell, seeds: Sequence[int]) -> str:
    """The command that runs a cell."""
    settings = [f"--{name.replace('_', '-')} {value:.6g}" for name, value in cell.settings.items()]
    return " ".join(
        [
            f"adahessian train {cell.task} --optimizer {cell.optimizer}",
            *settings,
            f"--seeds {' '.join(map(str, seeds))} --data-dir DIR",
        ]
    )
