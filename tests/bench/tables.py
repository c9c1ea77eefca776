"""Tables with many columns that still fit a terminal of 80."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from tools.terminal.console import console


def print_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows without lines, one blank between columns, whose names are those of the first row's values."""
    columns = [name.replace("_", " ") for name in rows[0]]
    table = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    console.print(table)
    console.print()


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
