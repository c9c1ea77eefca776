"""Drawings in numbers, which templates turn into SVG: the memory of a pool, and the last minutes of the executors.

Text in a drawing does not wrap, so each is made in two widths. What is too small to see is merged or has no text.
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from daemon.units import size_text

WIDE, NARROW = 1120, 336

# Memory

#: By width: height of a row, gap, maximum number of rows, and the width that a typical block gets for its name.
_ROWS = {WIDE: (34, 5, 14, 92), NARROW: (26, 4, 30, 60)}
_MIN_VISIBLE = 1e-6
_BLOCK_GAP = 1.5
_SIGNS = {"loading": "↓ ", "in use": "▶ "}


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """The part of an expert (None for other bytes) that lies in one row; `kind` is its CSS class."""

    x: float
    y: int
    width: float
    height: int
    kind: str
    text: str
    title: str
    expert: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryMap:
    width: int
    height: int
    blocks: tuple[MemoryBlock, ...]


def memory_map(pool: Mapping[str, Any], width: int) -> MemoryMap:
    """Draw a pool of control's `memory`: experts as wide as their bytes, in the order of loading, over several rows."""
    contents = _contents(pool)
    pool_bytes = max(1, sum(size for _, size, *_ in contents))
    experts: Sequence[Mapping[str, Any]] = pool["experts"]
    typical_bytes = sum(expert["bytes"] for expert in experts) / len(experts) if experts else pool_bytes
    height, gap, max_rows, typical_width = _ROWS[width]
    rows = min(max_rows, max(1, math.ceil(typical_width * pool_bytes / max(1.0, typical_bytes) / width)))
    row_bytes = pool_bytes / rows
    blocks: list[MemoryBlock] = []
    begin = 0.0
    for kind, size, name, title, expert in contents:
        parts = _cut(begin, begin + size, row_bytes, rows)
        widest = max(range(len(parts)), key=lambda number: parts[number][2] - parts[number][1])
        for number, (row, left, right) in enumerate(parts):
            block_width = (right - left) / row_bytes * width
            blocks.append(
                MemoryBlock(
                    x=round(left / row_bytes * width, 2),
                    y=row * (height + gap),
                    width=round(max(0.5, block_width - _BLOCK_GAP), 2),
                    height=height,
                    kind=kind,
                    text=_fitted(name, block_width, 30, 10, 7.0) if number == widest else "",
                    title=title,
                    expert=expert,
                )
            )
        begin += size
    return MemoryMap(width, rows * (height + gap) - gap, tuple(blocks))


def expert_state(expert: Mapping[str, Any]) -> str:
    """Return an expert's state in words, for the table and for readers who cannot see colours."""
    return f"{_state(expert)}, pinned" if expert["is_pinned"] else _state(expert)


def _state(expert: Mapping[str, Any]) -> str:
    return "loading" if expert["is_loading"] else "in use" if expert["is_in_use"] else "resident"


def _contents(pool: Mapping[str, Any]) -> list[tuple[str, int, str, str, str | None]]:
    """Return (class, bytes, name, title, expert) in order: experts, the bytes of a hanging load, free bytes."""
    contents: list[tuple[str, int, str, str, str | None]] = []
    for expert in pool["experts"]:
        state = _state(expert)
        kind, sign = state.replace(" ", "-"), _SIGNS.get(state, "")
        if expert["is_pinned"]:
            kind, sign = f"{kind} pinned", f"{sign}◆ "
        name = f"{sign}{expert['expert']}"
        title = f"{expert['expert']}: {size_text(expert['bytes'])}, {expert_state(expert)}"
        contents.append((kind, expert["bytes"], name, title, expert["expert"]))
    held = pool["used_bytes"] - sum(expert["bytes"] for expert in pool["experts"])
    if held > 0:
        contents.append(("held", held, "held", f"{size_text(held)} held by a load that hangs", None))
    free = pool["budget_bytes"] - pool["used_bytes"]
    if free > 0:
        contents.append(("free", free, f"free {size_text(free)}", f"{size_text(free)} free", None))
    return contents


def _cut(begin: float, end: float, row_bytes: float, rows: int) -> list[tuple[int, float, float]]:
    """Return (row, left, right) of each part, in bytes from the row's beginning; one part if it is too small to see."""
    first_row = min(int(begin // row_bytes), rows - 1)
    parts: list[tuple[int, float, float]] = []
    for row in range(first_row, rows):
        left, right = max(begin, row * row_bytes), min(end, (row + 1) * row_bytes)
        if right - left > _MIN_VISIBLE * row_bytes:
            parts.append((row, left - row * row_bytes, right - row * row_bytes))
        if (row + 1) * row_bytes >= end:
            break
    return parts or [(first_row, begin % row_bytes, begin % row_bytes)]


def _fitted(text: str, width: float, min_width: float, margin: float, letter_width: float) -> str:
    """Return as much of `text` as fits into `width`."""
    letters = int((width - margin) / letter_width)
    if width < min_width or letters <= 0:
        return ""
    return text if len(text) <= letters else text[: max(1, letters - 1)] + "…"


# Time

_NAME_HEIGHT, _LANE_HEIGHT, _LANE_GAP = 15, 20, 7
_TONES = 6
#: Bars of one expert that are no farther apart become one; thinner bars become one with others beside them.
_MAX_GAP, _THIN = 2.0, 1.5
_TICKS = 5


@dataclass(frozen=True, slots=True)
class WorkBar:
    """A batch or load, or several that lie close together; `kind` is its CSS class."""

    x: float
    width: float
    y: int
    kind: str
    text: str
    title: str


@dataclass(frozen=True, slots=True)
class WorkLane:
    name: str
    y: int
    bars: tuple[WorkBar, ...]


@dataclass(frozen=True, slots=True)
class WorkChart:
    width: int
    height: int
    lane_height: int
    lanes: tuple[WorkLane, ...]
    ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class _Work:
    """A time of work in pixels from the left; `expert` is None for several."""

    left: float
    right: float
    expert: str | None
    images: int
    count: int
    bytes: int


def work_chart(timeline: Mapping[str, Any], executors: Sequence[str], width: int) -> WorkChart:
    """Draw control's `timeline`: a lane for each of `executors` and for each pool that experts were loaded into."""
    seconds = float(timeline["seconds"])
    scale = width / seconds
    batches, loads = timeline["batches"], timeline["loads"]
    pools = dict.fromkeys(load["pool"] for load in loads)
    by_lane = [
        *((name, "batch", [row for row in batches if row["executor"] == name]) for name in executors),
        *((f"loads into {pool}", "load", [row for row in loads if row["pool"] == pool]) for pool in pools),
    ]
    lanes: list[WorkLane] = []
    y = 0
    for name, kind, rows in by_lane:
        merged = _merged(_work(row, seconds, scale) for row in rows)
        lanes.append(WorkLane(name, y, tuple(_bar(work, kind, y + _NAME_HEIGHT, scale) for work in merged)))
        y += _NAME_HEIGHT + _LANE_HEIGHT + _LANE_GAP
    ticks = [(width * number / _TICKS, seconds * (1 - number / _TICKS)) for number in range(1, _TICKS)]
    return WorkChart(width, y + 14, _LANE_HEIGHT, tuple(lanes), tuple((x, f"−{ago:g} s") for x, ago in ticks))


def _work(row: Mapping[str, Any], seconds: float, scale: float) -> _Work:
    left, right = (max(0.0, seconds - row[end]) * scale for end in ("began_s", "ended_s"))
    return _Work(left, max(left, right), row["expert"], row.get("images", 0), 1, row.get("bytes", 0))


def _merged(works: Iterable[_Work]) -> list[_Work]:
    merged: list[_Work] = []
    for work in sorted(works, key=lambda work: work.left):
        last = merged[-1] if merged else None
        if last is not None and _are_one(last, work):
            merged[-1] = replace(
                last,
                right=max(last.right, work.right),
                expert=last.expert if last.expert == work.expert else None,
                images=last.images + work.images,
                count=last.count + work.count,
                bytes=last.bytes + work.bytes,
            )
        else:
            merged.append(work)
    return merged


def _are_one(last: _Work, work: _Work) -> bool:
    gap = work.left - last.right
    is_thin = last.right - last.left < _THIN or work.right - work.left < _THIN
    return gap <= _MAX_GAP and (last.expert == work.expert or (is_thin and gap <= _THIN))


def _bar(work: _Work, kind: str, y: int, scale: float) -> WorkBar:
    width = max(1.0, work.right - work.left)
    name = work.expert or "several experts"
    took = f"{1000 * (work.right - work.left) / scale:,.0f} ms"
    if kind == "batch":
        batches = f"{work.count} batches" if work.count > 1 else "one batch"
        title = f"{name}: {work.images} images in {batches}, {took}"
        text = f"{name} ×{work.images}"
    else:
        title = f"{name}: {work.count} loads, {size_text(work.bytes)}, {took}"
        text = name
    # An expert keeps its colour, whichever others are shown.
    look = "mixed" if work.expert is None else f"tone-{zlib.crc32(work.expert.encode()) % _TONES}"
    shown = _fitted(text, width, 24, 6, 6.4)
    return WorkBar(round(work.left, 2), round(width, 2), y, f"{look} {kind}", shown, title)
