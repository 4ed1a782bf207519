"""``adahessian bench``: what a step costs, in one run, one set of tables and one file."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import torch
from rich.console import Console

from adahessian.lab.bench import growth, update
from adahessian.lab.bench.cells import Cell
from adahessian.lab.bench.conditions import Conditions, DeviceName
from adahessian.lab.bench.contenders import ADAM_NAME, CONTENDERS, REFERENCE, SGD_NAME, Contender, named
from adahessian.lab.bench.kernels import profile_whole_steps
from adahessian.lab.bench.peers import installed_peers
from adahessian.lab.bench.results import Results, UnusableFileError
from adahessian.lab.bench.tables import NAMES_IN_OVERHEAD, PAPER_OVERHEAD, tables
from adahessian.lab.bench.timing import Stopwatch
from adahessian.lab.bench.training import MODES, Mode
from adahessian.lab.bench.whole_step import measure_whole_steps
from adahessian.lab.bench.workloads import WORKLOAD_NAMES, WorkloadName
from adahessian.lab.provenance import provenance

Part = Literal["steps", "overhead", "growth", "update", "kernels"]
PARTS: tuple[Part, ...] = get_args(Part)
_UNLESS_NAMED: tuple[Part, ...] = tuple(part for part in PARTS if part != "kernels")


def _default_device() -> DeviceName:
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a training step costs with AdaHessian, SGD, Adam, AdamW and the peers that are installed."""

    # The help keeps the breaks of these lines: they stand between sentences.
    parts: tuple[Part, ...] = _UNLESS_NAMED
    """The whole step, the paper's overhead table, how the cost grows, and the update alone.
    Kernels, those that take the time of the whole step, are for those who ask: everything is compiled again."""

    workloads: tuple[WorkloadName, ...] = WORKLOAD_NAMES
    """What to train.
    On a GPU at the sizes of real use, on a CPU at small ones. Growth takes the first of them."""

    modes: tuple[Mode, ...] = ()
    """How to run a step: as written, compiled, or captured in a CUDA graph.
    By default a GPU runs all three and a CPU eager alone, since compiling takes minutes there.
    Growth is by default measured in eager mode."""

    optimizers: tuple[str, ...] = ()
    """Only optimizers whose names begin so, such as AdamW or pytorch_optimizer; by default all.
    What times are set against is always there: SGD, and for the update alone AdamW and a copy of memory.
    A name that nothing begins with is answered with all that there are."""

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
    """File of results, by default runs/bench-cpu.json or runs/bench-cuda.json. It is written after every cell.
    Cells in it that are not measured again are kept: all must come from the same code, hardware, versions and
    conditions."""

    overwrite: bool = False
    """Give up what a file holds that comes from others."""

    def run(self) -> None:
        """Measure everything, print a line for each cell, then the tables, and write the file."""
        self._check()
        peers, not_found = installed_peers()
        self._check_names(peers, not_found)
        started = time.perf_counter()
        conditions = Conditions(device=self.device, channels_last=self.channels_last, seed=self.seed)
        conditions.set_up()
        results = self._results(conditions, not_found)
        # Reasons, names and paths may hold brackets, which are no markup.
        console = Console(markup=False, highlight=False)
        try:
            with warnings.catch_warnings():
                # Each step of a peer lets go of the cycle that torch warns of.
                warnings.filterwarnings("ignore", r"Using backward\(\) with create_graph=True")
                for cell in self._cells(conditions, peers):
                    results.add(cell)
                    console.print(_line(cell), soft_wrap=True)
        finally:
            # Also when it is stopped in the middle: what was measured until then counts.
            if results.cells:
                for table in tables(results.cells):
                    console.print()
                    console.print(table)
                console.print()
                if not_found:
                    console.print(f"looked for and not installed: {'; '.join(not_found)}")
                console.rule(f"results after {time.perf_counter() - started:.0f} s", align="left")
                console.print(f"  {results.path}", soft_wrap=True)

    def _results(self, conditions: Conditions, not_found: list[str]) -> Results:
        try:
            return Results(
                self.output or Path("runs") / f"bench-{self.device}.json",
                provenance=provenance(seed=self.seed),
                conditions={**conditions.record(), "rounds": self.rounds, "min_seconds": self.min_seconds},
                not_found=not_found,
                overwrite=self.overwrite,
            )
        except UnusableFileError as error:
            raise _refusal(f"--output: {error}") from error

    def _check(self) -> None:
        for name in ("parts", "workloads"):
            if not getattr(self, name):
                raise _refusal(f"--{name} needs one name or more")
        if self.rounds < 1:
            raise _refusal("--rounds must be 1 or more")
        if not 0 < self.min_seconds < math.inf:
            raise _refusal("--min-seconds must be more than 0, and finite")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise _refusal("--device cuda needs a GPU that torch can use")
        if self.device == "cpu" and "captured" in self.modes:
            raise _refusal("--modes captured needs a GPU: there are no CUDA graphs on a CPU")
        if set(self.parts) == {"overhead"} and PAPER_OVERHEAD.keys().isdisjoint(self.workloads):
            raise _refusal(f"--parts overhead needs one of --workloads {' '.join(PAPER_OVERHEAD)}")

    def _check_names(self, peers: list[Contender], not_found: list[str]) -> None:
        names = self._names(peers)
        for beginning in self.optimizers:
            if not any(name.startswith(beginning) for name in names):
                missing = [f"{name} (not installed)" for name in not_found if name.startswith(beginning)]
                raise _refusal(
                    f"--optimizers {beginning}: no name begins so in these parts, workloads and modes. There are:"
                    + "".join(f"\n  {name}" for name in (*names, *missing))
                )

    def _names(self, peers: list[Contender]) -> list[str]:
        """All optimizers of the parts, workloads and modes, whichever are asked for."""
        names = [
            name
            for workload, mode in self._whole_steps()
            for name in self._names_of_whole_steps(self.parts, workload, mode, peers)
        ]
        if "growth" in self.parts:
            names += growth.NAMES
        if "update" in self.parts:
            names += update.NAMES
        return list(dict.fromkeys(names))

    def _whole_steps(self) -> Iterator[tuple[WorkloadName, Mode]]:
        return product(self.workloads, self.modes or (MODES if self.device == "cuda" else MODES[:1]))

    def _names_of_whole_steps(
        self, parts: tuple[Part, ...], workload: WorkloadName, mode: Mode, peers: list[Contender]
    ) -> list[str]:
        able = [contender for contender in (REFERENCE, *CONTENDERS, *peers) if mode in contender.modes]
        in_paper = (SGD_NAME, ADAM_NAME, *NAMES_IN_OVERHEAD) if workload in PAPER_OVERHEAD else ()
        return [
            name
            for contender in able
            for name in contender.schedules
            if (("steps" in parts or "kernels" in parts) and name not in NAMES_IN_OVERHEAD[1:])
            or ("overhead" in parts and name in in_paper)
        ]

    def _chosen_for_whole_steps(
        self, parts: tuple[Part, ...], peers: list[Contender]
    ) -> Iterator[tuple[WorkloadName, Mode, list[Contender]]]:
        for workload, mode in self._whole_steps():
            if names := self._asked_for(self._names_of_whole_steps(parts, workload, mode, peers)):
                yield workload, mode, named((*CONTENDERS, *peers), names)

    def _asked_for(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if not self.optimizers or name.startswith(self.optimizers)]

    def _cells(self, conditions: Conditions, peers: list[Contender]) -> Iterator[Cell]:
        stopwatch = Stopwatch(device=torch.device(self.device), rounds=self.rounds, min_seconds=self.min_seconds)
        timed: tuple[Part, ...] = tuple(part for part in self.parts if part != "kernels")
        for workload, mode, contenders in self._chosen_for_whole_steps(timed, peers):
            for name, cell in measure_whole_steps(
                conditions.workloads[workload], mode, contenders, conditions=conditions, stopwatch=stopwatch
            ):
                yield _placed("steps", workload, mode, name, cell)
        if "growth" in self.parts and (names := self._asked_for(growth.NAMES)):
            for workload, mode in product(self.workloads[:1], self.modes or MODES[:1]):
                for size, name, cell in growth.measure_growth(
                    conditions.workloads[workload], mode, names, conditions=conditions, stopwatch=stopwatch
                ):
                    yield _placed("growth", f"{workload}, {size}", mode, name, cell)
        if "update" in self.parts and (names := self._asked_for(update.NAMES)):
            for parameters, shapes in update.SHAPES.items():
                for name, cell in update.measure_update(shapes(), names, seed=self.seed, stopwatch=stopwatch):
                    yield _placed("update", parameters, "eager", name, cell)
        if "kernels" in self.parts:
            for workload, mode, contenders in self._chosen_for_whole_steps(("kernels",), peers):
                for name, cell in profile_whole_steps(
                    conditions.workloads[workload], mode, contenders, conditions=conditions, rounds=self.rounds
                ):
                    yield _placed("kernels", workload, mode, name, cell)


def _refusal(reason: str) -> SystemExit:
    return SystemExit(f"adahessian bench: {reason}")


def _placed(part: Part, workload: str, mode: str, optimizer: str, cell: Cell) -> Cell:
    return {"part": part, "workload": workload, "mode": mode, "optimizer": optimizer, **cell}


def _line(cell: Cell) -> str:
    place = "  ".join(cell[name] for name in ("workload", "mode", "optimizer"))
    if "unavailable" in cell:
        return f"{place}: not available: {cell['unavailable']}"
    beside = f", {cell['time_to_sgd']:.2f} x SGD" if cell.get("time_to_sgd") is not None else ""
    if "launches" in cell:
        beside = f" in {cell['launches']:.0f} kernels"
    return f"{place}: {cell['milliseconds']:.3f} ms{beside}"
