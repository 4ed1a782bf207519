"""The file of results: written after every cell, so that a run that is stopped keeps what it has."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from adahessian.lab.bench.cells import Cell, with_ratios

_KEYS = frozenset({"provenance", "conditions", "commands", "cells"})


class UnusableFileError(Exception):
    """Results cannot be written to a file, or would replace something else."""


class Results:
    """The cells of a file, with those of earlier runs that may stand beside new ones.

    Args:
        path: The file.
        provenance: Where the results of this run come from.
        conditions: What holds for all of its cells.
        not_found: Peers that were looked for and are not installed.
        overwrite: Whether to give up cells that may not stand beside new ones.

    Raises:
        UnusableFileError: If the file cannot be written, holds something else than results, or such cells.
    """

    def __init__(
        self,
        path: Path,
        *,
        provenance: dict[str, Any],
        conditions: dict[str, Any],
        not_found: list[str],
        overwrite: bool = False,
    ) -> None:
        self.path = path
        self._about: dict[str, Any] = {
            "provenance": provenance,
            "conditions": conditions,
            "commands": [provenance["command"]],
            "peers_not_found": not_found,
        }
        self._cells: dict[str, Cell] = {}
        _demand_writable(path)
        if path.exists():
            earlier = _earlier_results(path)
            differing = _differing(earlier, self._about)
            if not differing:
                self._cells = earlier["cells"]
                self._about["commands"] = [*earlier["commands"], provenance["command"]]
            elif not overwrite:
                raise UnusableFileError(
                    f"{path} differs in {', '.join(differing)}, and cells of both would not compare: name another "
                    "file, or give up what it holds with --overwrite"
                )

    @property
    def cells(self) -> dict[str, Cell]:
        """All cells by ``part/workload/mode/optimizer``; those of whole steps have their ratios."""
        return {key: self._compared(cell) for key, cell in self._cells.items()}

    def add(self, cell: Cell) -> None:
        """Take in a cell, in place of an earlier one, and write the file."""
        self._cells["/".join(cell[name] for name in ("part", "workload", "mode", "optimizer"))] = cell
        # Whoever reads the file, or stops the run, meets a whole one.
        unfinished = self.path.with_name(f"{self.path.name}.unfinished")
        unfinished.write_text(json.dumps({**self._about, "cells": self.cells}, indent=2) + "\n")
        os.replace(unfinished, self.path)

    def _compared(self, cell: Cell) -> Cell:
        if cell["part"] != "steps" or "unavailable" in cell:
            return cell
        beside = {
            other["optimizer"]: other
            for other in self._cells.values()
            if all(other[name] == cell[name] for name in ("part", "workload", "mode"))
        }
        return with_ratios(cell, beside)


def _demand_writable(path: Path) -> None:
    """Find out before anything is measured; the folder is made if there is none."""
    try:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "not an ordinary file"
            raise UnusableFileError(f"{path} is {kind}: name a file, such as bench.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        # Permissions alone do not tell: the whole file system may be read-only.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UnusableFileError(
            f"the folder of {path} cannot be made or written to ({error.strerror}): name a file in another"
        ) from error


def _earlier_results(path: Path) -> dict[str, Any]:
    try:
        earlier = json.loads(path.read_text())
    except ValueError:
        earlier = None
    if not isinstance(earlier, dict) or not earlier.keys() >= _KEYS:
        raise UnusableFileError(
            f"{path} holds no results of this command, or broken ones: move it away or name another file"
        )
    return earlier


def _differing(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What two runs differ in that must be the same if their cells are to be compared."""
    before, after = earlier["provenance"], now["provenance"]
    names = [name for name in ("commit", "hardware", "versions") if before[name] != after[name]]
    if after["commit"] is None:
        names.append("commit, which is unknown now")
    conditions = earlier["conditions"].keys() | now["conditions"].keys()
    return names + sorted(name for name in conditions if earlier["conditions"].get(name) != now["conditions"].get(name))
