"""Cells of the benchmark: what was measured of one optimizer, and how it compares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

# Its place (part, workload, mode and optimizer) and what was measured, or "unavailable" with the reason.
Cell: TypeAlias = dict[str, Any]

_LONGEST_REASON = 200


def unavailable(error: Exception) -> Cell:
    """A cell without numbers, and why, in one line."""
    first_line = next(iter(str(error).strip().splitlines()), "no reason given")
    return {"unavailable": f"{type(error).__name__}: {first_line}"[:_LONGEST_REASON]}


def with_ratios(cell: Cell, beside: Mapping[str, Cell]) -> Cell:
    """A cell with its time and its peak memory over those of others, as far as these are known.

    Each took turns with SGD, and times are compared by way of it: two times by themselves may come from two states of
    the machine.

    Args:
        cell: What was measured of a whole step.
        beside: The cells of the same workload and mode, by optimizer.
    """
    sgd, adam, adamw = (beside.get(name, {}) for name in ("SGD", "Adam", "AdamW"))
    return cell | {
        "time_to_adam": _ratio(cell, adam, "time_to_sgd"),
        "time_to_adamw": _ratio(cell, adamw, "time_to_sgd"),
        "peak_to_sgd": _ratio(cell, sgd, "peak_bytes"),
        "peak_to_adamw": _ratio(cell, adamw, "peak_bytes"),
    }


def _ratio(cell: Cell, base: Cell, number: str) -> float | None:
    own, other = cell.get(number), base.get(number)
    return None if own is None or other is None else own / other
