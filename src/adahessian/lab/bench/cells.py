"""Cells of the benchmark: what was measured of one optimizer, and how it compares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

# Its place (part, workload, mode and optimizer) and what was measured, or "unavailable" with the reason.
Cell: TypeAlias = dict[str, Any]

# What whole steps are set against, and how the ratios are called.
BASES = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw"}
_LONGEST_REASON = 200


def unavailable(error: Exception) -> Cell:
    """A cell without numbers, and why, in one line."""
    first_line = next(iter(str(error).strip().splitlines()), "no reason given")
    return {"unavailable": f"{type(error).__name__}: {first_line}"[:_LONGEST_REASON]}


def with_ratios(cell: Cell, beside: Mapping[str, Cell]) -> Cell:
    """A cell with its time and its peak memory over those of the bases, as far as these are known.

    Times are compared by way of SGD, with which each took turns: two times of their own may come from two states of the
    machine.

    Args:
        cell: What was measured of a whole step.
        beside: The cells of the same workload and mode, by optimizer.
    """
    ratios = {}
    for base, short in BASES.items():
        of_base = beside.get(base, {})
        ratios[f"time_to_{short}"] = _ratio(cell, of_base, "time_to_sgd")
        ratios[f"peak_to_{short}"] = _ratio(cell, of_base, "peak_bytes")
    return cell | ratios


def _ratio(cell: Cell, of_base: Cell, number: str) -> float | None:
    own, other = cell.get(number), of_base.get(number)
    return None if own is None or other is None else own / other
