"""A device's memory as a picture: each expert a block as wide as its bytes, in the order of loading, over several rows.

Numbers only; the template draws them. Two widths are made, for text in a picture does not wrap.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daemon.units import size_text

WIDE, NARROW = 1120, 336
#: By width: height of a row, gap, rows at the most, and what a typical block should be wide, so that it has a name.
_ROWS = {WIDE: (34, 5, 14, 92), NARROW: (26, 4, 30, 60)}
_SEEN = 1e-6
#: A block that is narrower tells its name only when pointed at.
_LEAST_TEXT = 30
_PER_LETTER = 7.0


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one block in one row; `text` where it fits. `kind` is its class, `title` all there is to say."""

    x: float
    y: int
    width: float
    height: int
    kind: str
    text: str
    title: str
    expert: str | None = None


@dataclass(frozen=True, slots=True)
class Drawing:
    width: int
    height: int
    pieces: tuple[Piece, ...]


def draw(pool: Mapping[str, Any], width: int) -> Drawing:
    """`pool` as control's `memory` has it; `width` is WIDE or NARROW."""
    spans = _spans(pool)
    whole = max(1, sum(size for _, size, *_ in spans))
    experts: Sequence[Mapping[str, Any]] = pool["experts"]
    typical = sum(one["bytes"] for one in experts) / len(experts) if experts else whole
    height, gap, most_rows, wished = _ROWS[width]
    rows = min(most_rows, max(1, math.ceil(wished * whole / max(1.0, typical) / width)))
    per_row = whole / rows
    pieces: list[Piece] = []
    at = 0.0
    for kind, size, name, title, expert in spans:
        parts = _cut(at, at + size, per_row, rows)
        widest = max(range(len(parts)), key=lambda number: parts[number][2] - parts[number][1], default=0)
        for number, (row, left, right) in enumerate(parts):
            across = (right - left) / per_row * width
            pieces.append(
                Piece(
                    x=round(left / per_row * width, 2),
                    y=row * (height + gap),
                    width=round(max(0.5, across - 1.5), 2),
                    height=height,
                    kind=kind,
                    text=_fit(name, across) if number == widest else "",
                    title=title,
                    expert=expert,
                )
            )
        at += size
    return Drawing(width, rows * (height + gap) - gap, tuple(pieces))


def state_of(expert: Mapping[str, Any]) -> str:
    """In words, for the table and for who cannot see colours."""
    words = ["loading" if expert["is_loading"] else "in use" if expert["is_in_use"] else "resident"]
    return ", ".join([*words, "pinned"] if expert["is_pinned"] else words)


def _spans(pool: Mapping[str, Any]) -> list[tuple[str, int, str, str, str | None]]:
    """(class, bytes, name, title, expert) in order: experts, what a load that hangs holds, what is free."""
    spans: list[tuple[str, int, str, str, str | None]] = []
    for one in pool["experts"]:
        kind = "loading" if one["is_loading"] else "in-use" if one["is_in_use"] else "resident"
        kind += " pinned" if one["is_pinned"] else ""
        sign = "↓ " if one["is_loading"] else "▶ " if one["is_in_use"] else ""
        name = f"{sign}{'◆ ' if one['is_pinned'] else ''}{one['expert']}"
        title = f"{one['expert']}: {size_text(one['bytes'])}, {state_of(one)}"
        spans.append((kind, one["bytes"], name, title, one["expert"]))
    held = pool["used_bytes"] - sum(one["bytes"] for one in pool["experts"])
    if held > 0:
        spans.append(("held", held, "held", f"{size_text(held)} held by a load that hangs", None))
    free = pool["budget_bytes"] - pool["used_bytes"]
    if free > 0:
        spans.append(("free", free, f"free {size_text(free)}", f"{size_text(free)} free", None))
    return spans


def _cut(begin: float, end: float, per_row: float, rows: int) -> list[tuple[int, float, float]]:
    """(row, left, right) of each part, in bytes from the row's beginning; what is too small to see has one."""
    parts: list[tuple[int, float, float]] = []
    for row in range(min(int(begin // per_row), rows - 1), rows):
        left, right = max(begin, row * per_row), min(end, (row + 1) * per_row)
        if right - left > _SEEN * per_row:
            parts.append((row, left - row * per_row, right - row * per_row))
        if (row + 1) * per_row >= end:
            break
    return parts or [(min(int(begin // per_row), rows - 1), begin % per_row, begin % per_row)]


def _fit(name: str, across: float) -> str:
    if across < _LEAST_TEXT:
        return ""
    letters = int((across - 10) / _PER_LETTER)
    return name if len(name) <= letters else name[: max(1, letters - 1)] + "…"
