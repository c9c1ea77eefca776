"""Tables in which nothing is cut off, however narrow the terminal: what is named here is typed in again."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from tools.cli.console import console

#: Columns that stay on one line.
_WHOLE = ("version", "before", "image")


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print it; None as a dash."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name in _WHOLE)
    for row in rows:
        table.add_row(*("–" if cell is None else str(cell) for cell in row))
    console.print(table)
