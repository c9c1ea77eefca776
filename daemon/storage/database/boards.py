"""Attempts at boards (PROTOCOL.md, Boards): where an image belongs, when an attempt closes, how boards are found.

The writer keeps the boards in use in memory. An attempt is rebuilt from rows by repeating the calls that were made when
those rows were written.
"""

import json
import string
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, bindparam, func, select

from daemon.storage.database.schema import boards, inspections, recipes
from routing_rules.routes import Verdict, worst

Row = dict[str, Any]
BoardKey = tuple[str, str]
ClosingReason = Literal["complete", "time_limit"]

#: The largest number that a message and a row can hold.
MAX_ATTEMPT = 2**63 - 1
#: Boards, and attempts at one, that stay in memory; a line has a few at a time, and a forgotten one costs two queries.
_CACHED_BOARDS = 1024
_CACHED_ATTEMPTS = 256
_FOLD = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_LAST_CHARACTER = chr(0x10FFFF)
_SURROGATES = range(0xD800, 0xE000)

_OF_BOARD = (
    select(boards, recipes.c.positions, recipes.c.time_limit_s)
    .join(
        recipes,
        (recipes.c.rules_version == boards.c.rules_version) & (recipes.c.board_type == boards.c.board_type),
        isouter=True,
    )
    .where(boards.c.board_type == bindparam("board_type"), boards.c.serial == bindparam("serial"))
)
_NEWEST = _OF_BOARD.order_by(boards.c.attempt.desc()).limit(1)
_NUMBERED = _OF_BOARD.where(boards.c.attempt == bindparam("number"))
_IMAGES = (
    select(
        *(inspections.c.inspection_id, inspections.c.component, inspections.c.designator),
        *(inspections.c.verdict, inspections.c.defect),
    )
    .where(inspections.c.board_id == bindparam("board_id"))
    .order_by(inspections.c.inspection_id)
)


@dataclass(frozen=True, slots=True)
class ExpectedPosition:
    """A component type in a recipe: `quantity` images, at `designators` where the recipe lists them."""

    component: str
    quantity: int
    designators: tuple[str, ...] | None = None

    def filled(self, designators: Mapping[str, set[str]]) -> int:
        """Count the positions that `designators` (by component) fill; extras and repeats fill none."""
        present = designators.get(self.component)
        if not present:
            return 0
        if self.designators is not None:
            return sum(designator in present for designator in self.designators)
        return min(self.quantity, len(present))

    def missing(self, judged: Mapping[str, set[str]]) -> dict[str, Any]:
        """Return the entry of `boards.missing` for the positions without a verdict."""
        entry: dict[str, Any] = {"component": self.component, "count": self.quantity - self.filled(judged)}
        if self.designators is not None:
            present = judged.get(self.component, set())
            entry["designators"] = [designator for designator in self.designators if designator not in present]
        return entry


@dataclass(frozen=True, slots=True)
class BoardPlan:
    """A recipe as an attempt keeps it from opening to closing."""

    positions: tuple[ExpectedPosition, ...]
    time_limit_s: float | None = None

    @property
    def expected(self) -> int:
        return sum(position.quantity for position in self.positions)

    def as_text(self) -> str:
        """Return `recipes.positions`."""
        entries = [[position.component, position.quantity, position.designators] for position in self.positions]
        return json.dumps(entries, ensure_ascii=False)

    @staticmethod
    def of_row(positions: str | None, time_limit_s: float | None) -> "BoardPlan":
        """Read a row of `recipes`; the plan is empty where there is none."""
        return BoardPlan(
            tuple(
                ExpectedPosition(component, quantity, None if designators is None else tuple(designators))
                for component, quantity, designators in json.loads(positions or "[]")
            ),
            time_limit_s,
        )


@dataclass(frozen=True, slots=True)
class BoardClosing:
    """The final state of a closed attempt."""

    verdict: Verdict
    reason: ClosingReason
    inspected: int
    failed: list[dict[str, Any]]
    missing: list[dict[str, Any]]


@dataclass(slots=True)
class Attempt:
    """One attempt at one board. `seen` and `judged` hold each component's designators, so that a repeat counts once."""

    board_id: int
    number: int
    plan: BoardPlan
    closed: bool = False
    pending: int = 0
    worst: Verdict = "pass"
    seen: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    judged: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    failures: dict[tuple[str, str], tuple[int, str | None]] = field(
        default_factory=dict[tuple[str, str], tuple[int, str | None]]
    )

    def take(self, component: str, designator: str) -> None:
        """Count an image that was accepted into this attempt."""
        self.seen.setdefault(component, set()).add(designator)
        self.pending += 1

    def judge(self, inspection_id: int, component: str, designator: str, verdict: Verdict, defect: str | None) -> None:
        """Note the verdict of an accepted image. A closed attempt only counts it as no longer pending."""
        self.pending -= 1
        if self.closed:
            return
        self.judged.setdefault(component, set()).add(designator)
        self.worst = worst((self.worst, verdict))
        if verdict == "fail":
            place = (component, designator)
            first = self.failures.get(place)
            if first is None or inspection_id < first[0]:
                self.failures[place] = (inspection_id, defect)

    def lacks(self, component: str, designator: str) -> bool:
        """Return True if an image of `designator` would fill a position that no accepted image fills yet."""
        for position in self.plan.positions:
            if position.component == component:
                seen = self.seen.get(component, set())
                if designator in seen:
                    return False
                if position.designators is not None:
                    return designator in position.designators
                return len(seen) < position.quantity
        return False

    @property
    def inspected(self) -> int:
        """The positions with a verdict; extras and repeats do not count."""
        return sum(position.filled(self.judged) for position in self.plan.positions)

    @property
    def is_complete(self) -> bool:
        """True if every expected position has a verdict and no accepted image is pending."""
        return not self.closed and self.pending == 0 and self.inspected == self.plan.expected

    def closing(self, reason: ClosingReason) -> BoardClosing:
        """Return the state to close with now; missing and pending images rule out a pass."""
        missing = [
            position.missing(self.judged)
            for position in self.plan.positions
            if position.filled(self.judged) < position.quantity
        ]
        unjudged = bool(missing) or self.pending > 0
        failures = sorted(self.failures.items(), key=lambda item: item[1][0])
        return BoardClosing(
            verdict=worst((self.worst, "unknown")) if unjudged else self.worst,
            reason=reason,
            inspected=self.inspected,
            failed=[
                {"designator": designator, "component": component, "defect": defect}
                for (component, designator), (_, defect) in failures
            ],
            missing=missing,
        )


@dataclass(frozen=True, slots=True)
class AttemptChoice:
    """The attempt of an image: `number`, which `opens` with it or, closed already, takes it `late`."""

    number: int
    opens: bool = False
    late: bool = False


def choose_attempt(
    attempts: Mapping[int, Attempt], named: int | None, component: str, designator: str, free: int = 1
) -> AttemptChoice:
    """Choose the attempt of an image: `attempts` has the newest one and `named`, its publisher's choice, if any."""
    if named is not None:
        attempt = attempts.get(named)
        if attempt is None:
            return AttemptChoice(named, opens=True)
        if choice := _joins(attempt, component, designator):
            return choice
    newest = max(attempts, default=0)
    if newest and (choice := _joins(attempts[newest], component, designator)):
        return choice
    if newest < MAX_ATTEMPT:
        return AttemptChoice(newest + 1, opens=True)
    return AttemptChoice(free, opens=True)  # a publisher named the largest number


def _joins(attempt: Attempt, component: str, designator: str) -> AttemptChoice | None:
    if not attempt.closed:
        return AttemptChoice(attempt.number)
    return AttemptChoice(attempt.number, late=True) if attempt.lacks(component, designator) else None


@dataclass(slots=True)
class BoardAttempts:
    """Attempts at one board (type, serial), with their rows in `boards`, by attempt number.

    The newest attempt is always here, others once an image or a time limit names them: a serial that a scanner reports
    for weeks has a hundred thousand. `free` is a number that no attempt has, for use after MAX_ATTEMPT.
    """

    attempts: dict[int, Attempt] = field(default_factory=dict[int, Attempt])
    rows: dict[int, Row] = field(default_factory=dict[int, Row])
    free: int = 1

    def choose(self, named: int | None, component: str, designator: str) -> AttemptChoice:
        return choose_attempt(self.attempts, named, component, designator, self.free)

    def add(self, row: Row, plan: BoardPlan) -> Attempt:
        """Add the attempt of a row: open, or closed if the row has a verdict."""
        attempt = Attempt(row["board_id"], row["attempt"], plan, closed=row["verdict"] is not None)
        self.attempts[attempt.number] = attempt
        self.rows[attempt.number] = row
        return attempt

    def trim(self) -> None:
        """Drop the oldest attempts beyond the bound; they are read again when they are named."""
        if len(self.attempts) > 2 * _CACHED_ATTEMPTS:
            for number in sorted(self.attempts)[:-_CACHED_ATTEMPTS]:
                del self.attempts[number], self.rows[number]
            self.free = 1  # to be looked up again


class BoardCache:
    """The boards in use. After a failed transaction `forget` its boards: memory must not know more than the disk."""

    def __init__(self) -> None:
        self._boards: OrderedDict[BoardKey, BoardAttempts] = OrderedDict()

    def get(self, connection: Connection, board_type: str, serial: str, number: int | None) -> BoardAttempts:
        """Return the board with its newest attempt and, if it exists, attempt `number`."""
        key: Row = {"board_type": board_type, "serial": serial}
        board = self._boards.get((board_type, serial))
        if board is None:
            board = self._boards[board_type, serial] = BoardAttempts()
            _load(connection, board, connection.execute(_NEWEST, key).fetchone())
        if number is not None and number not in board.attempts:
            _load(connection, board, connection.execute(_NUMBERED, key | {"number": number}).fetchone())
        if MAX_ATTEMPT in board.attempts and (board.free == 1 or board.free in board.attempts):
            board.free = _free_number(
                lambda number: (
                    number in board.attempts
                    or connection.execute(_NUMBERED, key | {"number": number}).fetchone() is not None
                )
            )
        self._boards.move_to_end((board_type, serial))
        return board

    def forget(self, keys: Iterable[BoardKey]) -> None:
        for key in keys:
            self._boards.pop(key, None)

    def trim(self, touched: Iterable[BoardKey]) -> None:
        """Drop the least used beyond the bounds; between transactions only, so that none is loaded twice in one."""
        for key in touched:
            if board := self._boards.get(key):
                board.trim()
        while len(self._boards) > _CACHED_BOARDS:
            self._boards.popitem(last=False)


def _load(connection: Connection, board: BoardAttempts, found: Sequence[Any] | None) -> None:
    """Add an attempt with its images from its row, if there is one."""
    if found is None:
        return
    *values, positions, time_limit_s = found
    row = dict(zip(boards.c.keys(), values, strict=True))
    attempt = board.add(row, BoardPlan.of_row(positions, time_limit_s))
    images = connection.execute(_IMAGES, {"board_id": attempt.board_id})
    for inspection_id, component, designator, verdict, defect in images:
        attempt.take(component, designator)
        if verdict is not None:
            attempt.judge(inspection_id, component, designator, verdict, defect)


def _free_number(is_taken: Callable[[int], bool]) -> int:
    """Return the number behind a row of attempts from 1 on, in steps that double: the row may be long."""
    last, step = 0, 1
    while is_taken(last + step):
        last, step = last + step, 2 * step
        if last == MAX_ATTEMPT:  # each number that the steps come to was named
            return next(number for number in count(1) if not is_taken(number))
    while step > 1:
        step //= 2
        last += step if is_taken(last + step) else 0
    return last + 1


# Serials are found over the index on lower(serial). Only the case of A to Z is folded, here and in the database:
# SQLite's `lower` knows no other letters, nor does PostgreSQL's under the collation C, which the column has there. Both
# keep texts in the order of their code points.


def folded(serial: str) -> str:
    """Return lower(serial) as the database computes it."""
    return serial.translate(_FOLD)


def serial_range(prefix: str) -> tuple[str, str | None]:
    """Return the range of lower(serial) for the serials that begin with `prefix`, in either case.

    The second value is behind the range, None if the range has no end.
    """
    first = folded(prefix)
    stem = first.rstrip(_LAST_CHARACTER)
    if not stem:
        return first, None
    following = ord(stem[-1]) + 1
    # No text has a surrogate, so no order has them either.
    return first, stem[:-1] + chr(_SURROGATES.stop if following in _SURROGATES else following)


def has_serial(*serials: str) -> ColumnElement[bool]:
    """Return the condition that a row of `boards` has one of these serials, in the same case."""
    same = boards.alias("same")
    # A query of its own: SQLite would substitute the wanted serial into lower(serial), and then use no index.
    ids = select(same.c.board_id).where(func.lower(same.c.serial).in_([folded(serial) for serial in serials]))
    return boards.c.board_id.in_(ids) & boards.c.serial.in_(serials)
