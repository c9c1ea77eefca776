"""Attempts at boards (PROTOCOL.md, Boards): where an image belongs, when an attempt closes, how boards are found.

An attempt is rebuilt from rows by repeating the calls that were made when those rows were written; rows that changed
nothing (`inspections.surplus`) are left out.
"""

import json
import sqlite3
import string
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from unicodedata import normalize

from sqlalchemy import ColumnElement, bindparam, func, or_, select

from daemon.config.settings import Guards
from daemon.records import Image
from daemon.storage.database.connections import Prepared
from daemon.storage.database.rows import Row
from daemon.storage.database.schema import boards, inspections, recipes
from daemon.units import wall_seconds
from routing_rules.routes import Position, Recipe, VerdictName, worst

BoardKey = tuple[str, str]
ClosingReason = Literal["complete", "time_limit"]
#: The fate of an image at its attempt. `late`: the attempt had closed without its position. `repeats`: with it.
#: `refused`: its publisher named an attempt that had closed, and that takes it no more.
Fate = Literal["in time", "late", "repeats", "refused"]

#: The largest number that a message and a row can hold.
MAX_ATTEMPT = 2**63 - 1
#: Boards whose attempts stay in memory; a line has a few at a time, and a forgotten one costs two queries.
_CACHED_BOARDS = 1024
_CACHED_ATTEMPTS = 256
_ATTEMPTS = (
    select(boards, recipes.c.positions, recipes.c.time_limit_s)
    .join(
        recipes,
        (recipes.c.rules_version == boards.c.rules_version) & (recipes.c.board_type == boards.c.board_type),
        isouter=True,
    )
    .where(boards.c.board_type == bindparam("board_type"), boards.c.serial == bindparam("serial"))
)
_NEWEST = Prepared(_ATTEMPTS.order_by(boards.c.attempt.desc()).limit(1))
_NUMBERED = Prepared(_ATTEMPTS.where(boards.c.attempt == bindparam("number")))
_THAT_MATTER = Prepared(
    select(
        *(inspections.c.inspection_id, inspections.c.component, inspections.c.designator),
        *(inspections.c.verdict, inspections.c.defect, inspections.c.reason),
    )
    .where(inspections.c.board_id == bindparam("board_id"), inspections.c.surplus.is_(None))
    .order_by(inspections.c.inspection_id)
)
#: All guards of acceptance off, for programs that accept no pictures.
OFF = Guards(repeated_picture=0, retest_after=0, may_repeat=["*"])
#: Pictures of all sources; beyond it, the source that was silent longest is forgotten.
_MAX_PICTURES = 200_000
#: A picture of a position or of a component, with a payload or any. It looks at 10,000 images of an attempt at most:
#: more come from a scanner that reads nothing, and the search would delay each image.
_PICTURES = select(inspections.c.component, inspections.c.designator, inspections.c.image_sha256)
_PICTURES = _PICTURES.where(inspections.c.board_id == bindparam("board_id")).limit(10_000).subquery()
_HAS_PICTURE = Prepared(
    select(_PICTURES.c.component)
    .where(
        _PICTURES.c.component == bindparam("component"),
        or_(bindparam("designator").is_(None), _PICTURES.c.designator == bindparam("designator")),
        or_(bindparam("sha256").is_(None), _PICTURES.c.image_sha256 == bindparam("sha256")),
    )
    .limit(1)
)
#: The lists of a closed attempt, the worst first: a position is in one of them.
_LISTS: tuple[VerdictName, ...] = ("fail", "unknown", "review")
_FOLD = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


def positions_text(recipe: Recipe) -> str:
    entries = [(component, place.quantity, place.designators or None) for component, place in recipe.positions.items()]
    return json.dumps(entries, ensure_ascii=False)


def stored_recipe(board_type: str, positions: str | None, time_limit_s: float | None) -> Recipe:
    """Return a recipe as an attempt keeps it from opening to closing."""
    entries = json.loads(positions or "[]")
    places = {component: Position(quantity, tuple(listed or ())) for component, quantity, listed in entries}
    return Recipe(board_type, places, time_limit_s)


class Filled:
    """The positions of a recipe that images fill. Extras and repeats fill none, so this does not grow with them."""

    def __init__(self, recipe: Recipe) -> None:
        self._positions = recipe.positions
        self._designators: dict[str, set[str]] = {}

    def has_room(self, component: str, designator: str) -> bool:
        position = self._positions.get(component)
        if position is None or designator in (filled := self.of(component)):
            return False
        return designator in position.designators if position.designators else len(filled) < position.quantity

    def add(self, component: str, designator: str) -> bool:
        if not self.has_room(component, designator):
            return False
        self._designators.setdefault(component, set()).add(designator)
        return True

    def of(self, component: str) -> set[str]:
        return self._designators.get(component, set())

    def __len__(self) -> int:
        return sum(map(len, self._designators.values()))


@dataclass(slots=True)
class Attempt:
    """One attempt at one board, with the positions that accepted images fill (`seen`), and those with a verdict.

    `findings` has the worst finding of each position, of equals the first: its list, inspection, defect, reason.
    """

    board_id: int
    number: int
    recipe: Recipe
    closed: bool = False
    pending: int = 0
    worst: VerdictName = "pass"
    surplus: int = 0
    has_ignored_attributes: bool = False
    #: When it closed, or took the last picture of a position that it had already (UTC text).
    settled_at: str | None = None
    findings: dict[tuple[str, str], tuple[int, int, str | None, str | None]] = field(
        default_factory=dict[tuple[str, str], tuple[int, int, str | None, str | None]]
    )
    seen: Filled = field(init=False)
    judged: Filled = field(init=False)

    def __post_init__(self) -> None:
        self.seen, self.judged = Filled(self.recipe), Filled(self.recipe)

    def count_image(self, component: str, designator: str) -> None:
        self.seen.add(component, designator)
        self.pending += 1

    def judge(
        self,
        inspection_id: int,
        component: str,
        designator: str,
        verdict: VerdictName,
        defect: str | None,
        reason: str | None = None,
    ) -> bool:
        """Note a verdict; False if an open attempt is the same without this image."""
        self.pending -= 1
        if self.closed:
            return True
        before = self.worst
        self.worst = worst((before, verdict))
        matters = self.judged.add(component, designator) or self.worst != before
        if verdict != "pass":
            finding = (_LISTS.index(verdict), inspection_id, defect, reason)
            known = self.findings.get((component, designator))
            if known is None or finding[:2] < known[:2]:
                self.findings[component, designator] = finding
                matters = True
        self.surplus += not matters
        return matters

    @property
    def inspected(self) -> int:
        """Positions with a verdict; extras and repeats do not count."""
        return len(self.judged)

    @property
    def is_complete(self) -> bool:
        return not self.closed and self.pending == 0 and self.inspected == self.recipe.expected

    def closing(self, reason: ClosingReason) -> Row:
        """Return the columns to close with now; missing and pending images rule out a pass."""
        missing = list(self._missing())
        unjudged = bool(missing) or self.pending > 0
        return {
            "verdict": worst((self.worst, "unknown")) if unjudged else self.worst,
            "reason": reason,
            "inspected": self.inspected,
            "failed": [{**place, "defect": defect} for place, defect, _ in self._list("fail")],
            "unknown": [{**place, "reason": reason} for place, _, reason in self._list("unknown")],
            "review": [place for place, _, _ in self._list("review")],
            "missing": missing,
        }

    def _missing(self) -> Iterator[Row]:
        for component, place in self.recipe.positions.items():
            judged = self.judged.of(component)
            if len(judged) < place.quantity:
                listed = [designator for designator in place.designators if designator not in judged]
                entry: Row = {"component": component, "count": place.quantity - len(judged)}
                yield entry | ({"designators": listed} if place.designators else {})

    def _list(self, verdict: VerdictName) -> list[tuple[dict[str, Any], str | None, str | None]]:
        findings = [
            (*finding, place) for place, finding in self.findings.items() if finding[0] == _LISTS.index(verdict)
        ]
        return [
            ({"designator": designator, "component": component}, defect, reason)
            for _, _, defect, reason, (component, designator) in sorted(findings, key=lambda finding: finding[1])
        ]


def choose_attempt(
    attempts: Mapping[int, Attempt],
    named: int | None,
    component: str,
    designator: str,
    repeats: Callable[[Attempt], bool] = lambda _: False,
) -> tuple[int, Fate]:
    """Choose the newest attempt, the one `named` by the publisher, or a new one (PROTOCOL.md, Boards).

    `repeats(attempt)` tells if a closed attempt takes a picture of a position that it has.
    """
    newest = max(attempts, default=0)
    attempt = attempts.get(named or newest)
    if attempt is not None:
        if not attempt.closed:
            return attempt.number, "in time"
        if attempt.seen.has_room(component, designator):
            return attempt.number, "late"
        if repeats(attempt):
            return attempt.number, "repeats"
    if named is not None:
        return named, "in time" if attempt is None else "refused"
    return (newest + 1, "in time") if newest < MAX_ATTEMPT else (newest, "refused")


class BoardAttempts:
    """The attempts at one board (type, serial), with their rows in `boards`; each is read when it is asked for."""

    def __init__(self, sql: sqlite3.Connection, board_type: str, serial: str) -> None:
        self._board = {"board_type": board_type, "serial": serial}
        self._attempts: dict[int, tuple[Attempt, Row]] = {}
        self.newest = 0
        self._read(sql, _NEWEST(sql, **self._board))

    def get(self, sql: sqlite3.Connection, number: int) -> tuple[Attempt, Row] | None:
        if number not in self._attempts and number <= self.newest:
            self._read(sql, _NUMBERED(sql, **self._board, number=number))
        return self._attempts.get(number)

    def choose(self, sql: sqlite3.Connection, image: Image, guards: Guards, now_wall_s: float) -> tuple[int, Fate]:
        def repeats(attempt: Attempt) -> bool:
            return _repeats(sql, attempt, image, guards, now_wall_s)

        named = image.board.attempt
        found = [self.get(sql, number) for number in (named or self.newest, self.newest)]
        attempts = {one[0].number: one[0] for one in found if one}
        return choose_attempt(attempts, named, image.component, image.designator, repeats)

    def add(self, row: Row, recipe: Recipe) -> Attempt:
        attempt = Attempt(row["board_id"], row["attempt"], recipe, closed=row["verdict"] is not None)
        self._attempts[attempt.number] = attempt, row
        self.newest = max(self.newest, attempt.number)
        return attempt

    @property
    def are_many(self) -> bool:
        return len(self._attempts) > _CACHED_ATTEMPTS

    def _read(self, sql: sqlite3.Connection, found: sqlite3.Cursor) -> None:
        values = found.fetchone()
        if values is None:
            return
        *columns, positions, time_limit_s = values
        row = dict(zip(boards.c.keys(), columns, strict=True))
        attempt = self.add(row, stored_recipe(row["board_type"], positions, time_limit_s))
        images = _THAT_MATTER(sql, board_id=attempt.board_id)
        for inspection_id, component, designator, verdict, defect, reason in images:
            attempt.count_image(component, designator)
            if verdict is not None:
                attempt.judge(inspection_id, component, designator, verdict, defect, reason)
        attempt.settled_at = row["completed_at"]


def _repeats(sql: sqlite3.Connection, attempt: Attempt, image: Image, guards: Guards, now_wall_s: float) -> bool:
    """Return True if a closed attempt takes a picture of a position that it has: too soon for a retest, or sent twice.

    After a clock was set far back, nothing is too soon.
    """
    settled_s = wall_seconds(attempt.settled_at) if attempt.settled_at else 0.0
    is_too_soon = abs(now_wall_s - settled_s) < guards.retest_after
    if not is_too_soon and {image.source, "*"} & {*guards.may_repeat}:
        return False
    place = attempt.recipe.positions.get(image.component)
    found = _HAS_PICTURE(
        sql,
        board_id=attempt.board_id,
        component=image.component,
        designator=None if place is not None and not place.designators else image.designator,
        sha256=None if is_too_soon else image.sha256,
    )
    return found.fetchone() is not None


class BoardCache:
    """The boards in use. After a failed transaction `forget` its boards: memory must not know more than the disk."""

    def __init__(self) -> None:
        self._boards: OrderedDict[BoardKey, BoardAttempts] = OrderedDict()

    def get(self, sql: sqlite3.Connection, board_type: str, serial: str) -> BoardAttempts:
        key = (board_type, serial)
        board = self._boards.get(key)
        if board is None:
            board = self._boards[key] = BoardAttempts(sql, board_type, serial)
        self._boards.move_to_end(key)
        return board

    def forget(self, keys: Iterable[BoardKey]) -> None:
        for key in keys:
            self._boards.pop(key, None)

    def trim(self, touched: Iterable[BoardKey]) -> None:
        """Drop the least used and the largest; only between transactions, so that none is loaded twice in one."""
        self.forget([key for key in touched if key in self._boards and self._boards[key].are_many])
        while len(self._boards) > _CACHED_BOARDS:
            self._boards.popitem(last=False)


class RepeatedPictures:
    """Remembers each source's pictures since the daemon's start. Used by the writer's thread only.

    An image whose transaction failed is remembered too; resent for the same place, it does not repeat.
    """

    def __init__(self, guards: Guards) -> None:
        self.guards = guards
        self._window = 0 if "*" in guards.may_repeat else int(guards.repeated_picture)
        #: By source and payload the last place, the number of the image there, and that of the last one elsewhere.
        self._sources: OrderedDict[str, OrderedDict[int, tuple[int, int, int]]] = OrderedDict()

    def note(self, image: Image) -> bool:
        """Note an image that is accepted; True if its picture came before, for another position or board."""
        if not self._window or image.source in self.guards.may_repeat:
            return False
        pictures = self._sources.get(image.source)
        if pictures is None:
            pictures = self._sources[image.source] = OrderedDict()
            if len(self._sources) > max(1, _MAX_PICTURES // self._window):
                self._sources.popitem(last=False)
        self._sources.move_to_end(image.source)
        number = next(reversed(pictures.values()), (0, 0, 0))[1] + 1
        payload = hash((image.sha256, image.pixels.shape))
        place = hash((image.board.type, image.board.serial, image.component, image.designator))
        before, last, elsewhere = pictures.pop(payload, (place, 0, 0))
        elsewhere = elsewhere if before == place else last
        pictures[payload] = place, number, elsewhere
        while next(iter(pictures.values()))[1] <= number - self._window:
            pictures.popitem(last=False)
        return elsewhere > 0 and number - elsewhere <= self._window


# Serials are found over the index on lower(serial). Only the case of A to Z is folded, here and in the database:
# SQLite's `lower` knows no other letters. It keeps texts in the order of their code points.


def folded(serial: str) -> str:
    return serial.translate(_FOLD)


def serial_range(prefix: str) -> tuple[str, str]:
    """Return the range of lower(serial), end excluded, for the serials that begin with `prefix`, in either case."""
    return folded(prefix), folded(prefix) + chr(0x10FFFF)


def has_serial(*serials: str) -> ColumnElement[bool]:
    same = boards.alias("same")
    # A query of its own: SQLite would substitute the wanted serial into lower(serial), and then use no index.
    wanted = {*serials, *(normalize("NFC", serial) for serial in serials)}  # older rows may have another form
    ids = select(same.c.board_id).where(func.lower(same.c.serial).in_([folded(serial) for serial in wanted]))
    return boards.c.board_id.in_(ids) & boards.c.serial.in_(wanted)
