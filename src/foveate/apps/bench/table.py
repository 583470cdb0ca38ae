"""Tables of results for the terminal."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from rich.table import Column, Table
from rich.text import Text

__all__ = ["TableColumn", "megabytes", "milliseconds", "results_table"]

TableColumn = tuple[str, str, Callable[[Any], str]]
"""Title, key in a row of results, and format of a column."""


def milliseconds(seconds: float) -> str:
    """Seconds as a number of milliseconds."""
    return f"{1e3 * seconds:.4g}"


def megabytes(count: int) -> str:
    """Bytes as a number of megabytes."""
    return f"{count / 1e6:,.0f}"


def results_table(
    rows: Sequence[dict[str, Any]],
    columns: Sequence[TableColumn],
    heading: Callable[[dict[str, Any]], str] = lambda row: "",
) -> Table:
    """A table of results. Columns that are empty in all rows are left out.

    Args:
        rows: The results. One with "failed" shows this reason after its first column.
        columns: Title, key and format of each column.
        heading: Heading of a row; consecutive rows with the same heading form a section.
    """
    shown = [column for column in columns if any(row.get(column[1]) is not None for row in rows)]
    table = Table(*(Column(title, overflow="fold") for title, _, _ in shown))
    for title, section in groupby(rows, heading):
        if title:
            table.add_section()
            table.add_row(Text(title, style="bold"))
        for row in section:
            cells = ["" if row.get(key) is None else show(row[key]) for _, key, show in shown]
            table.add_row(*([cells[0], row["failed"]] if "failed" in row else cells))
    return table
