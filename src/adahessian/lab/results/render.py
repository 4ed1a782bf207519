"""The report as a page for a browser, and RESULTS.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from matplotlib.figure import Figure
from tabulate import tabulate

from adahessian.lab.configs.run import Metric
from adahessian.lab.errors import RunFileError
from adahessian.lab.results import frames, plots, tables
from adahessian.lab.results.tables import Section

DRAWN: dict[str, Callable[[pd.DataFrame, str], Figure]] = {
    "race": lambda runs, title: plots.race(runs, _metric(runs), title),
    "lr": lambda runs, title: plots.lr_sensitivity(runs, _metric(runs), title),
    "cost": lambda runs, title: plots.cost_against_quality(frames.summarize(_main(runs)), _metric(runs), title),
    "seeds": lambda runs, title: plots.every_seed(_main(runs), _metric(runs), title),
}
"""Figures of the runs of one task."""


def can_draw(name: str, runs: pd.DataFrame) -> bool:
    """Return whether there are runs for a figure of one task."""
    if name == "race":
        return bool(runs.groupby("family")["label"].nunique().gt(1).any())
    if name == "lr":
        return bool(runs.groupby("recipe")["lr"].nunique().gt(2).any())
    return bool(runs["step_ms" if name == "cost" else "value"].notna().any())


def page(runs: pd.DataFrame, curves: pd.DataFrame, bench: pd.DataFrame) -> str:
    """Return the report as one HTML page that needs no other file."""
    shown = [
        {
            "title": section.title,
            "table": tables.task_table(section),
            "figures": [
                plots.svg(each, f"{section.title} {place}") for place, each in enumerate(_figures(section, curves))
            ],
            "provenance": _provenance(section.runs),
        }
        for section in tables.sections(runs)
    ]
    finals = runs[(runs.study == "") & ~runs.is_trial]
    across = [
        plots.svg(DRAWN[name](own, f"{tables.heading(str(task))}: {title}"), f"{name} {task}")
        for name, title in {"race": "result by budget", "lr": "result by learning rate", "cost": "cost"}.items()
        for task, own in finals.groupby("task", sort=False)
        if can_draw(name, own)
    ]
    summaries = {"Comparison": tables.comparison(finals, {}), "The paper's numbers": tables.paper_table(finals)}
    template = _environment(Path(__file__).parent, autoescape=True).get_template("report.html.j2")
    return template.render(
        sections=shown, across=across, benches=dict(tables.benches(bench)), summaries=summaries, count=len(runs)
    )


def _figures(section: Section, curves: pd.DataFrame) -> Iterator[Figure]:
    """Yield every seed, and the curves of the watched metric and of the loss."""
    metric, runs = section.metric, section.runs
    if runs.value.notna().any():
        yield plots.every_seed(runs, metric)
    rows = curves.merge(runs[[*frames.GROUP, "seed"]])
    watched = frames.task_config(section.task, {"holdout": int(runs.is_trial.any())}).validation_metric
    if rows.groupby("label").step.nunique().max() > 2:
        if rows.get(watched.name, pd.Series()).notna().any():
            yield plots.curves(rows, watched.name, watched.title, metric=watched)
        yield plots.curves(rows, "train_loss", "training loss")


def _provenance(runs: pd.DataFrame) -> pd.DataFrame:
    rows = [
        {
            "label": row["label"],
            "seed": str(row["seed"]),
            **{name: str(each[name]) for name in ("command", "commit", "date")},
            "hardware": str(each["hardware"].get("accelerator") or each["hardware"]["processor"]),
            "versions": " ".join(f"{name} {version}" for name, version in each["versions"].items()),
        }
        for row in runs.to_dict("records")
        for each in row["provenance"]
    ]
    return pd.DataFrame(rows)


class Results:
    """Renders RESULTS.md, whose template writes every number as an expression.

    Args:
        runs: Rows of ``frames.runs``.
        bench: Rows of ``frames.bench``.
        folder: Folder of figures, relative to the Markdown file.
    """

    def __init__(self, runs: pd.DataFrame, bench: pd.DataFrame, folder: Path) -> None:
        self.runs, self.bench, self.folder = runs[(runs.study == "") & ~runs.is_trial], bench, folder
        self.figures: dict[Path, Figure] = {}
        """The figures that the template shows, by file."""

    def render(self, template: Path) -> str:
        """Return the Markdown.

        Raises:
            RunFileError: If the template is missing, has an error, or names runs that do not exist.
        """
        runs = self.runs
        names: dict[str, Any] = {
            "runs": runs,
            "has": lambda task, label: len(self._of(task, label)) > 0,
            "result": lambda task, label, *metric: tables.result(self._existing(task, label), *metric),
            "versus": lambda task, *labels: tables.verdict(*(self._existing(task, each) for each in labels)),
            "verdicts": lambda *arguments: list(tables.verdicts(runs, *arguments)),
            "comparison": lambda choices: _markdown(tables.comparison(runs, choices)),
            "differences": lambda choices: _markdown(tables.differences(runs, choices)),
            "variants": lambda task, *arguments: _markdown(tables.variants(self._task(task), *arguments)),
            "paper": lambda: _markdown(tables.paper_table(runs)),
            "costs": lambda: [(title, _markdown(table)) for title, table in tables.benches(self.bench)],
            "tasks_with": lambda figure: [task for task in runs.task.unique() if can_draw(figure, self._task(task))],
            "race": lambda task: _markdown(tables.race_table(self._task(task))),
            "lr": lambda task: _markdown(tables.lr_table(self._task(task))),
            "figure": self._figure,
        }
        try:
            return _environment(template.parent).get_template(template.name).render(names)
        except jinja2.TemplateError as error:
            raise RunFileError(f"{template} cannot be rendered ({error}). Correct the template.") from error

    def _figure(self, name: str, task: str) -> str:
        path = self.folder / f"{name}-{task}.png"
        self.figures[path] = DRAWN[name](self._task(task), tables.heading(task))
        return f"![{tables.heading(task)}, {name}]({path.as_posix()})"

    def _task(self, task: str) -> pd.DataFrame:
        return self.runs[self.runs.task == task]

    def _of(self, task: str, label: str) -> pd.DataFrame:
        return frames.most_seeds(self.runs[(self.runs.task == task) & (self.runs.label == label)])

    def _existing(self, task: str, label: str) -> pd.DataFrame:
        runs = self._of(task, label)
        if runs.empty:
            raise RunFileError(f"There are no runs of {task}, {label}. Add them, or change the template.")
        return runs


def _markdown(table: pd.DataFrame) -> str:
    align = ["left" if column in ("task", "setting", "table", "metric") else "right" for column in table]
    return tabulate(table.to_dict("list"), headers="keys", tablefmt="pipe", disable_numparse=True, colalign=align)


def _metric(runs: pd.DataFrame) -> Metric:
    return frames.task_metric(runs.task.iloc[0])


def _main(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of the length that most of them have."""
    main: pd.DataFrame = runs[runs.length == runs.length.mode()[0]]
    return main


def _environment(folder: Path, *, autoescape: bool = False) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
