"""Short runs of `adahessian train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tiny_data import WRITERS

from adahessian.lab.commands import train as command
from adahessian.lab.results.run_file import RunFiles, RunResult


def typed(folder: Path, **options: Any) -> list[str]:
    """Return options as they are typed. Data is in ``folder / "data"``, and runs go to ``folder / "runs"``."""
    words = ["--data-dir", str(folder / "data"), "--output", str(folder / "runs"), "--device", "cpu"]
    return words + command.typed({name: tuple(v) if isinstance(v, list) else v for name, v in options.items()})


def write_data(task: str, folder: Path) -> None:
    """Write a task's tiny data into ``folder / "data"``."""
    (folder / "data").mkdir()
    if write := WRITERS.get(task):
        write(folder / "data")


def train(task: str, optimizer: str, folder: Path, **options: Any) -> RunResult:
    """Train one run."""
    (run,), session = command.parse_runs([task, optimizer, *typed(folder, **options)], "adahessian train")
    return command.execute(run, session, console=Console(quiet=True))


def files_of(result: RunResult, folder: Path) -> RunFiles:
    """Return the files of a run."""
    return RunFiles(output=folder / "runs", task=result.task, label=result.label, seed=result.seed)


def assert_same(result: RunResult, folder: Path, other: RunResult, other_folder: Path) -> None:
    """Compare results, without times, and weights. All bits are the same."""
    curve, other_curve = ({**each.curve, "seconds": None} for each in (result, other))
    assert (curve, result.final) == (other_curve, other.final)
    weights, others = (
        torch.load(files_of(each, where).weights, weights_only=True)
        for each, where in ((result, folder), (other, other_folder))
    )
    assert weights.keys() == others.keys()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []
