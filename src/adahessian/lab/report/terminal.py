"""Tables of a report on a terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table as RichTable

from adahessian.lab.report.document import Table


def terminal_table(table: Table) -> RichTable:
    """A table for rich: the first column at the left, numbers at the right."""
    shown = RichTable(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False)
    for number, heading in enumerate(table.headings):
        # Names may be long and can be broken; a number without its end would mislead.
        shown.add_column(heading, justify="right" if number else "left", no_wrap=number > 0, min_width=10)
    for row in table.rows:
        shown.add_row(*row)
    return shown
