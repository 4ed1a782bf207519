"""`adahessian bench`: what a training step costs, relative to a baseline."""

from collections.abc import Iterator, Sequence
from fnmatch import filter as matching
from fnmatch import fnmatch
from pathlib import Path

import torch
import tyro

from adahessian.lab.bench.jobs import BASELINE, Job, Mode, Row
from adahessian.lab.bench.measure import Clock, measure
from adahessian.lab.bench.workloads import LABELS, WORKLOADS
from adahessian.lab.configs.checks import Count, Options
from adahessian.lab.configs.presets import near
from adahessian.lab.errors import ConfigError, RunExistsError
from adahessian.lab.training.atomic_files import write_json
from adahessian.lab.training.provenance import provenance

# Columns of numbers, with their decimal places.
_DIGITS = {"step_ms": 3, "ratio": 3, "state_bytes_per_parameter": 2, "peak_mib": 0, "memory_ratio": 2}
_HEADER = f"{'workload':10} {'mode':9} {'optimizer':26}  ms/step    ratio  state/p peak MiB   memory  step"


class Bench(Options):
    """Measure time per step, peak memory and optimizer state of all optimizers, on a GPU if there is one.

    Networks are trained on random data. Every row is printed and written to the output as soon as it is measured.
    """

    workloads: tuple[str, ...] = ("resnet20", "gpt")  # Networks: digits, resnet20, gpt, gpt2-124m, lstm.
    modes: tuple[Mode, ...] = ()  # Whole steps (eager or captured on a GPU), or updates alone. Default: as in `train`.
    optimizers: tuple[str, ...] = ("*",)  # Rows to measure, such as adamw adahessian-kron/every-20 'adahessian/*'.
    rounds: Count = 5  # Rounds in which all optimizers take turns. Results are medians over rounds.
    at_once: Count = 1  # Optimizers to prepare in parallel, because compiling takes minutes.
    output: Path = Path("bench.json")  # File for the rows. It must not exist yet.


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
    if bench.output.exists():
        raise RunExistsError(f"{bench.output} already exists. Pass another --output, or delete the file.")
    bench.output.parent.mkdir(parents=True, exist_ok=True)
    modes = bench.modes or ("captured" if device.type == "cuda" else "eager",)
    for name in bench.workloads:
        if name not in WORKLOADS:
            raise ConfigError(f"There is no workload {near(name, WORKLOADS)}")
        if WORKLOADS[name].needs_gpu and device.type == "cpu" and modes != ("update",):
            raise ConfigError(f"--workloads {name} is too large for a CPU. Choose another one, or use a GPU.")
    for pattern in bench.optimizers:
        if not matching([BASELINE, *LABELS], pattern):
            raise ConfigError(f"There is no optimizer {near(pattern, [BASELINE, *LABELS])}")
    chosen = [BASELINE, *(label for label in LABELS if any(fnmatch(label, pattern) for pattern in bench.optimizers))]
    wanted = [(name, mode, label) for name in bench.workloads for mode in modes for label in chosen]
    jobs = [Job.of(WORKLOADS[name], mode, label, device) for name, mode, label in wanted]
    measured = measure(jobs, clock=Clock(rounds=bench.rounds), at_once=bench.at_once)
    for (name, *_), row in zip(wanted, measured, strict=True):
        yield {"workload": name, **row}


def _line(row: Row) -> str:
    name = f"{row['workload']:10} {row['mode']:9} {row['label']:26}"
    if "error" in row:
        return f"{name} failed: {row['error']}"
    numbers = [f"{row[key]:8.{digits}f}" if row.get(key) else " " * 8 for key, digits in _DIGITS.items()]
    return f"{name} {' '.join(numbers)}  {row.get('step', '')}"
