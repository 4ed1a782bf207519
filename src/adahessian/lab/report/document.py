"""What a report is made of, before it becomes Markdown, a page or text on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from matplotlib.figure import Figure

from adahessian.lab.report.themes import Theme


@dataclass(frozen=True)
class Paragraph:
    """Some sentences."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of words and numbers. The first column names its row; an empty cell was not measured."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def without_empty_columns(self) -> Table:
        """The same without columns that no row has anything in."""
        kept = [column for column in range(len(self.headings)) if any(row[column] for row in self.rows)]
        return Table(
            headings=[self.headings[column] for column in kept],
            rows=[[row[column] for column in kept] for row in self.rows],
        )


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A plot."""

    file: str
    """Name of its PNG file."""

    caption: str
    """What it shows, for those who do not see it."""

    draw: Callable[[Theme], Figure]
    """Draws it for a light or a dark page."""

    wide: bool = False
    """Whether it needs all the width of a page; two others stand side by side."""


@dataclass(frozen=True, kw_only=True)
class Details:
    """What few will read: a heading, and lines below it."""

    heading: str
    lines: Sequence[str]


Part: TypeAlias = Paragraph | Table | Picture | Details


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with what is below it."""

    title: str
    anchor: str
    """Its name in links."""

    parts: Sequence[Part]


@dataclass(frozen=True, kw_only=True)
class Document:
    """A whole report."""

    title: str
    introduction: str
    sections: Sequence[Section]

    @property
    def pictures(self) -> list[Picture]:
        """All of its plots."""
        return [part for section in self.sections for part in section.parts if isinstance(part, Picture)]
