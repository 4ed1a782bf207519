"""`adahessian bench`: what a training step costs, relative to a baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import filter as matching
from itertools import product
from pathlib import Path
from typing import Literal

import torch
import tyro

from adahessian.lab.bench.update import UPDATES, measure_update
from adahessian.lab.bench.whole_step import BASELINE, LABELS, Clock, Mode, Row, measure_steps
from adahessian.lab.bench.workloads import WORKLOADS
from adahessian.lab.configs.checks import at_least
from adahessian.lab.configs.presets import near
from adahessian.lab.errors import ConfigError, RunExistsError
from adahessian.lab.training.atomic_files import write_json
from adahessian.lab.training.provenance import provenance

_HEADER = f"{'workload':10} {'mode':9} {'optimizer':26}   ms/step  state/p    ratio  peak MiB  memory  step"


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
    warm_only: bool = False  # Only take two steps with each optimizer, to fill the compiler's cache.
    output: Path = Path("bench.json")  # File for the rows. It must not exist.


def main(argv: Sequence[str]) -> None:
    """Measure all rows, print them and write them to a file."""
    bench = tyro.cli(Bench, args=argv, prog="adahessian bench")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":  # as `train` does, by default
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    rows: list[Row] = []
    content = {"schema": 2, "device": device.type, "precision": "tf32", "rounds": bench.rounds, "rows": rows}
    for row in _rows(bench, device):
        if not rows and not bench.warm_only:
            print(_HEADER)
        print(_line(row), flush=True)
        rows.append(row)
        if not bench.warm_only:
            write_json(bench.output, content | {"provenance": [provenance(0)]})


def _rows(bench: Bench, device: torch.device) -> Iterator[Row]:
    at_least(1, rounds=bench.rounds)
    if bench.output.exists() and not bench.warm_only:
        raise RunExistsError(f"{bench.output} already exists. Pass another --output, or delete the file.")
    for name in bench.workloads:
        if name not in WORKLOADS:
            raise ConfigError(f"There is no workload {near(name, WORKLOADS)}")
        if WORKLOADS[name].needs_gpu and device.type == "cpu":
            raise ConfigError(f"--workloads {name} is too large for a CPU. Choose another one, or use a GPU.")
    found = {pattern: matching([BASELINE, *LABELS], pattern) for pattern in bench.optimizers}
    for pattern in (pattern for pattern, labels in found.items() if not labels):
        raise ConfigError(f"There is no optimizer {near(pattern, [BASELINE, *LABELS])}")
    chosen = [label for label in (BASELINE, *LABELS) if any(label in labels for labels in found.values())]
    clock = Clock(device=device, rounds=bench.rounds)
    modes = bench.modes or ("captured" if device.type == "cuda" else "eager",)
    for name, mode in product(bench.workloads, modes) if "steps" in bench.parts else ():
        for row in measure_steps(WORKLOADS[name], mode, chosen, clock=clock, warm_only=bench.warm_only):
            yield {"workload": name, **row}
    if "update" in bench.parts and not bench.warm_only:
        for row in measure_update([label for label in UPDATES if label in chosen], clock=clock):
            yield {"workload": "gpt2-124m", **row}


def _line(row: Row) -> str:
    name = f"{row['workload']:10} {row['mode'] if row['part'] == 'steps' else 'update':9} {row['label']:26}"
    if "error" in row:
        return f"{name} failed: {row['error']}"
    if "seconds" in row:
        return f"{name} ready after {row['seconds']:.0f} s"
    numbers = [f"{row['step_ms']:9.3f}", f"{row['state_bytes_per_parameter']:8.2f}"]
    for key, layout, width in (("ratio", ".3f", 8), ("peak_mib", ".0f", 9), ("memory_ratio", ".2f", 7)):
        numbers.append(f"{row[key]:{width}{layout}}" if row.get(key) else " " * width)
    return f"{name} {' '.join(numbers)}  {row.get('step', '')}"
