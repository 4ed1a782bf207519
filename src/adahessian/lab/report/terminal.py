"""Tables of a report on a terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table as RichTable

from adahessian.lab.report.document import Table

# Names may be broken over lines, but not into less than this.
_NARROWEST_NAME = 16


def terminal_table(table: Table, width: int) -> RichTable:
    """A table for rich: the first column at the left, numbers at the right, as many as there is room for.

    The others are named below it.

    Args:
        table: The table.
        width: Characters in a line.
    """
    columns = list(zip(table.headings, *table.rows, strict=True))
    room = width - min(max(map(len, columns[0])), _NARROWEST_NAME)
    shown = RichTable(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False)
    shown.add_column(table.headings[0], min_width=min(max(map(len, columns[0])), _NARROWEST_NAME))
    fitting = 1
    for column in columns[1:]:
        # A number without its end would mislead: what does not fit is left to the page.
        room -= max(map(len, column)) + 2
        if room < 0:
            break
        shown.add_column(column[0], justify="right", no_wrap=True)
        fitting += 1
    if left := table.headings[fitting:]:
        shown.caption = f"{len(left)} more in report.md: {'; '.join(left)}"
        shown.caption_justify = "left"
    for row in table.rows:
        shown.add_row(*row[:fitting])
    return shown
