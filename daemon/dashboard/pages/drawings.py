"""Charts in numbers, which templates turn into SVG: widths in percent, so that one drawing fits every screen."""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daemon.units import counted, size_text

#: Widths in pixels of a drawing on a desktop and on a telephone: text does not wrap, so some is for the desktop only.
WIDE, NARROW = 1120, 336
_LETTER = 8.0


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: `value` None is a gap, `text` stands above it, `mark` is a value to compare with."""

    name: str
    value: float | None
    text: str
    title: str
    tone: str
    mark: float | None = None


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars on a scale from 0 to `most`, and a line at `goal`; `wide` is its width in pixels on a desktop."""

    bars: Sequence[Bar]
    most: float
    goal: float | None = None
    wide: int = WIDE

    def height(self, value: float) -> float:
        return min(1.0, value / (self.most or 1.0))

    def looks(self, number: int) -> tuple[str, str]:
        """Return the CSS classes of a bar's name and text: `roomy` where only a desktop has room, `hidden` if none."""
        bar, after = self.bars[number], len(self.bars) - 1 - number
        longest = max(len(bar.name) for bar in self.bars) + 1
        every = math.ceil(self._pixels(longest) / self.wide)
        every_narrow = every * math.ceil(self._pixels(longest) / NARROW / every)
        is_named = after % every_narrow == 0, after % every == 0
        has_text = self._pixels(len(bar.text)) <= NARROW, self._pixels(len(bar.text)) <= self.wide
        name, text = ("" if narrow else "roomy" if wide else "hidden" for narrow, wide in (is_named, has_text))
        return name, text

    def _pixels(self, letters: int) -> float:
        """Return the width of a chart whose bars each have room for that many letters."""
        return letters * _LETTER * len(self.bars)


@dataclass(frozen=True, slots=True)
class Series:
    """Values over the last seconds, each with its age `ago` in s; `newest` is the last one as text."""

    name: str
    tone: str
    newest: str
    points: Sequence[tuple[float, float]]


# Memory

#: The share of a row that a typical expert takes, wide enough for its name; and the most rows.
_TYPICAL_PART, _MAX_ROWS = 0.11, 18
#: A pool with few experts gets fewer rows: most of them would be empty.
_SPARE_ROWS = 3
_MIN_VISIBLE = 1e-6
_SIGNS = {"loading": "↓ ", "in use": "▶ "}


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """The part of an expert (None for other bytes) in one row, `left` and `width` in percent; `kind` is a CSS class."""

    row: int
    left: float
    width: float
    kind: str
    text: str
    title: str
    expert: str | None


def memory_blocks(pool: Mapping[str, Any]) -> list[MemoryBlock]:
    """Draw a pool of control's `memory`: experts as wide as their bytes, in the order of loading, over several rows."""
    contents = _contents(pool)
    pool_bytes = max(1, sum(size for _, size, *_ in contents))
    experts: Sequence[Mapping[str, Any]] = pool["experts"]
    typical_bytes = sum(expert["bytes"] for expert in experts) / len(experts) if experts else pool_bytes
    fitting = math.ceil(_TYPICAL_PART * pool_bytes / max(1.0, typical_bytes))
    rows = min(_MAX_ROWS, len(experts) + _SPARE_ROWS, max(1, fitting))
    blocks: list[MemoryBlock] = []
    begin = 0.0
    for kind, size, name, title, expert in contents:
        end = begin + size / pool_bytes * rows  # in rows
        first = min(int(begin), rows - 1)
        lengths = {row: min(end, row + 1) - max(begin, row) for row in range(first, min(rows, math.ceil(end)))}
        parts = {row: length for row, length in lengths.items() if length > _MIN_VISIBLE} or {first: 0.0}
        widest = max(parts, key=parts.__getitem__)
        for row, length in parts.items():
            text, left = name if row == widest else "", max(begin, row) - row
            blocks.append(MemoryBlock(row, 100 * left, 100 * length, kind, text, title, expert))
        begin = end
    return blocks


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
        title = f"{expert['expert']}: {size_text(expert['bytes'])}, {expert_state(expert)}"
        contents.append((kind, expert["bytes"], f"{sign}{expert['expert']}", title, expert["expert"]))
    held = pool["used_bytes"] - sum(expert["bytes"] for expert in pool["experts"])
    free = pool["budget_bytes"] - pool["used_bytes"]
    others = (
        ("held", held, "held", f"{size_text(held)} held by a load that hangs", None),
        ("free", free, f"free {size_text(free)}", f"{size_text(free)} free", None),
    )
    return contents + [one for one in others if one[1] > 0]


# Time

_TONES = 6
#: Pixels on a desktop. Bars of one expert merge across the first gap; short bars merge with any neighbour across the
#: second, up to the last width.
_MAX_GAP, _SHORT, _SHORT_GAP, _MAX_MERGED = 2.0, 14.0, 6.0, 42.0
#: An expert with this share of a merged bar's time gives it its colour.
_DOMINANT = 0.6


@dataclass(slots=True)
class _Work:
    """Batches or loads that lie close together, in pixels from the left; `experts` are the pixels that each worked."""

    left: float
    right: float
    experts: dict[str, float]
    images: int
    bytes: int
    count: int = 1

    def belongs_to(self, last: "_Work") -> bool:
        gap = self.left - last.right
        if last.experts.keys() == self.experts.keys() and gap <= _MAX_GAP:
            return True
        is_short = min(last.right - last.left, self.right - self.left) < _SHORT
        return is_short and gap <= _SHORT_GAP and self.right - last.left <= _MAX_MERGED

    def add(self, other: "_Work") -> None:
        self.right = max(self.right, other.right)
        for name, pixels in other.experts.items():
            self.experts[name] = self.experts.get(name, 0.0) + pixels
        self.images, self.bytes, self.count = self.images + other.images, self.bytes + other.bytes, self.count + 1


@dataclass(frozen=True, slots=True)
class WorkBar:
    """Batches or loads as one bar: `left` and `width` in percent, `share` of its time worked; `kind` is CSS classes."""

    left: float
    width: float
    share: float
    kind: str
    text: str
    title: str


def work_lanes(timeline: Mapping[str, Any], executors: Sequence[str]) -> list[tuple[str, list[WorkBar]]]:
    seconds = float(timeline["seconds"])
    loads, scale = timeline["loads"], WIDE / seconds
    lanes = [(name, "batch", [row for row in timeline["batches"] if row["executor"] == name]) for name in executors]
    lanes += [
        (f"loads into {pool}", "load", [row for row in loads if row["pool"] == pool])
        for pool in dict.fromkeys(load["pool"] for load in loads)
    ]
    return [(name, [_bar(work, kind, scale) for work in _merged(rows, seconds, scale)]) for name, kind, rows in lanes]


def _merged(rows: Iterable[Mapping[str, Any]], seconds: float, scale: float) -> list[_Work]:
    merged: list[_Work] = []
    for row in sorted(rows, key=lambda row: -row["began_s"]):
        left, right = (max(0.0, seconds - row[end]) * scale for end in ("began_s", "ended_s"))
        right = max(left, right)
        images, size = row.get("images", 0), row.get("bytes", 0)
        work = _Work(left, right, {row["expert"]: right - left}, images, size)
        if merged and work.belongs_to(merged[-1]):
            merged[-1].add(work)
        else:
            merged.append(work)
    return merged


def _bar(work: _Work, kind: str, scale: float) -> WorkBar:
    width, worked = max(1.0, work.right - work.left), sum(work.experts.values())
    expert, others = max(work.experts, key=work.experts.__getitem__), len(work.experts) - 1
    name = f"{expert} and {others} more" if others else expert
    took = f"{1000 * worked / scale:,.0f} ms"
    if kind == "batch":
        batches = counted(work.count, "batch", "batches")
        title = f"{name}: {counted(work.images, 'image')} in {batches}, {took}"
        text = f"{expert} +{others}" if others else f"{expert} ×{work.images}"
    else:
        title, text = f"{name}: {counted(work.count, 'load')}, {size_text(work.bytes)}, {took}", name
    # An expert keeps its colour, whichever others are shown.
    tone = "mixed" if work.experts[expert] < _DOMINANT * worked else f"tone-{zlib.crc32(expert.encode()) % _TONES}"
    share = min(1.0, worked / width) if work.count > 1 else 1.0
    return WorkBar(100 * work.left / WIDE, 100 * width / WIDE, share, f"{tone} {kind}", text, title)
