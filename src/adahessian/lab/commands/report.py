"""`adahessian report`: tables and figures of runs, and RESULTS.md."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from adahessian.lab.errors import RunFileError
from adahessian.lab.paper_figures.style import save
from adahessian.lab.results import frames, paper, render, tables
from adahessian.lab.training.atomic_files import atomic_write


@dataclass(frozen=True, kw_only=True)
class Report:
    """Show runs: tables on the terminal, and a page with tables and figures."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path("runs"),)
    """Run files, and folders that are searched for them."""

    output: Path = Path("report/index.html")
    """The page. It needs no other file."""

    markdown: Path | None = None
    """Instead of the page: render RESULTS.md.j2, in the first folder, into this file."""

    check: bool = False
    """With --markdown: fail if the file differs, and write nothing."""

    missing: bool = False
    """Instead of the page: print what the paper ran and PATHS lack, for `adahessian queue`."""


def main(argv: Sequence[str]) -> None:
    """Read runs and show them."""
    options = tyro.cli(Report, args=list(argv), prog="adahessian report")
    errors = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    runs, bench = frames.runs(options.paths, errors.print), frames.bench(options.paths)
    if options.missing:
        print("\n".join(paper.missing(runs)))
    elif runs.empty:
        raise RunFileError(f"{' '.join(map(str, options.paths))} has no runs. Pass the --output of `adahessian train`.")
    elif options.markdown:
        _write_markdown(options.paths[0], options.markdown, runs, bench, check=options.check)
    else:
        for section in tables.sections(runs):
            _print(section)
        _write(options.output, render.page(runs, frames.curves(options.paths), bench))
        print(f"{options.output} shows all tables and figures.")


def _write_markdown(folder: Path, file: Path, runs: pd.DataFrame, bench: pd.DataFrame, *, check: bool) -> None:
    home = file.absolute().parent
    results = render.Results(runs, bench, Path(os.path.relpath(folder / "figures", home)))
    text = results.render(folder / "RESULTS.md.j2")
    if check:
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            raise RunFileError(f"{file} is out of date. Run `adahessian report {folder} --markdown {file}`.")
        return
    _write(file, text)
    for path, figure in results.figures.items():
        save(figure, home / path)


def _write(file: Path, text: str) -> None:
    with atomic_write(file) as stream:
        stream.write(text.encode())


def _print(section: tables.Section) -> None:
    """Print the columns that fit a narrow terminal. The page has all of them."""
    rows = tables.task_table(section)
    table = Table(title=section.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    words, numbers = (
        ("optimizer", "options", "conditions"),
        (section.metric.title, "seeds", "diverged", "training loss"),
    )
    shown = [column for column in (*words, *numbers) if column in rows]
    for column in shown:
        table.add_column(column, justify="left" if column in words else "right", no_wrap=column not in words)
    for row in rows[shown].itertuples(index=False):
        table.add_row(*map(str, row))
    Console(highlight=False, markup=False).print(table)
