"""``adahessian report``: what finished runs came to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import tyro
from rich.console import Console

from adahessian.lab.files import written_whole
from adahessian.lab.plots import DPI
from adahessian.lab.report.curves import task_pictures
from adahessian.lab.report.document import Details, Document, Paragraph, Part, Section, Table
from adahessian.lab.report.groups import Group, group_runs, known
from adahessian.lab.report.markdown import markdown
from adahessian.lab.report.origins import origins
from adahessian.lab.report.page import page
from adahessian.lab.report.phrases import ECONOMICAL_IN_WORDS, phrases
from adahessian.lab.report.tables import differ_in_conditions, task_table
from adahessian.lab.report.terminal import terminal_table
from adahessian.lab.report.wording import section_anchor, section_title, under
from adahessian.lab.runs import NotARunError, find_notes, find_results, find_unfinished
from adahessian.lab.settings import is_economical

_INTRODUCTION = (
    "Means over seeds ± the standard deviation of a sample. Runs that diverged are in no mean. The training loss is "
    "the mean over the last epoch. The time of a step, which stands with runs that had their device to themselves, is "
    "the median over the epochs but the first, which compiles, and is set against runs on the same hardware in the "
    "same precision. Peak memory is the most that any seed took. The numbers of the paper are those of Yao et al., "
    "“ADAHESSIAN: An Adaptive Second Order Optimizer for Machine Learning”. Commands are those of the commits beside "
    "them: options may have changed since."
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Tables and curves of finished runs: a Markdown file, pictures, and one page for a browser."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),)
    """Files of runs, or folders with some.
    What the lines of a file TASK/notes.txt in a folder say of its runs is in the report too."""

    output: Path = Path("report")
    """Folder for report.md, its pictures and index.html."""

    results_page: Path | None = None
    """Write the Markdown to this file too, with the paths of its pictures as they are from there."""

    def run(self) -> None:
        """Read the runs, print the tables, write the files."""
        console = Console()
        tell = partial(console.print, highlight=False, soft_wrap=True)
        try:
            runs, strangers = known(find_results(self.runs, tell))
        except NotARunError as error:
            raise SystemExit(f"adahessian report: {error}. Name files of runs, or folders with some") from error
        for stranger in strangers:
            tell(stranger)
        if unfinished := find_unfinished(self.runs):
            names = ", ".join(str(folder) for folder in unfinished)
            tell(f"not finished, and not in the report: {names}")
        if not runs:
            named = " ".join(map(str, self.runs)) or "nothing"
            raise SystemExit(f"adahessian report: no finished run in {named}; adahessian train makes some")
        document = make_document(group_runs(runs), find_notes(self.runs))
        for section in document.sections:
            console.rule(section.title, align="left")
            for part in section.parts:
                if isinstance(part, Table):
                    console.print(terminal_table(part, console.width))
                elif isinstance(part, Paragraph) and part is section.parts[0]:
                    tell(part.text)  # what the rows have in common, and so do not say
        try:
            self._write(document)
        except OSError as error:
            raise SystemExit(f"adahessian report: {error}. Choose another --output or --results-page") from error
        written = [self.output / "report.md", self.output / "index.html", self.results_page]
        console.print(*filter(None, written), sep="\n", highlight=False, soft_wrap=True)

    def _write(self, document: Document) -> None:
        for picture in document.pictures:
            with written_whole(self.output / picture.file) as file:
                picture.draw("light").savefig(file, dpi=DPI)
        _write_text(self.output / "report.md", markdown(document))
        _write_text(self.output / "index.html", page(document))
        if self.results_page is not None:
            there = os.path.relpath(self.output, self.results_page.parent)
            _write_text(self.results_page, markdown(document, f"{Path(there).as_posix()}/"))


def make_document(groups: Sequence[Group], notes: Mapping[str, Sequence[str]] | None = None) -> Document:
    """The report of runs: a section for each task, and one more for each number of epochs that is not its own.

    Args:
        groups: The runs.
        notes: By task, what its runs do not say of themselves.
    """
    sections: list[Section] = []
    for _, members in groupby(groups, key=lambda group: group.experiment.name):
        of_task = list(members)
        about_runs = (notes or {}).get(of_task[0].experiment.name, ())
        budgets = [list(of_budget) for _, of_budget in groupby(of_task, key=lambda group: group.budget)]
        first, *others = budgets
        sections.append(_section(first, of_task, of_task[0].experiment.notes, about_runs))
        sections += [_section(of_budget, of_task) for of_budget in others]
    return Document(title="Runs of adahessian", introduction=_INTRODUCTION, sections=sections)


def _section(
    groups: list[Group], of_task: list[Group], about_task: Sequence[str] = (), about_runs: Sequence[str] = ()
) -> Section:
    parts: list[Part] = []
    of_all = [] if differ_in_conditions(groups) else [f"All {under(groups[0].conditions)}."]
    said = {*groups[0].distinctive, "epochs"}
    common = {name: value for name, value in groups[0].changed.items() if name not in said}
    if common:
        in_words = ", ".join(phrases(common, groups[0].experiment.economies))
        of_all.append(f"In all of them, and not the task's own: {in_words}.")
    if of_all:
        parts.append(Paragraph(" ".join(of_all)))
    parts.append(task_table(groups, of_task))
    if any(is_economical(group.changed) for group in groups):
        parts.append(Paragraph(ECONOMICAL_IN_WORDS))
    parts += map(Paragraph, about_runs)
    if any(len(run.epochs) == 1 and not run.shared for group in groups for run in group.finished):
        parts.append(Paragraph("Where a run has one epoch only, the time of its steps includes that of compiling."))
    parts += task_pictures(groups)
    if about_task:
        parts.append(Details(heading="What to know of the task", lines=about_task))
    parts.append(Details(heading="Where the numbers come from", lines=origins(groups)))
    return Section(title=section_title(groups[0]), anchor=section_anchor(groups[0]), parts=parts)


def _write_text(path: Path, text: str) -> None:
    with written_whole(path) as file:
        file.write(text.encode())
