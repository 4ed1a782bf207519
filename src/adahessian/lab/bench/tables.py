"""From cells to tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rich.table import Table

from adahessian.lab.bench.cells import Cell
from adahessian.lab.bench.contenders import INTERVALS, measuring_every

# The time of AdaHessian that measures every 1 to 5 steps, over that of SGD and that of Adam: the paper's, on one RTX
# Titan.
PAPER_OVERHEAD = {
    "resnet20": {"time_to_sgd": (2.42, 1.71, 1.47, 1.36, 1.28), "time_to_adam": (2.27, 1.64, 1.42, 1.32, 1.25)},
    "resnet32": {"time_to_sgd": (3.23, 2.12, 1.74, 1.56, 1.45), "time_to_adam": (2.91, 1.96, 1.64, 1.48, 1.38)},
}
NAMES_IN_OVERHEAD = tuple(map(measuring_every, INTERVALS))


@dataclass(frozen=True)
class _Column:
    heading: str
    number: str
    decimals: int = 2
    scale: float = 1.0

    def show(self, cell: Cell) -> str:
        value = cell.get(self.number)
        return "" if value is None else f"{self.scale * value:.{self.decimals}f}"


_TIME = _Column("ms", "milliseconds")
_TO_SGD = _Column("time,\nSGD = 1", "time_to_sgd")
_TO_ADAM = _Column("time,\nAdam = 1", "time_to_adam")
_TO_ADAMW = _Column("time,\nAdamW = 1", "time_to_adamw")
_STATE = _Column("bytes of state\na parameter", "state_bytes_per_parameter", decimals=1)


def tables(cells: Mapping[str, Cell]) -> Iterator[Table]:
    """One table for each part that has cells."""
    steps = [cell for cell in cells.values() if cell["part"] == "steps"]
    overhead = [_beside_paper(cell) for cell in steps if _in_paper(cell)]
    growth = [cell for cell in cells.values() if cell["part"] == "growth"]
    update = [cell for cell in cells.values() if cell["part"] == "update"]
    if steps:
        yield _table(
            "The whole training step",
            [cell for cell in steps if cell["optimizer"] not in NAMES_IN_OVERHEAD[1:]],
            ("workload", "mode", "optimizer"),
            (
                _TIME,
                _TO_SGD,
                _TO_ADAMW,
                _Column("peak memory,\nSGD = 1", "peak_to_sgd"),
                _Column("peak memory,\nAdamW = 1", "peak_to_adamw"),
                _STATE,
                _Column("first steps,\ns", "compile_seconds", decimals=0),
            ),
        )
    if any(cell["optimizer"] in NAMES_IN_OVERHEAD[1:] for cell in overhead):
        yield _table(
            "The paper's overhead table: curvature every 1 to 5 steps",
            overhead,
            ("workload", "mode", "optimizer"),
            (_TO_SGD, _Column("in the\npaper", "paper_to_sgd"), _TO_ADAM, _Column("in the\npaper", "paper_to_adam")),
        )
    if growth:
        yield _table("How the cost grows", growth, ("workload", "mode", "optimizer"), (_TIME, _TO_SGD))
    if update:
        yield _table(
            "The update alone",
            update,
            ("workload", "optimizer"),
            (
                _TIME,
                _TO_ADAMW,
                _Column("bytes moved\na parameter", "bytes_moved_per_parameter", decimals=1),
                _Column("GB/s", "bytes_per_second", decimals=0, scale=1e-9),
                _Column("% of\na copy's", "share_of_copy", decimals=0, scale=100),
                _STATE,
            ),
        )


def _in_paper(cell: Cell) -> bool:
    return cell["workload"] in PAPER_OVERHEAD and cell["optimizer"] in NAMES_IN_OVERHEAD


def _beside_paper(cell: Cell) -> Cell:
    of_workload = PAPER_OVERHEAD[cell["workload"]]
    row = NAMES_IN_OVERHEAD.index(cell["optimizer"])
    return cell | {"paper_to_sgd": of_workload["time_to_sgd"][row], "paper_to_adam": of_workload["time_to_adam"][row]}


def _table(title: str, cells: Iterable[Cell], places: tuple[str, ...], columns: tuple[_Column, ...]) -> Table:
    """A row for each cell, a section for each workload and mode, and below them the reasons for what is missing."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    for place in places:
        table.add_column(place)
    for column in columns:
        table.add_column(column.heading, justify="right")
    sections: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        sections.setdefault((cell["workload"], cell["mode"]), []).append(cell)
    missing: dict[str, list[str]] = {}
    for (workload, mode), section in sections.items():
        for row, cell in enumerate(section):
            # What a section has in common stands in its first row.
            shown = [cell[place] if place == "optimizer" or row == 0 else "" for place in places]
            table.add_row(*shown, *(column.show(cell) for column in columns))
            if "unavailable" in cell:
                reason = f"{workload}, {mode}: not available: {cell['unavailable']}"
                missing.setdefault(reason, []).append(cell["optimizer"])
        table.add_section()
    table.caption = "\n".join(f"{reason} ({'; '.join(names)})" for reason, names in missing.items()) or None
    return table
