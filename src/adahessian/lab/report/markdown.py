"""A report as Markdown, with pictures beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from adahessian.lab.report.document import Details, Document, Paragraph, Part, Picture, Section, Table


def markdown(document: Document, pictures: str = "") -> str:
    """The text of a report.

    Args:
        document: The report.
        pictures: The folder of its pictures, as seen from the text, with a slash behind it.
    """
    blocks = [f"# {document.title}", document.introduction]
    for section in document.sections:
        blocks += _section(section, pictures)
    return "\n\n".join(blocks) + "\n"


def _section(section: Section, pictures: str) -> Iterator[str]:
    yield f"## {section.title}"
    for is_picture, parts in groupby(section.parts, key=lambda part: isinstance(part, Picture)):
        if is_picture:
            yield "\n".join(_picture(part, pictures) for part in parts if isinstance(part, Picture))
        else:
            yield from (_text(part) for part in parts)


def _picture(picture: Picture, pictures: str) -> str:
    # Markdown's own pictures are all as wide as the page.
    width = "100%" if picture.wide else "49%"
    return f'<img src="{pictures}{picture.file}" width="{width}" alt="{picture.caption}">'


def _text(part: Part) -> str:
    if isinstance(part, Paragraph):
        return part.text
    if isinstance(part, Table):
        return table_text(part)
    if isinstance(part, Details):
        return "\n".join([f"**{part.heading}**", "", *(f"- {_escaped(line)}" for line in part.lines)])
    raise TypeError(f"no text for {part}")


def table_text(table: Table) -> str:
    """A table: the first column at the left, numbers at the right."""
    rules = ["---", *["---:"] * (len(table.headings) - 1)]
    return "\n".join(_row(cells) for cells in (table.headings, rules, *table.rows))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
