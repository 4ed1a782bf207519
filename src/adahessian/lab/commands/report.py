"""`adahessian report`: tables and figures of runs, and RESULTS.md."""

import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import tyro
from matplotlib.figure import Figure
from tyro.conf import Positional

from adahessian.lab.configs.checks import Options
from adahessian.lab.configs.run import Metric
from adahessian.lab.errors import RunFileError
from adahessian.lab.paper_figures.style import save
from adahessian.lab.results import frames, plots, tables
from adahessian.lab.training.atomic_files import atomic_write

# The columns that fit a narrow terminal. The page has all of them.
_NUMBERS = ("seeds", "diverged", "training loss", "ms per step")


class Report(Options):
    """Show runs: tables on the terminal, and a page with tables and figures."""

    paths: Positional[tuple[Path, ...]] = (Path("runs"),)  # Run files, or folders to search for run files.
    output: Path = Path("report/index.html")  # The page. It needs no other file.
    markdown: Path | None = None  # Instead of the page: render RESULTS.md.j2 of the first folder to this file.
    check: bool = False  # With --markdown: fail if the file differs, and write nothing.
    missing: bool = False  # Instead of the page: print the paper's settings that PATHS lack, as lines for `queue`.


def main(argv: Sequence[str]) -> None:
    """Read runs and show them."""
    options = tyro.cli(Report, args=argv, prog="adahessian report")
    paths = [path for path in options.paths if path.exists()]
    if (absent := {*options.paths} - {*paths}) and not options.missing:
        raise RunFileError(f"{min(absent)} does not exist. Pass the --output of `adahessian train`.")
    runs, bench = frames.runs(paths, warn=partial(print, file=sys.stderr)), frames.bench(paths)
    if options.missing:
        print("\n".join(tables.missing(runs)))
    elif runs.empty:
        raise RunFileError(f"{' '.join(map(str, options.paths))} has no runs. Pass the --output of `adahessian train`.")
    elif (file := options.markdown) is not None:
        folder, home = options.paths[0], file.absolute().parent
        pictures = Path(os.path.relpath(folder / "figures", home))
        text, figures = _markdown(folder / "RESULTS.md.j2", runs, bench, pictures)
        if not options.check:
            with atomic_write(file) as stream:
                stream.write(text.encode())
            for path, figure in figures.items():
                save(figure, home / path)
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            raise RunFileError(f"{file} is out of date. Run `adahessian report {folder} --markdown {file}`.")
    else:
        with atomic_write(options.output) as stream:  # before the tables, because `| head` ends the command
            stream.write(_page(runs, bench).encode())
        print_tables(runs)
        print(f"{options.output} shows all tables and figures.")


def print_tables(runs: pd.DataFrame) -> None:
    """Print a table per section."""
    for title, own in tables.sections(runs):
        rows = tables.task_table(own)
        shown = ("optimizer", "options", "conditions", frames.metric_of(own).title, *_NUMBERS)
        print(f"{title}\n\n{tables.text(rows[[name for name in shown if name in rows]], 'simple', width=40)}\n")


def _page(runs: pd.DataFrame, bench: pd.DataFrame) -> str:
    """Return the report as one HTML page that needs no other file."""
    finals = runs[~runs.is_trial]
    across = [
        plots.svg(plots.draw(name, own), f"{name} {task}")
        for name in ("race", "lr", "cost")
        for task, own in finals.groupby("task", sort=False)
        if len(frames.shown_in(name, own))
    ]
    sections = [
        {
            "title": title,
            "table": tables.task_table(own),
            "figures": [plots.svg(each, f"{title} {place}") for place, each in enumerate(_figures(own))],
            "provenance": _provenance(own),
        }
        for title, own in tables.sections(runs)
    ]
    summaries = {"Comparison": tables.comparison(finals, {}), "The paper's numbers": tables.paper_table(finals)}
    content = {"sections": sections, "across": across, "summaries": summaries, "count": len(runs)}
    template = _environment(Path(frames.__file__).parent, autoescape=True).get_template("report.html.j2")
    return template.render(content, words=[*tables.WORDS, "label"], benches=dict(tables.benches(bench)))


def _markdown(template: Path, runs: pd.DataFrame, bench: pd.DataFrame, folder: Path) -> tuple[str, dict[Path, Figure]]:
    """Return RESULTS.md, whose template writes every number as an expression, and the figures that go to a folder."""
    runs, figures = runs[~runs.is_trial], dict[Path, Figure]()

    def of(task: str) -> pd.DataFrame:
        return runs[runs.task == task]

    def find(task: str, label: str) -> pd.DataFrame:
        if (found := frames.most_seeds(runs[(runs.task == task) & (runs.label == label)])).empty:
            raise RunFileError(f"No run of {task} has the label {label}. Add one, or change the template.")
        return found

    def as_text(value: Any) -> Any:
        return tables.text(value) if isinstance(value, pd.DataFrame) else value

    def figure(name: str, task: str) -> str:
        path = folder / f"{name}-{task}.png"
        figures[path] = plots.draw(name, of(task))
        return f"![{frames.heading(task)}, {name}]({path.as_posix()})"

    names = {
        "runs": runs,
        "result": lambda task, label, *metric: tables.result(find(task, label), *metric),
        "versus": lambda task, *labels: tables.verdict(*(find(task, each) for each in labels)),
        "costs": partial(tables.benches, bench),
        "tasks_with": lambda figure: [task for task in runs.task.unique() if len(frames.shown_in(figure, of(task)))],
        "comparison": partial(tables.comparison, runs),
        "differences": partial(tables.differences, runs),
        "paper": partial(tables.paper_table, runs),
        "variants": lambda task, *arguments: tables.variants(of(task), *arguments),
        "race": lambda task: tables.race_table(of(task)),
        "lr": lambda task: tables.lr_table(of(task)),
        "figure": figure,
    }
    try:
        text = _environment(template.parent, finalize=as_text).get_template(template.name).render(names)
    except jinja2.TemplateError as error:
        raise RunFileError(f"{template} cannot be rendered ({error}). Correct the template.") from error
    return text, figures


def _figures(runs: pd.DataFrame) -> Iterator[Figure]:
    """Yield every seed, and the curves of the watched metric and of the loss."""
    if len(frames.shown_in("seeds", runs)):
        yield plots.every_seed(runs, frames.metric_of(runs))
    rows = frames.curves(runs)
    watched = frames.task_config(runs.task.iloc[0], {"holdout": int(runs.is_trial.any())}).validation_metric
    if rows.groupby("label").step.nunique().max() > 2:
        train_loss = Metric(name="train_loss", title="training loss", higher_is_better=False)
        yield from (plots.curves(rows, each) for each in (watched, train_loss) if each.name in rows)


def _provenance(runs: pd.DataFrame) -> pd.DataFrame:
    each = runs[["label", "seed", "provenance"]].explode("provenance", ignore_index=True)
    origins = pd.DataFrame([*each.pop("provenance")])
    origins["versions"] = [" ".join(f"{name} {version}" for name, version in of.items()) for of in origins.versions]
    origins["hardware"] = [frames.hardware(origin) for _, origin in origins.iterrows()]
    return each.join(origins[["command", "commit", "date", "hardware", "versions"]]).astype(str)


def _environment(folder: Path, **options: Any) -> jinja2.Environment:
    options |= {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    return jinja2.Environment(loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined, **options)
