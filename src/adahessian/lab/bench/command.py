"""``adahessian bench``: what a step costs, in one run, one set of tables and one file."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import torch
from rich.console import Console

from adahessian.lab.bench import update
from adahessian.lab.bench.cells import Cell
from adahessian.lab.bench.conditions import Conditions, DeviceName
from adahessian.lab.bench.contenders import ADAM_NAME, CONTENDERS, Contender
from adahessian.lab.bench.growth import measure_growth
from adahessian.lab.bench.peers import installed_peers
from adahessian.lab.bench.results import Results
from adahessian.lab.bench.tables import NAMES_IN_OVERHEAD, PAPER_OVERHEAD, tables
from adahessian.lab.bench.timing import Stopwatch
from adahessian.lab.bench.training import MODES, Mode
from adahessian.lab.bench.whole_step import measure_whole_steps
from adahessian.lab.bench.workloads import WORKLOAD_NAMES, WorkloadName
from adahessian.lab.provenance import provenance

Part = Literal["steps", "overhead", "growth", "update"]
PARTS: tuple[Part, ...] = get_args(Part)

_WIDTH_IN_A_LOG = 170


def _default_device() -> DeviceName:
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a training step costs with AdaHessian, SGD, Adam, AdamW and the peers that are installed."""

    parts: tuple[Part, ...] = PARTS
    """The whole step, the paper's overhead table, how the cost grows, and the update alone."""

    workloads: tuple[WorkloadName, ...] = WORKLOAD_NAMES
    """What to train. On a GPU at the sizes of real use, on a CPU at small ones. Growth takes the first of them."""

    modes: tuple[Mode, ...] = ()
    """How to run a step: as written, compiled, or captured in a CUDA graph. By default a GPU runs all three and a CPU
    eager alone, since compiling takes minutes there; growth is measured in eager mode."""

    optimizers: tuple[str, ...] = ()
    """Only optimizers whose names begin so, such as AdamW or pytorch_optimizer. SGD, which times are set against, is
    always there."""

    device: DeviceName = field(default_factory=_default_device)
    """Where to measure."""

    channels_last: bool = field(default_factory=torch.cuda.is_available)
    """Whether images and the weights of convolutions lie in memory with their channels last, for everybody."""

    rounds: int = 5
    """Turns of each optimizer; the median counts."""

    min_seconds: float = 0.2
    """Length of a turn at least."""

    seed: int = 0
    """Seed of the weights and of the data."""

    output: Path | None = None
    """File of results; results/bench-cpu.json on a CPU. It is written after every cell. Cells that it already holds are
    kept if they come from the same code, hardware, versions and conditions."""

    def run(self) -> None:
        """Measure everything, print a line for each cell, then the tables, and write the file."""
        self._check()
        started = time.perf_counter()
        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDTH_IN_A_LOG)
        conditions = Conditions(device=self.device, channels_last=self.channels_last, seed=self.seed)
        conditions.set_up()
        peers, not_found = installed_peers()
        results = Results(
            self.output or Path("results") / f"bench-{self.device}.json",
            provenance=provenance(seed=self.seed),
            conditions=conditions.record(),
            not_found=not_found,
        )
        if results.replaces_others:
            console.print(
                f"{results.path} comes from other code, hardware, versions or conditions: it is written anew",
                highlight=False,
                soft_wrap=True,
            )
        with warnings.catch_warnings():
            # Each step of a peer lets go of the cycle that torch warns of.
            warnings.filterwarnings("ignore", r"Using backward\(\) with create_graph=True")
            for cell in self._cells(conditions, peers):
                results.add(cell)
                console.print(_line(cell), highlight=False, soft_wrap=True)
        for table in tables(results.cells):
            console.print()
            console.print(table)
        if not_found:
            console.print(f"looked for and not installed: {'; '.join(not_found)}", highlight=False)
        console.rule(f"done in {time.perf_counter() - started:.0f} s", align="left")
        console.print(f"  {results.path}", highlight=False, soft_wrap=True)

    def _check(self) -> None:
        if self.rounds < 1:
            raise SystemExit("adahessian bench: --rounds must be 1 or more")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("adahessian bench: --device cuda needs a GPU that torch can use")
        if self.device == "cpu" and "captured" in self.modes:
            raise SystemExit("adahessian bench: --modes captured needs a GPU: there are no CUDA graphs on a CPU")

    def _cells(self, conditions: Conditions, peers: list[Contender]) -> Iterator[Cell]:
        stopwatch = Stopwatch(device=torch.device(self.device), rounds=self.rounds, min_seconds=self.min_seconds)
        for workload, mode in product(self.workloads, self.modes or (MODES if conditions.on_gpu else MODES[:1])):
            if contenders := self._contenders(workload, mode, peers):
                for name, cell in measure_whole_steps(
                    conditions.workloads[workload], mode, contenders, conditions=conditions, stopwatch=stopwatch
                ):
                    yield _placed("steps", workload, mode, name, cell)
        if "growth" in self.parts:
            for workload, mode in product(self.workloads[:1], self.modes or MODES[:1]):
                for size, name, cell in measure_growth(
                    conditions.workloads[workload], mode, conditions=conditions, stopwatch=stopwatch
                ):
                    yield _placed("growth", f"{workload}, {size}", mode, name, cell)
        if "update" in self.parts:
            for parameters, shapes in update.SHAPES.items():
                for name, cell in update.measure_update(shapes(), seed=self.seed, stopwatch=stopwatch):
                    yield _placed("update", parameters, "eager", name, cell)

    def _contenders(self, workload: WorkloadName, mode: Mode, peers: list[Contender]) -> list[Contender]:
        """Those of the parts and names that were asked for."""

        def wanted(name: str) -> bool:
            in_steps = "steps" in self.parts and name not in NAMES_IN_OVERHEAD[1:]
            in_overhead = (
                "overhead" in self.parts and workload in PAPER_OVERHEAD and name in (ADAM_NAME, *NAMES_IN_OVERHEAD)
            )
            return (in_steps or in_overhead) and (not self.optimizers or name.startswith(self.optimizers))

        able = [contender for contender in (*CONTENDERS, *peers) if mode in contender.modes]
        chosen = [contender.only(filter(wanted, contender.schedules)) for contender in able]
        return [contender for contender in chosen if contender.schedules]


def _placed(part: Part, workload: str, mode: str, optimizer: str, cell: Cell) -> Cell:
    return {"part": part, "workload": workload, "mode": mode, "optimizer": optimizer, **cell}


def _line(cell: Cell) -> str:
    place = "  ".join(cell[name] for name in ("workload", "mode", "optimizer"))
    if "unavailable" in cell:
        return f"{place}: not available: {cell['unavailable']}"
    beside = f", {cell['time_to_sgd']:.2f} x SGD" if cell.get("time_to_sgd") is not None else ""
    return f"{place}: {cell['milliseconds']:.3f} ms{beside}"
