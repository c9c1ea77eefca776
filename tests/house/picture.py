"""Pictures as SVG: the rooms of the product with their arrows, the top floor above, and the way of one image."""

import re
from collections import defaultdict
from html import escape

from tests import ROOT
from tests.house.one_image import Crossing

_BOX = (176, 30)
_GAP = (18, 74)
_MARGIN = 24
_COLOURS = {"tools": "#fde8c8", "daemon": "#cfe5fb", "experts": "#d7f0d2", "routing_rules": "#ecdcf6"}
_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">
<title>{title}</title>
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="6" markerHeight="6" orient="auto">
<path d="M0,0 L8,4 L0,8 z" fill="#777"/></marker></defs>
<rect width="100%" height="100%" fill="white"/>
"""


#: Drawn as one box: the files of daemon/ that put the line together, and those that hold what all rooms share.
_VOCABULARY = ("daemon.errors", "daemon.records", "daemon.units")
_TOP, _WORDS = "daemon: app, serve, …", "daemon: records, errors, units"


def draw(arrows: dict[str, set[str]]) -> str:
    """Return the picture of rooms (each with the rooms it imports).

    `tools`, `experts` and `routing_rules` are a box each, language models another. An arrow that follows from others
    (a room imports what its neighbour imports too) is left out.
    """
    rooms: dict[str, set[str]] = defaultdict(set)
    for room, targets in arrows.items():
        rooms[_box_of(room)] |= {_box_of(target) for target in targets} - {_box_of(room)}
    floors = _floors(rooms)
    rows: dict[int, list[str]] = defaultdict(list)
    for room in sorted(rooms):
        rows[floors[room]].append(room)
    rows = _in_order(rows, rooms)
    width = max(len(row) for row in rows.values()) * (_BOX[0] + _GAP[0]) - _GAP[0] + 2 * _MARGIN
    places: dict[str, tuple[float, float]] = {}
    for floor, row in rows.items():
        left = (width - len(row) * (_BOX[0] + _GAP[0]) + _GAP[0]) / 2
        for number, room in enumerate(row):
            places[room] = left + number * (_BOX[0] + _GAP[0]), _MARGIN + floor * (_BOX[1] + _GAP[1])
    height = _MARGIN * 2 + (max(rows) + 1) * (_BOX[1] + _GAP[1]) - _GAP[1]
    lines = [_arrow(places[room], places[target]) for room in sorted(rooms) for target in sorted(_direct(room, rooms))]
    boxes = [_box(room, places[room]) for room in sorted(rooms)]
    title = "The rooms of CoServe and their arrows: each imports what its arrows point to"
    return _HEAD.format(width=width, height=height, title=title) + "\n".join(lines + boxes) + "\n</svg>\n"


def _box_of(room: str) -> str:
    folder, *rest = room.split(".")
    if folder != "daemon":
        return "experts.moe" if folder == "experts" and rest[:1] == ["moe"] else folder
    if room in _VOCABULARY:
        return _WORDS
    is_room = (ROOT / "daemon" / "".join(rest[:1])).is_dir() and rest
    return f"daemon.{rest[0]}" if is_room else _TOP


def _floors(rooms: dict[str, set[str]]) -> dict[str, int]:
    """Return the floor of each room, 0 at the top: one below the lowest room that imports it."""
    floors = dict.fromkeys(rooms, 0)
    for _ in rooms:
        for room, targets in rooms.items():
            for target in targets:
                floors[target] = max(floors[target], floors[room] + 1)
    return floors


def _direct(room: str, rooms: dict[str, set[str]]) -> set[str]:
    return {
        target
        for target in rooms[room]
        if not any(_reaches(other, target, rooms) for other in rooms[room] if other != target)
    }


def _reaches(room: str, target: str, rooms: dict[str, set[str]]) -> bool:
    return target in rooms[room] or any(_reaches(other, target, rooms) for other in rooms[room])


def _in_order(rows: dict[int, list[str]], rooms: dict[str, set[str]]) -> dict[int, list[str]]:
    """Put each room near the middle of those that import it, so that few arrows cross."""
    place: dict[str, float] = {}
    ordered: dict[int, list[str]] = {}
    for floor in sorted(rows):
        row = rows[floor]
        middle = {
            room: [place[other] for other, targets in rooms.items() if room in targets and other in place]
            for room in row
        }
        row = sorted(row, key=lambda room: (sum(middle[room]) / len(middle[room]) if middle[room] else 0.5, room))
        place.update({room: (number + 0.5) / len(row) for number, room in enumerate(row)})
        ordered[floor] = row
    return ordered


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    x1, y1, x2, y2 = start[0] + _BOX[0] / 2, start[1] + _BOX[1], end[0] + _BOX[0] / 2, end[1]
    bend = (y2 - y1) / 2
    path = f"M{x1:.0f},{y1:.0f} C{x1:.0f},{y1 + bend:.0f} {x2:.0f},{y2 - bend:.0f} {x2:.0f},{y2:.0f}"
    return f'<path d="{path}" fill="none" stroke="#999" stroke-width="1" marker-end="url(#tip)"/>'


def _box(room: str, place: tuple[float, float]) -> str:
    colour = _COLOURS[re.split(r"[.:]", room)[0]]
    x, y = place
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{_BOX[0]}" height="{_BOX[1]}" rx="4" fill="{colour}" stroke="#666"/>'
        f'<text x="{x + _BOX[0] / 2:.0f}" y="{y + _BOX[1] / 2 + 4:.0f}" text-anchor="middle">{escape(room)}</text>'
    )


_LANE, _ROW = 118, 22


def draw_image(crossing: Crossing) -> str:
    """Draw a column for each thread and a row for each file, top to bottom in the order of their first calls."""
    files = list(dict.fromkeys(file for _, file in crossing.cells))
    left, top = 270, _MARGIN + _ROW
    width, height = left + len(crossing.threads) * _LANE + _MARGIN, top + len(files) * _ROW + _MARGIN
    parts = [_label(left + (n + 0.5) * _LANE, top - 8, thread, "middle") for n, thread in enumerate(crossing.threads)]
    for row, file in enumerate(files):
        y = top + row * _ROW
        parts.append(_label(left - 10, y + 15, file, "end"))
        colour = _COLOURS[file.partition("/")[0]]
        for lane, thread in enumerate(crossing.threads):
            if (thread, file) in crossing.cells:
                x = left + lane * _LANE + 4
                number = crossing.cells.index((thread, file)) + 1
                parts.append(
                    f'<rect x="{x}" y="{y + 2}" width="{_LANE - 8}" height="{_ROW - 4}" rx="4" fill="{colour}"/>'
                )
                parts.append(_label(x + _LANE / 2 - 4, y + 15, str(number), "middle"))
    title = "The way of one image: files by thread, numbered in the order of their first calls"
    return _HEAD.format(width=width, height=height, title=title) + "\n".join(parts) + "\n</svg>\n"


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'
