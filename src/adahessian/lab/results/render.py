"""The report as a page for a browser, and RESULTS.md."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from matplotlib.figure import Figure
from tabulate import tabulate

from adahessian.lab.errors import RunFileError
from adahessian.lab.results import frames, plots, tables

DRAWN = {"race": plots.race, "lr": plots.lr_sensitivity, "cost": plots.cost_against_quality, "seeds": plots.every_seed}
"""Figures of the runs of one task."""


def draw(name: str, runs: pd.DataFrame, *subtitle: str) -> Figure:
    """Return a figure of the runs of one task."""
    return DRAWN[name](runs, frames.metric_of(runs), ": ".join([tables.heading(runs.task.iloc[0]), *subtitle]))


def page(runs: pd.DataFrame, bench: pd.DataFrame) -> str:
    """Return the report as one HTML page that needs no other file."""
    finals = runs[~runs.is_trial]
    across = [
        plots.svg(draw(name, own, subtitle), f"{name} {task}")
        for name, subtitle in {"race": "result by budget", "lr": "result by learning rate", "cost": "cost"}.items()
        for task, own in finals.groupby("task", sort=False)
        if len(frames.shown_in(name, own))
    ]
    shown = [
        {
            "title": title,
            "table": tables.task_table(own),
            "figures": [plots.svg(each, f"{title} {place}") for place, each in enumerate(_figures(own))],
            "provenance": _provenance(own),
        }
        for title, own in tables.sections(runs)
    ]
    summaries = {"Comparison": tables.comparison(finals, {}), "The paper's numbers": tables.paper_table(finals)}
    template = _environment(Path(__file__).parent, autoescape=True).get_template("report.html.j2")
    return template.render(
        sections=shown, across=across, benches=dict(tables.benches(bench)), summaries=summaries, count=len(runs)
    )


def markdown(template: Path, runs: pd.DataFrame, bench: pd.DataFrame, folder: Path) -> tuple[str, dict[Path, Figure]]:
    """Return RESULTS.md, whose template writes every number as an expression, and the figures that go to a folder."""
    runs, figures = runs[~runs.is_trial], dict[Path, Figure]()

    def of(task: str) -> pd.DataFrame:
        return runs[runs.task == task]

    def find(task: str, label: str) -> pd.DataFrame:
        if (found := frames.most_seeds(runs[(runs.task == task) & (runs.label == label)])).empty:
            raise RunFileError(f"There are no runs of {task}, {label}. Add them, or change the template.")
        return found

    def figure(name: str, task: str) -> str:
        path = folder / f"{name}-{task}.png"
        figures[path] = draw(name, of(task))
        return f"![{tables.heading(task)}, {name}]({path.as_posix()})"

    names = {
        "runs": runs,
        "result": lambda task, label, *metric: tables.result(find(task, label), *metric),
        "versus": lambda task, *labels: tables.verdict(*(find(task, each) for each in labels)),
        "verdicts": partial(tables.verdicts, runs),
        "comparison": partial(tables.comparison, runs),
        "differences": partial(tables.differences, runs),
        "variants": lambda task, *arguments: tables.variants(of(task), *arguments),
        "paper": partial(tables.paper_table, runs),
        "costs": partial(tables.benches, bench),
        "tasks_with": lambda figure: [task for task in runs.task.unique() if len(frames.shown_in(figure, of(task)))],
        "race": lambda task: tables.race_table(of(task)),
        "lr": lambda task: tables.lr_table(of(task)),
        "figure": figure,
    }
    try:
        text = _environment(template.parent, finalize=_as_markdown).get_template(template.name).render(names)
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
        if rows.get(watched.name, pd.Series()).notna().any():
            yield plots.curves(rows, watched.name, watched.title, metric=watched)
        yield plots.curves(rows, "train_loss", "training loss")


def _provenance(runs: pd.DataFrame) -> pd.DataFrame:
    each = runs[["label", "seed", "provenance"]].explode("provenance", ignore_index=True)
    origins = pd.DataFrame([*each.pop("provenance")])
    origins["versions"] = [" ".join(f"{name} {version}" for name, version in of.items()) for of in origins.versions]
    origins["hardware"] = [frames.hardware(origin) for _, origin in origins.iterrows()]
    return each.join(origins[["command", "commit", "date", "hardware", "versions"]]).astype(str)


def _as_markdown(value: Any) -> Any:
    """Return tables as Markdown, and other values as they are."""
    if not isinstance(value, pd.DataFrame):
        return value
    align = ["left" if column in ("task", "setting", "table", "metric") else "right" for column in value]
    return tabulate(value.to_dict("list"), headers="keys", tablefmt="pipe", disable_numparse=True, colalign=align)


def _environment(folder: Path, **options: Any) -> jinja2.Environment:
    options |= {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    return jinja2.Environment(loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined, **options)
