"""A report as one page for a browser, which needs nothing but itself."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from html import escape
from itertools import groupby

import matplotlib

from adahessian.lab.report.document import Details, Document, Paragraph, Part, Picture, Section, Table
from adahessian.lab.report.themes import DARK_INK, DARK_PAPER, Theme

_CSS = f"""
:root {{ color-scheme: light dark; --paper: #fff; --ink: #1c1f23; --faint: #666; --line: #ddd; --link: #0072b2; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --paper: {DARK_PAPER}; --ink: {DARK_INK}; --faint: #a0a4aa; --line: #3a3f46; --link: #6cb8e6; }}
}}
* {{ box-sizing: border-box; }}
body {{
  margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif;
}}
h1 {{ line-height: 1.2; }}
h2 {{ margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1.5rem; line-height: 1.25; }}
a {{ color: var(--link); }}
nav ul {{ list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 0.2rem 1.5rem; }}
.wide {{ overflow-x: auto; margin-bottom: 1.5rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.95rem; }}
th, td {{ padding: 0.35rem 0.8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }}
th {{ border-bottom-width: 2px; vertical-align: bottom; white-space: normal; }}
th:first-child, td:first-child {{ text-align: left; white-space: normal; min-width: 9rem; padding-left: 0; }}
.pictures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 1rem; }}
figure {{ margin: 1rem 0; }}
img {{ display: block; width: 100%; max-width: 42rem; height: auto; }}
figure.all {{ grid-column: 1 / -1; }}
figure.all img {{ max-width: 100%; }}
details {{ margin: 1rem 0; color: var(--faint); font-size: 0.9rem; }}
summary {{ cursor: pointer; }}
li {{ overflow-wrap: anywhere; }}
"""


def page(document: Document) -> str:
    """The HTML of a report. Plots are inside, for light pages and for dark ones; there is no script."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(document.title)}</title>",
            f"<style>{_CSS}</style>",
            "</head>",
            "<body>",
            f"<h1>{escape(document.title)}</h1>",
            f"<p>{escape(document.introduction)}</p>",
            "<nav><ul>",
            *(f'<li><a href="#{escape(part.anchor)}">{escape(part.title)}</a></li>' for part in document.sections),
            "</ul></nav>",
            *(line for section in document.sections for line in _section(section)),
            "</body>",
            "</html>",
            "",
        ]
    )


def _section(section: Section) -> Iterator[str]:
    yield f'<section id="{escape(section.anchor)}">'
    yield f"<h2>{escape(section.title)}</h2>"
    for is_picture, parts in groupby(section.parts, key=lambda part: isinstance(part, Picture)):
        if is_picture:
            yield '<div class="pictures">'
        yield from (_html(part) for part in parts)
        if is_picture:
            yield "</div>"
    yield "</section>"


def _html(part: Part) -> str:
    if isinstance(part, Paragraph):
        return f"<p>{escape(part.text)}</p>"
    if isinstance(part, Table):
        return _table(part)
    if isinstance(part, Picture):
        return _figure(part)
    if isinstance(part, Details):
        lines = "".join(f"<li>{escape(line)}</li>" for line in part.lines)
        return f"<details><summary>{escape(part.heading)}</summary><ul>{lines}</ul></details>"
    raise TypeError(f"no HTML for {part}")


def _table(table: Table) -> str:
    # A unit stays with its name's last word where a heading is broken.
    headings = "".join(
        f'<th scope="col">{escape(heading).replace(", %", ",&nbsp;%")}</th>' for heading in table.headings
    )
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return f'<div class="wide"><table><thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table></div>'


def _figure(picture: Picture) -> str:
    kind = ' class="all"' if picture.wide else ""
    return (
        f"<figure{kind}><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{_embedded(picture, "dark")}">'
        f'<img src="{_embedded(picture, "light")}" alt="{escape(picture.caption)}">'
        "</picture></figure>"
    )


def _embedded(picture: Picture, theme: Theme) -> str:
    file = io.StringIO()
    # Neither the date nor random names: the same runs make the same page.
    with matplotlib.rc_context({"svg.hashsalt": picture.file}):
        picture.draw(theme).savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue().encode()).decode()}"
