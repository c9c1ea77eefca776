"""Tables with many columns that still fit a terminal of 80."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from tools.terminal.console import console


def print_narrow(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print without lines, one blank between columns; None prints as a dash."""
    table = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*("–" if value is None else str(value) for value in row))
    console.print(table)
    console.print()


def rounded(value: float | None, digits: int) -> str | None:
    """Return the value with so many digits behind the point; None stays None."""
    return None if value is None else f"{value:.{digits}f}"
