"""From cells to tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table

from adahessian.lab.bench.cells import Cell
from adahessian.lab.bench.contenders import INTERVALS, measuring_every

# The time of AdaHessian that measures every 1 to 5 steps, over that of SGD and that of Adam: the paper's, on one RTX
# Titan.
PAPER_OVERHEAD = {
    "resnet20": {"time_to_sgd": (2.42, 1.71, 1.47, 1.36, 1.28), "time_to_adam": (2.27, 1.64, 1.42, 1.32, 1.25)},
    "resnet32": {"time_to_sgd": (3.23, 2.12, 1.74, 1.56, 1.45), "time_to_adam": (2.91, 1.96, 1.64, 1.48, 1.38)},
}
_KERNELS_SHOWN = 5
_NAME_SHOWN = 56
NAMES_IN_OVERHEAD = tuple(map(measuring_every, INTERVALS))


@dataclass(frozen=True)
class _Column:
    heading: str
    number: str
    decimals: int = 2
    scale: float = 1.0
    meaning: str = ""
    """Stands above the table, so that headings are short enough for a terminal of 80 columns."""

    def show(self, cell: Cell) -> str:
        value = cell.get(self.number)
        return "" if value is None else f"{self.scale * value:.{self.decimals}f}"


_TIME = _Column("ms", "milliseconds")
_TO_SGD = _Column("x SGD", "time_to_sgd")
_TO_ADAM = _Column("x Adam", "time_to_adam")
_TO_ADAMW = _Column("x AdamW", "time_to_adamw")
_STATE = _Column("state", "state_bytes_per_parameter", decimals=1, meaning="bytes a parameter")


def tables(cells: Mapping[str, Cell]) -> Iterator[Group]:
    """One table for each part that has cells."""
    steps = [cell for cell in cells.values() if cell["part"] == "steps"]
    overhead = [_beside_paper(cell) for cell in steps if _in_paper(cell)]
    growth = [cell for cell in cells.values() if cell["part"] == "growth"]
    update = [cell for cell in cells.values() if cell["part"] == "update"]
    kernels = [cell for cell in cells.values() if cell["part"] == "kernels"]
    if steps:
        yield _table(
            "The whole training step",
            [cell for cell in steps if cell["optimizer"] not in NAMES_IN_OVERHEAD[1:]],
            (
                _TIME,
                _TO_SGD,
                _TO_ADAMW,
                _Column("peak", "peak_to_sgd", meaning="most memory, x SGD"),
                _STATE,
                _Column("first", "compile_seconds", decimals=0, meaning="s for the first steps"),
            ),
        )
    if any(cell["optimizer"] in NAMES_IN_OVERHEAD[1:] for cell in overhead):
        yield _table(
            "The paper's overhead table: curvature every 1 to 5 steps",
            overhead,
            (_TO_SGD, _Column("paper", "paper_to_sgd"), _TO_ADAM, _Column("paper", "paper_to_adam")),
        )
    if growth:
        yield _table("How the cost grows", growth, (_TIME, _TO_SGD))
    if update:
        yield _table(
            "The update alone",
            update,
            (
                _Column("ms", "milliseconds", decimals=3),
                _TO_ADAMW,
                _Column("moved", "bytes_moved_per_parameter", decimals=1, meaning="bytes a parameter"),
                _Column("GB/s", "bytes_per_second", decimals=0, scale=1e-9),
                _Column("% copy", "share_of_copy", decimals=0, scale=100, meaning="of the GB/s of a copy"),
                _STATE,
            ),
            section=("workload",),
        )
    if kernels:
        yield _table(
            "Kernels of a step (on a CPU: operations), one after the other, and the longest",
            [row for cell in kernels for row in _longest(cell)],
            (_Column("ms", "milliseconds", decimals=3), _Column("launches", "launches", decimals=0)),
            section=("workload", "mode", "of"),
            of_rows="kernel",
        )


def _in_paper(cell: Cell) -> bool:
    return cell["workload"] in PAPER_OVERHEAD and cell["optimizer"] in NAMES_IN_OVERHEAD


def _beside_paper(cell: Cell) -> Cell:
    of_workload = PAPER_OVERHEAD[cell["workload"]]
    row = NAMES_IN_OVERHEAD.index(cell["optimizer"])
    return cell | {"paper_to_sgd": of_workload["time_to_sgd"][row], "paper_to_adam": of_workload["time_to_adam"][row]}


def _longest(cell: Cell) -> Iterator[Cell]:
    """A row for all kernels of a step, and one for each of the longest."""
    yield cell | {"of": cell["optimizer"], "optimizer": "all"}
    for kernel in cell.get("longest", ())[:_KERNELS_SHOWN]:
        name = kernel["name"].removeprefix("void ").replace("at::native::", "")
        yield cell | kernel | {"of": cell["optimizer"], "optimizer": name[:_NAME_SHOWN]}


def _table(
    title: str,
    cells: list[Cell],
    columns: Iterable[_Column],
    section: tuple[str, ...] = ("workload", "mode"),
    of_rows: str = "optimizer",
) -> Group:
    """A row for each cell, a section for each place, and below them the reasons for what is missing.

    Args:
        title: What the table is about.
        cells: What to show.
        columns: The numbers to show, as far as any cell has them.
        section: What the cells of a section have in common; it stands above them.
        of_rows: What the names of rows are names of.
    """
    columns = [column for column in columns if any(cell.get(column.number) is not None for cell in cells)]
    meanings = "; ".join(f"{column.heading}: {column.meaning}" for column in columns if column.meaning)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False)
    table.add_column(of_rows)
    for column in columns:
        # Where a terminal is too narrow, names give way, between words.
        table.add_column(column.heading, justify="right", no_wrap=True)
    sections: dict[str, list[Cell]] = {}
    for cell in cells:
        sections.setdefault(", ".join(cell[place] for place in section), []).append(cell)
    missing: dict[str, list[str]] = {}
    for heading, members in sections.items():
        table.add_row(heading, style="bold")
        for cell in members:
            table.add_row(Padding(cell["optimizer"], (0, 0, 0, 2)), *(column.show(cell) for column in columns))
            if "unavailable" in cell:
                missing.setdefault(f"{heading}: not available: {cell['unavailable']}", []).append(cell["optimizer"])
        table.add_section()
    reasons = [f"{reason} ({'; '.join(names)})" for reason, names in missing.items()]
    # Not as the title and the caption of the table, which are as narrow as that is.
    return Group(*filter(None, (title, meanings)), table, *reasons)
