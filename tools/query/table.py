"""A table that fits the terminal: the columns that matter most, as many as there is room for."""

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from tools.cli.console import console
from tools.query.batches import Batch

#: A cell of more is folded before a column is left out.
_WIDEST = 24
#: What rich puts around each column.
_BORDER = 3


def print_rows(
    title: str, names: Sequence[str], batch: Batch, *, all_columns: bool, more: str = "--columns, --csv"
) -> None:
    """Print rows; without `all_columns` those at the end of `names` are left out, and named, where they do not fit."""
    cells = [[_text(value) for value in row] for row in batch]
    shown = len(names) if all_columns else _how_many_fit(names, cells)
    table = Table(*names[:shown], title=Text(title), title_justify="left")
    for column in table.columns:
        column.overflow = "fold"
    for row in cells:
        table.add_row(*(Text(value) for value in row[:shown]))
    console.print(table, soft_wrap=False)
    if shown < len(names):
        console.print(f"Not shown: {', '.join(names[shown:])} ({more})", markup=False)


def _how_many_fit(names: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    width = 1
    for at, name in enumerate(names):
        longest = max((cell_len(row[at]) for row in cells), default=0)
        width += max(len(name), min(longest, _WIDEST)) + _BORDER
        if width > console.width:
            return max(1, at)
    return len(names)


def _text(value: Any) -> str:
    """A cell: None is a dash, a fraction has four digits, and no sign of a serial steers the terminal."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1 else f"{value:.1f}"
    return "".join(sign if sign.isprintable() else "�" for sign in str(value))
