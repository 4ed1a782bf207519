"""``adahessian paper``: the paper's tables and figures from the runs at hand, and what is missing of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

from adahessian.lab import landscapes
from adahessian.lab.checkpoints import CheckpointError
from adahessian.lab.data.errors import DataError
from adahessian.lab.files import write_json, written_whole
from adahessian.lab.paper.cells import PaperTable, runs_of
from adahessian.lab.paper.checkpoint import load_trained
from adahessian.lab.paper.document import FIGURE1, FIGURE2, FIGURE3, paper_document
from adahessian.lab.paper.missing import missing_benches, missing_runs
from adahessian.lab.paper.overhead import read_benches
from adahessian.lab.paper.surface import RISE, UnknownBlockError, measure_surface, plot_surface
from adahessian.lab.paper.sweeps import other_sweep_tables, sweep_tables
from adahessian.lab.paper.tables import result_tables, stand_in_tables
from adahessian.lab.plots import DPI, plot_quadratic, plot_wavy
from adahessian.lab.provenance import provenance
from adahessian.lab.report.groups import Group, group_runs, known
from adahessian.lab.report.markdown import markdown
from adahessian.lab.runs import NotARunError, find_results
from adahessian.lab.tasks.registry import UnknownTaskError
from adahessian.lab.train import Session

_FIGURE2_NUMBERS = "figure2.json"
# Residual up to which a vector is called an eigenvector.
_CONVERGED = 0.05


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Every table and figure of the paper, from the runs at hand; or figure 2 alone, of a network of yours."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Files of runs and of adahessian bench, or folders with some; by default the folder runs, if it is there."""

    output: Path = Path("paper")
    """Folder for paper.md and its pictures."""

    missing: bool = False
    """List what is not measured yet, with the commands that would measure it, and write nothing."""

    surface: Path | None = None
    """Draw figure 2 instead: the loss around these weights (weights.pt of a run, or its checkpoint.pt)."""

    task: str | None = None
    """The task of --surface, where no finished run beside the folder of the weights says it."""

    data_dir: Path = Path("data")
    """Folder with the data of that task."""

    block: str | None = None
    """A parameter or module for --surface, by its name; by default the last weights but one."""

    def run(self) -> None:
        """Draw everything that there is, and say how much that is."""
        console = Console()
        try:
            if self.surface is not None:
                self._draw_surface(self.surface, console)
            else:
                self._draw_paper(console)
        except OSError as error:
            raise SystemExit(f"adahessian paper: {error}. Choose another --output") from error

    def _draw_paper(self, console: Console) -> None:
        paths = self.runs or tuple(folder for folder in (Session.output,) if folder.is_dir())
        benches = read_benches(paths)
        groups = _groups([path for path in paths if path not in benches], console)
        of_paper = [*result_tables(), *sweep_tables()]
        if self.missing:
            _list(console, missing_runs(of_paper, groups) | missing_benches(benches))
            return
        tables = [*of_paper, *other_sweep_tables(groups), *stand_in_tables(groups)]
        document = paper_document(tables, groups, benches, self._what_figure2_shows())
        self.output.mkdir(parents=True, exist_ok=True)
        console.print("figures 1 and 3 take half a minute", highlight=False)
        draw_landscapes(self.output)
        for picture in document.pictures:
            with written_whole(self.output / picture.file) as file:
                picture.draw("light").savefig(file, dpi=DPI)
        with written_whole(self.output / "paper.md") as file:
            file.write(markdown(document).encode())
        console.print(_summary(tables, groups))
        console.print(f"{self.output / 'paper.md'}; --missing lists what to run", highlight=False, soft_wrap=True)

    def _draw_surface(self, weights: Path, console: Console) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            trained = load_trained(weights, task=self.task, data_dir=self.data_dir, device=device)
            surface = measure_surface(trained.model, trained.loss, self.block)
        except (CheckpointError, DataError, UnknownTaskError, UnknownBlockError) as error:
            raise SystemExit(f"adahessian paper: {error}") from error
        self.output.mkdir(parents=True, exist_ok=True)
        plot_surface(surface, f"{trained.experiment.title}: {surface.block}", self.output / FIGURE2)
        shows = (
            f"{trained.experiment.title}: the loss of one training batch around the weights of {surface.block} "
            f"({surface.parameters:,} of them), along its two Hessian eigenvectors of largest magnitude. Eigenvalues "
            f"{surface.eigenvalues[0]:.4g} and {surface.eigenvalues[1]:.4g}, found within "
            f"{surface.residuals[0]:.1g} and {surface.residuals[1]:.1g} of themselves. The axes reach to where a "
            f"parabola of the first curvature has {'risen' if surface.eigenvalues[0] > 0 else 'fallen'} by {RISE:g}."
        )
        if max(surface.residuals) > _CONVERGED:
            shows += " The search for them did not converge: take the directions for curved ones, not for eigenvectors."
        write_json(
            self.output / _FIGURE2_NUMBERS,
            {"shows": shows, "provenance": provenance(seed=0), "weights": weights.name, **asdict(surface)},
        )
        console.print(f"{shows}\n{self.output / FIGURE2}", highlight=False, soft_wrap=True)

    def _what_figure2_shows(self) -> str | None:
        """What an earlier call drew into the same folder."""
        try:
            return str(json.loads((self.output / _FIGURE2_NUMBERS).read_text(encoding="utf-8"))["shows"])
        except (OSError, ValueError, KeyError):
            return None


def _groups(paths: Sequence[Path], console: Console) -> list[Group]:
    tell = partial(console.print, highlight=False, soft_wrap=True)
    try:
        runs, strangers = known(find_results(paths, tell))
    except NotARunError as error:
        raise SystemExit(f"adahessian paper: {error}. Name files of runs or of adahessian bench, or folders") from error
    for stranger in strangers:
        tell(stranger)
    return group_runs(runs)


def draw_landscapes(folder: Path) -> None:
    """Draw figures 1 and 3, of functions that need no data."""
    plot_quadratic(landscapes.solve_quadratic(), folder / FIGURE1)
    walks = {beta1: landscapes.compare_hessian_momentum(beta1) for beta1 in landscapes.WAVY_BETA1S}
    plot_wavy(walks, folder / FIGURE3)


def _summary(tables: Sequence[PaperTable], groups: Sequence[Group]) -> Table:
    """How much of each table is measured."""
    shown = Table(title="Cells that are measured", title_justify="left")
    shown.add_column("table")
    shown.add_column("measured", justify="right")
    for table in tables:
        cells = list(table.cells)
        measured = sum(runs_of(cell, groups) is not None for cell in cells)
        shown.add_row(table.title, f"{measured} of {len(cells)}")
    return shown


def _list(console: Console, commands: dict[str, list[str]]) -> None:
    for command, cells in commands.items():
        for cell in cells:
            console.print(cell, highlight=False, soft_wrap=True)
        console.print(f"  {command}", style="bold", highlight=False, soft_wrap=True)
    runs = f"{len(commands)} command{'' if len(commands) == 1 else 's'}"
    console.print(f"{runs} to go" if commands else "everything is measured", highlight=False)
