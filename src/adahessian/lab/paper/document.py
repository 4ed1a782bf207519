"""The paper, drawn again: its tables and figures with what was measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from adahessian.lab.paper.cells import PaperTable
from adahessian.lab.paper.overhead import overhead_table, where, whole_steps
from adahessian.lab.paper.sweeps import is_the_same_but_cheaper
from adahessian.lab.report.curves import task_pictures
from adahessian.lab.report.document import Details, Document, Paragraph, Part, Section
from adahessian.lab.report.groups import Group
from adahessian.lab.report.origins import origins

FIGURE1, FIGURE2, FIGURE3 = "figure1.png", "figure2.png", "figure3.png"

# Which figure of the paper has a task's curves.
_CURVES = {
    "criteo-dlrm": "Figure 6",
    "cifar10-resnet20": "Figure 7",
    "cifar10-resnet32": "Figure 7",
    "imagenet-resnet18": "Figure 8",
    "iwslt14-de-en": "Figure 9",
    "wmt14-en-de": "Figure 9",
    "ptb-tensorized": "Figure 10",
    "wikitext103-tensorized": "Figure 10",
}

_INTRODUCTION = (
    "Tables and figures of Yao et al., “ADAHESSIAN: An Adaptive Second Order Optimizer for Machine Learning”, with our "
    "own results beside those of the paper. Empty cells are not measured: nothing is estimated. Means over seeds ± the "
    "standard deviation of a sample; runs that diverged are in no mean. A run counts for a cell if its settings are "
    "those of the paper but for what the table varies; of runs under several conditions the most seeds count."
)


def paper_document(
    tables: Sequence[PaperTable],
    groups: Sequence[Group],
    benches: Mapping[Path, dict[str, Any]],
    surface: str | None,
) -> Document:
    """Everything, table by table and then figure by figure.

    Args:
        tables: The tables.
        groups: The runs at hand.
        benches: The benchmark's files.
        surface: What figure 2 shows, if it was drawn.
    """
    return Document(
        title="The paper, measured again",
        introduction=_INTRODUCTION,
        sections=[
            *(_table_section(table, groups) for table in tables),
            *(_bench_section(str(path), bench) for path, bench in benches.items() if whole_steps(bench)),
            *_figure_sections(surface),
            *(_curve_section(list(of_task)) for _, of_task in groupby(_drawn(groups), key=_task)),
            *_origin_sections(groups),
        ],
    )


def _table_section(table: PaperTable, groups: Sequence[Group]) -> Section:
    note = [Paragraph(table.note)] if table.note else []
    return Section(title=table.title, anchor=table.title, parts=[table.filled(groups), *note])


def _bench_section(name: str, bench: dict[str, Any]) -> Section:
    return Section(
        title=f"Cost of a step alone: {name}",
        anchor=name,
        parts=[
            overhead_table(bench),
            Paragraph(
                f"By adahessian bench, on {where(bench)}. Each took turns with SGD, and ratios are "
                "of such turns; the numbers of the paper are from one RTX Titan."
            ),
        ],
    )


def _figure_sections(surface: str | None) -> list[Section]:
    figures = [
        ("Figure 1: 10x² + y² in one step", FIGURE1, "Ways down a quadratic function, and distances to its minimum."),
        ("Figure 2: the loss along two eigenvectors of a block", FIGURE2, surface),
        (
            "Figure 3: Hessian momentum on x² + 0.1 x sin(20πx)",
            FIGURE3,
            "The paper shows one walk each and gives neither start nor learning rate, which decide the outcome: here "
            "are many.",
        ),
    ]
    return [
        Section(title=title, anchor=file, parts=[Paragraph(f"![{title}]({file})"), Paragraph(text)])
        for title, file, text in figures
        if text is not None
    ]


def _task(group: Group) -> str:
    return group.experiment.name


def _drawn(groups: Sequence[Group]) -> list[Group]:
    """Runs with the paper's settings, and economical ones; a sweep's would bury them."""
    return [group for group in groups if is_the_same_but_cheaper(group)]


def _curve_section(groups: list[Group]) -> Section:
    experiment = groups[0].experiment
    parts: list[Part] = list(task_pictures(groups))
    if not parts:
        parts = [Paragraph("These runs have one epoch each: there is no curve.")]
    return Section(
        title=f"{_CURVES.get(experiment.name, 'Not in the paper')}: curves, {experiment.title}",
        anchor=experiment.name,
        parts=parts,
    )


def _origin_sections(groups: Sequence[Group]) -> list[Section]:
    if not groups:
        return []
    parts = [
        Details(heading=of_task[0].experiment.title, lines=origins(of_task))
        for of_task in (list(members) for _, members in groupby(groups, key=_task))
    ]
    return [Section(title="Where our numbers come from", anchor="origins", parts=parts)]
