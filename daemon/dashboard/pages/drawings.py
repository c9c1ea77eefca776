"""Drawings in numbers, which templates turn into SVG, in two widths: text in a drawing does not wrap."""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from daemon.units import counted, size_text

WIDE, NARROW = 1120, 336

# Bars

_BAR_HEIGHT, _ABOVE, _BELOW = 150, 20, 20
_LETTER, _MAX_BAR, _BAR_SHARE = 8.0, 64.0, 0.72


@dataclass(frozen=True, slots=True)
class BarValue:
    """One bar: `value` None is a gap, `text` stands above it, `mark` is a value to compare with."""

    name: str
    value: float | None
    text: str
    title: str
    tone: str
    mark: float | None = None


@dataclass(frozen=True, slots=True)
class Bar:
    x: float
    y: float
    width: float
    height: float
    middle: float
    name: str
    text: str
    title: str
    tone: str
    mark_y: float | None


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars from the line `base_y` up; a goal's line lies at `goal_y`."""

    width: int
    height: int
    base_y: int
    bars: tuple[Bar, ...]
    goal_y: float | None


#: A drawing in each width, by its CSS class.
Pictures = Sequence[tuple[str, BarChart]]


def bar_charts(values: Sequence[BarValue], *, wide: int = WIDE, most: float, goal: float | None = None) -> Pictures:
    """Draw bars on a scale from 0 to `most`; texts that would not fit are left out."""
    return [(look, _bar_chart(values, width, most, goal)) for look, width in (("wide", wide), ("narrow", NARROW))]


def _bar_chart(values: Sequence[BarValue], width: int, most: float, goal: float | None) -> BarChart:
    base_y, slot = _ABOVE + _BAR_HEIGHT, width / max(1, len(values))
    bar_width = min(_MAX_BAR, slot * _BAR_SHARE)
    longest = max((len(value.name) for value in values), default=1)
    every = math.ceil((longest + 1) * _LETTER / slot)
    bars: list[Bar] = []

    def height_of(value: float) -> float:
        return _BAR_HEIGHT * min(1.0, value / (most or 1.0))

    for number, value in enumerate(values):
        middle, height = (number + 0.5) * slot, height_of(value.value or 0.0)
        bars.append(
            Bar(
                x=round(middle - bar_width / 2, 1),
                y=round(base_y - height, 1),
                width=round(bar_width, 1),
                height=round(height, 1),
                middle=round(middle, 1),
                name=value.name if (len(values) - 1 - number) % every == 0 else "",
                text=value.text if len(value.text) * _LETTER <= slot else "",
                title=value.title,
                tone=value.tone,
                mark_y=None if value.mark is None else round(base_y - height_of(value.mark), 1),
            )
        )
    goal_y = None if goal is None else round(base_y - height_of(goal), 1)
    return BarChart(width, base_y + _BELOW, base_y, tuple(bars), goal_y)


# Lines


@dataclass(frozen=True, slots=True)
class Series:
    """Values over the last seconds, each with its age `ago` in s; `newest` is the last one as text."""

    name: str
    tone: str
    newest: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class LineChart:
    """`lines` are (series, points of an SVG polyline); `top` is the highest value as text, at the y `top_y`."""

    width: int
    base_y: int
    top_y: int
    top: str
    lines: tuple[tuple[Series, str], ...]
    ticks: tuple[tuple[float, str], ...]


def line_charts(series: Sequence[Series], seconds: float, most: float, top: str) -> Sequence[tuple[str, LineChart]]:
    """Draw the last `seconds` on a scale from 0 to `most`, which is labelled `top`."""
    return [
        (look, _line_chart(series, seconds, most, top, width))
        for look, width in (("wide", WIDE // 2), ("narrow", NARROW))
    ]


def _line_chart(series: Sequence[Series], seconds: float, most: float, top: str, width: int) -> LineChart:
    base_y = _ABOVE + _BAR_HEIGHT
    lines = [
        " ".join(
            f"{width * (1 - ago / seconds):.1f},{base_y - _BAR_HEIGHT * value / most:.1f}" for ago, value in one.points
        )
        for one in series
    ]
    return LineChart(width, base_y, _ABOVE, top, tuple(zip(series, lines, strict=True)), _ticks(width, seconds))


def _ticks(width: int, seconds: float) -> tuple[tuple[float, str], ...]:
    """Return x and label ("−2 min") of each mark of the time axis."""
    at = [(width * number / _TICKS, seconds * (1 - number / _TICKS)) for number in range(1, _TICKS)]
    return tuple((x, f"−{ago / 60:g} min" if seconds > 300 else f"−{ago:g} s") for x, ago in at)


# Memory

#: A pool with few experts gets fewer rows: most of them would be empty.
_SPARE_ROWS = 3
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
    rows = min(
        max_rows,
        len(experts) + _SPARE_ROWS,
        max(1, math.ceil(typical_width * pool_bytes / max(1.0, typical_bytes) / width)),
    )
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
    """Name an expert's state, for the table and for readers who cannot see colours."""
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
    letters = int((width - margin) / letter_width)
    if width < min_width or letters <= 0:
        return ""
    return text if len(text) <= letters else text[: max(1, letters - 1)] + "…"


# Time

_NAME_HEIGHT, _LANE_HEIGHT, _LANE_GAP = 15, 24, 8
_TONES = 6
#: Bars of one expert that are no farther apart become one; shorter ones one with others beside them, up to a width.
_MAX_GAP, _SHORT, _SHORT_GAP, _MAX_MERGED = 2.0, 14.0, 6.0, 42.0
#: An expert with this share of a merged bar's time gives it its colour.
_DOMINANT = 0.6
_MIN_HEIGHT = 4.0
_TICKS = 5


@dataclass(frozen=True, slots=True)
class WorkBar:
    """Batches or loads that lie close together: as high as their share of time; `kind` is the CSS class."""

    x: float
    width: float
    y: float
    height: float
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
    """Work in pixels from the left; `experts` are the pixels that each worked, the longest first."""

    left: float
    right: float
    experts: Mapping[str, float]
    images: int
    count: int
    bytes: int


def work_chart(timeline: Mapping[str, Any], executors: Sequence[str], width: int) -> WorkChart:
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
    return WorkChart(width, y + 14, _LANE_HEIGHT, tuple(lanes), _ticks(width, seconds))


def _work(row: Mapping[str, Any], seconds: float, scale: float) -> _Work:
    left, right = (max(0.0, seconds - row[end]) * scale for end in ("began_s", "ended_s"))
    right = max(left, right)
    return _Work(left, right, {row["expert"]: right - left}, row.get("images", 0), 1, row.get("bytes", 0))


def _merged(works: Iterable[_Work]) -> list[_Work]:
    merged: list[_Work] = []
    for work in sorted(works, key=lambda work: work.left):
        last = merged[-1] if merged else None
        if last is not None and _are_one(last, work):
            experts = {name: last.experts.get(name, 0.0) + work.experts.get(name, 0.0)
                       for name in {**last.experts, **work.experts}}  # fmt: skip
            merged[-1] = replace(
                last,
                right=max(last.right, work.right),
                experts=dict(sorted(experts.items(), key=lambda item: -item[1])),
                images=last.images + work.images,
                count=last.count + work.count,
                bytes=last.bytes + work.bytes,
            )
        else:
            merged.append(work)
    return merged


def _are_one(last: _Work, work: _Work) -> bool:
    gap = work.left - last.right
    if last.experts.keys() == work.experts.keys() and gap <= _MAX_GAP:
        return True
    is_short = min(last.right - last.left, work.right - work.left) < _SHORT
    return is_short and gap <= _SHORT_GAP and work.right - last.left <= _MAX_MERGED


def _bar(work: _Work, kind: str, y: int, scale: float) -> WorkBar:
    width, worked = max(1.0, work.right - work.left), sum(work.experts.values())
    expert, others = next(iter(work.experts)), len(work.experts) - 1
    name = f"{expert} and {others} more" if others else expert
    took = f"{1000 * worked / scale:,.0f} ms"
    if kind == "batch":
        batches = counted(work.count, "batch", "batches")
        title = f"{name}: {counted(work.images, 'image')} in {batches}, {took}"
        text = f"{expert} +{others}" if others else f"{expert} ×{work.images}"
    else:
        title = f"{name}: {counted(work.count, 'load')}, {size_text(work.bytes)}, {took}"
        text = name
    # An expert keeps its colour, whichever others are shown.
    is_mixed = work.experts[expert] < _DOMINANT * worked
    look = "mixed" if is_mixed else f"tone-{zlib.crc32(expert.encode()) % _TONES}"
    height = max(_MIN_HEIGHT, _LANE_HEIGHT * min(1.0, worked / width)) if work.count > 1 else float(_LANE_HEIGHT)
    shown = _fitted(text, width, 24, 6, 6.4)
    x, top = round(work.left, 2), round(y + _LANE_HEIGHT - height, 1)
    return WorkBar(x, round(width, 2), top, round(height, 1), f"{look} {kind}", shown, title)
