"""`adahessian bench`: what a training step costs, relative to a baseline."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import filter as matching
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro

from adahessian.lab.bench.update import UPDATES, measure_update
from adahessian.lab.bench.whole_step import BASELINE, LABELS, Clock, Job, Mode, Row, measure_steps
from adahessian.lab.bench.workloads import WORKLOADS
from adahessian.lab.configs.checks import at_least
from adahessian.lab.configs.presets import near
from adahessian.lab.errors import ConfigError, RunExistsError
from adahessian.lab.training.atomic_files import write_json
from adahessian.lab.training.provenance import provenance

# Columns of numbers, with their decimal places.
_DIGITS = {"step_ms": 3, "ratio": 3, "state_bytes_per_parameter": 2, "peak_mib": 0, "memory_ratio": 2}
_HEADER = f"{'workload':10} {'mode':9} {'optimizer':26}  ms/step    ratio  state/p peak MiB   memory  step"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure time per step, peak memory and optimizer state of all optimizers, on a GPU if there is one.

    Networks are trained on random data. Every row is printed and written to the output as soon as it is measured.
    """

    workloads: tuple[str, ...] = ("resnet20", "gpt")  # Networks: digits, resnet20, gpt, gpt2-124m, lstm.
    modes: tuple[Mode, ...] = ()  # Eager, or captured: compiled and, on a GPU, captured. Default: as `train`.
    optimizers: tuple[str, ...] = ("*",)  # Rows to measure, such as adamw adahessian-kron/every-20 'adahessian/*'.
    parts: tuple[Literal["steps", "update"], ...] = ("steps",)  # Whole steps, or updates of 124M parameters alone.
    rounds: int = 5  # Turns of each optimizer and the baseline. Medians over rounds count.
    at_once: int = 1  # Optimizers to prepare at the same time, as compiling takes minutes.
    output: Path = Path("bench.json")  # File for the rows. It must not exist.


def main(argv: Sequence[str]) -> None:
    """Measure all rows, print them and write them to a file."""
    bench = tyro.cli(Bench, args=argv, prog="adahessian bench")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    content = {"schema": 2, "device": device.type, "precision": "tf32", "rounds": bench.rounds, "rows": rows}
    for row in _rows(bench, device):
        if not rows:
            print(_HEADER)
        print(_line(row), flush=True)
        rows.append(row)
        write_json(bench.output, content | {"provenance": [provenance(0)]})


def _rows(bench: Bench, device: torch.device) -> Iterator[Row]:
    at_least(1, rounds=bench.rounds, at_once=bench.at_once)
    if bench.output.exists():
        raise RunExistsError(f"{bench.output} already exists. Pass another --output, or delete the file.")
    for name in bench.workloads:
        if name not in WORKLOADS:
            raise ConfigError(f"There is no workload {near(name, WORKLOADS)}")
        if WORKLOADS[name].needs_gpu and device.type == "cpu":
            raise ConfigError(f"--workloads {name} is too large for a CPU. Choose another one, or use a GPU.")
    for pattern in bench.optimizers:
        if not matching([BASELINE, *LABELS], pattern):
            raise ConfigError(f"There is no optimizer {near(pattern, [BASELINE, *LABELS])}")
    chosen = [label for label in LABELS if any(fnmatch(label, pattern) for pattern in bench.optimizers)]
    clock, say = Clock(rounds=bench.rounds), partial(print, file=sys.stderr, flush=True)
    modes = bench.modes or ("captured" if device.type == "cuda" else "eager",)
    if "steps" in bench.parts:
        pairs = [(name, mode) for name in bench.workloads for mode in modes]
        names = [name for name, _ in pairs for _ in (BASELINE, *chosen)]
        jobs = [Job.of(WORKLOADS[name], mode, label, device) for name, mode in pairs for label in (BASELINE, *chosen)]
        for name, row in zip(names, measure_steps(jobs, clock=clock, at_once=bench.at_once, say=say), strict=True):
            yield {"workload": name, **row}
    if "update" in bench.parts:
        for row in measure_update([label for label in UPDATES if label in chosen], clock=clock, device=device):
            yield {"workload": "gpt2-124m", **row}


def _line(row: Row) -> str:
    name = f"{row['workload']:10} {row['mode'] if row['part'] == 'steps' else 'update':9} {row['label']:26}"
    if "error" in row:
        return f"{name} failed: {row['error']}"
    numbers = [f"{row[key]:8.{digits}f}" if row.get(key) else " " * 8 for key, digits in _DIGITS.items()]
    return f"{name} {' '.join(numbers)}  {row.get('step', '')}"
