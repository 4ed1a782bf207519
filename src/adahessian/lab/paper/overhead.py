"""What a step costs, from the files of ``adahessian bench``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from adahessian.lab.bench.cells import Cell
from adahessian.lab.bench.tables import NAMES_IN_OVERHEAD, PAPER_OVERHEAD
from adahessian.lab.report.document import Table


def read_benches(paths: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """The benchmark's files among these, and in folders and theirs. All others are passed over."""
    benches = {}
    for path in paths:
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if isinstance(content, dict) and content.keys() >= {"provenance", "conditions", "cells"}:
                benches[file] = content
    return benches


def overhead_table(bench: dict[str, Any]) -> Table:
    """Whole training steps of a benchmark, beside the paper's."""
    return Table(
        headings=["workload, mode: optimizer", "ms", "x SGD", "paper", "x Adam", "paper", "peak memory x SGD"],
        rows=[
            [
                f"{cell['workload']}, {cell['mode']}: {cell['optimizer']}",
                _number(cell, "milliseconds"),
                _number(cell, "time_to_sgd"),
                _paper(cell, "time_to_sgd"),
                _number(cell, "time_to_adam"),
                _paper(cell, "time_to_adam"),
                _number(cell, "peak_to_sgd"),
            ]
            for cell in whole_steps(bench)
            # Those of other packages, which the paper has not.
            if "." not in cell["optimizer"]
        ],
    )


def where(bench: dict[str, Any]) -> str:
    """What a benchmark ran on, and where it comes from."""
    of_bench = bench["provenance"]
    place = of_bench["hardware"]["accelerator"] if bench["conditions"]["device"] == "cuda" else None
    versions = ", ".join(f"{package} {version}" for package, version in of_bench["versions"].items())
    return f"{place or of_bench['hardware']['processor']}; {versions}; commit {of_bench['commit'] or 'unknown'}"


def unmeasured(benches: Mapping[Path, dict[str, Any]]) -> Iterator[str]:
    """The workloads of the paper's overhead table of which no benchmark on a GPU has every row."""
    for workload in PAPER_OVERHEAD:
        complete = any(
            set(NAMES_IN_OVERHEAD)
            <= {
                cell["optimizer"] for cell in whole_steps(bench) if (cell["workload"], cell["mode"]) == (workload, mode)
            }
            for bench in benches.values()
            if bench["conditions"]["device"] == "cuda"
            for mode in {cell["mode"] for cell in whole_steps(bench)}
        )
        if not complete:
            yield workload


def whole_steps(bench: dict[str, Any]) -> list[Cell]:
    """What a benchmark has of whole training steps."""
    return [cell for cell in bench["cells"].values() if cell["part"] == "steps" and "unavailable" not in cell]


def _number(cell: Cell, name: str) -> str:
    return "" if cell.get(name) is None else f"{cell[name]:.2f}"


def _paper(cell: Cell, name: str) -> str:
    if cell["workload"] not in PAPER_OVERHEAD or cell["optimizer"] not in NAMES_IN_OVERHEAD:
        return ""
    return f"{PAPER_OVERHEAD[cell['workload']][name][NAMES_IN_OVERHEAD.index(cell['optimizer'])]:.2f}"
