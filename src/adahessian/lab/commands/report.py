"""`adahessian report`: tables and figures of runs, and RESULTS.md."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from adahessian.lab.errors import RunFileError
from adahessian.lab.paper_figures.style import save
from adahessian.lab.results import frames, paper, render, tables
from adahessian.lab.training.atomic_files import atomic_write

# The columns that fit a narrow terminal. The page has all of them.
_WORDS, _NUMBERS = ("optimizer", "options", "conditions"), ("seeds", "diverged", "training loss", "ms per step")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Show runs: tables on the terminal, and a page with tables and figures."""

    paths: Positional[tuple[Path, ...]] = (Path("runs"),)  # Run files, and folders that are searched for them.
    output: Path = Path("report/index.html")  # The page. It needs no other file.
    markdown: Path | None = None  # Instead of the page: render RESULTS.md.j2, in the first folder, into this file.
    check: bool = False  # With --markdown: fail if the file differs, and write nothing.
    missing: bool = False  # Instead of the page: print what the paper ran and PATHS lack, for `adahessian queue`.


def main(argv: Sequence[str]) -> None:
    """Read runs and show them."""
    options = tyro.cli(Report, args=argv, prog="adahessian report")
    warn = Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print
    runs, bench, file = frames.runs(options.paths, warn), frames.bench(options.paths), options.markdown
    if options.missing:
        print("\n".join(paper.missing(runs)))
    elif runs.empty:
        raise RunFileError(f"{' '.join(map(str, options.paths))} has no runs. Pass the --output of `adahessian train`.")
    elif file is not None:
        folder, home = options.paths[0], file.absolute().parent
        pictures = Path(os.path.relpath(folder / "figures", home))
        text, figures = render.markdown(folder / "RESULTS.md.j2", runs, bench, pictures)
        if not options.check:
            _write(file, text)
            for path, figure in figures.items():
                save(figure, home / path)
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            raise RunFileError(f"{file} is out of date. Run `adahessian report {folder} --markdown {file}`.")
    else:
        print_tables(runs)
        _write(options.output, render.page(runs, bench))
        print(f"{options.output} shows all tables and figures.")


def _write(file: Path, text: str) -> None:
    with atomic_write(file) as stream:
        stream.write(text.encode())


def print_tables(runs: pd.DataFrame) -> None:
    """Print a table per section."""
    for title, own in tables.sections(runs):
        rows = tables.task_table(own)
        rows = rows[[name for name in (*_WORDS, frames.metric_of(own).title, *_NUMBERS) if name in rows]]
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in map(str, rows):
            table.add_column(column, justify="left" if column in _WORDS else "right", no_wrap=column not in _WORDS)
        for row in rows.to_numpy():
            table.add_row(*row)
        Console(highlight=False, markup=False).print(table)
