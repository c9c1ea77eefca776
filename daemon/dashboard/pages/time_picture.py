"""The last minutes of executors and loads as a picture: a lane for each, a bar for each batch or load.

Numbers only; the template draws them. Bars that lie closer than the eye sees become one.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from daemon.units import size_text

WIDE, NARROW = 1120, 336
_NAME_HEIGHT, _LANE_HEIGHT, _GAP = 15, 20, 7
_TONES = 6
#: Bars of one expert that are no farther apart become one; bars thinner than the second are no longer told apart.
_TOUCH, _THIN = 2.0, 1.5
_LEAST_TEXT, _PER_LETTER = 24, 6.4
_TICKS = 5


@dataclass(frozen=True, slots=True)
class Bar:
    """`kind` is its class; `title` all there is to say."""

    x: float
    width: float
    y: int
    kind: str
    text: str
    title: str


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    y: int
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    width: int
    height: int
    lane_height: int
    lanes: tuple[Lane, ...]
    ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class _Span:
    """Something that lasted, in pixels from the left; `what` is the expert, None for several."""

    left: float
    right: float
    what: str | None
    images: int
    count: int
    bytes: int


def draw(timeline: Mapping[str, Any], executors: Sequence[str], width: int) -> Picture:
    """`timeline` as control answers it; a lane for each of `executors`, and one for each pool that was loaded into."""
    seconds = float(timeline["seconds"])
    scale = width / seconds
    lanes: list[Lane] = []
    y = 0
    pools = dict.fromkeys(load["pool"] for load in timeline["loads"])
    wanted = [(name, "batch", name) for name in executors] + [(f"loads into {pool}", "load", pool) for pool in pools]
    for name, kind, key in wanted:
        rows = timeline["batches"] if kind == "batch" else timeline["loads"]
        of = "executor" if kind == "batch" else "pool"
        spans = _merged(_span(row, seconds, scale) for row in rows if row[of] == key)
        bars = tuple(_bar(span, kind, y + _NAME_HEIGHT, scale) for span in spans)
        lanes.append(Lane(name, y, bars))
        y += _NAME_HEIGHT + _LANE_HEIGHT + _GAP
    ticks = [(width * number / _TICKS, seconds * (1 - number / _TICKS)) for number in range(1, _TICKS)]
    return Picture(width, y + 14, _LANE_HEIGHT, tuple(lanes), tuple((x, f"−{ago:g} s") for x, ago in ticks))


def tone(expert: str) -> int:
    """An expert keeps its colour, whoever else is shown."""
    return zlib.crc32(expert.encode()) % _TONES


def _span(row: Mapping[str, Any], seconds: float, scale: float) -> _Span:
    left, right = (max(0.0, seconds - row[end]) * scale for end in ("began_s", "ended_s"))
    return _Span(left, max(left, right), row["expert"], row.get("images", 0), 1, row.get("bytes", 0))


def _merged(spans: Iterable[_Span]) -> list[_Span]:
    found: list[_Span] = []
    for span in sorted(spans, key=lambda one: one.left):
        last = found[-1] if found else None
        gap = span.left - last.right if last else _TOUCH + 1
        is_thin = last is not None and (last.right - last.left < _THIN or span.right - span.left < _THIN)
        if last is not None and gap <= _TOUCH and (last.what == span.what or (is_thin and gap <= _THIN)):
            found[-1] = replace(
                last,
                right=max(last.right, span.right),
                what=last.what if last.what == span.what else None,
                images=last.images + span.images,
                count=last.count + span.count,
                bytes=last.bytes + span.bytes,
            )
        else:
            found.append(span)
    return found


def _bar(span: _Span, kind: str, y: int, scale: float) -> Bar:
    width = max(1.0, span.right - span.left)
    name = span.what or "several experts"
    took = f"{1000 * (span.right - span.left) / scale:,.0f} ms"
    if kind == "batch":
        some = f"{span.count} batches" if span.count > 1 else "one batch"
        title = f"{name}: {span.images} images in {some}, {took}"
        text = f"{name} ×{span.images}"
    else:
        title = f"{name}: {span.count} loads, {size_text(span.bytes)}, {took}"
        text = name
    look = "mixed" if span.what is None else f"tone-{tone(span.what)}"
    letters = int((width - 6) / _PER_LETTER)
    fits = width >= _LEAST_TEXT
    shown = (text if len(text) <= letters else text[: max(1, letters - 1)] + "…") if fits and letters > 0 else ""
    return Bar(round(span.left, 2), round(width, 2), y, f"{look} {kind}", shown, title)
