"""Attempts at boards (PROTOCOL.md, Boards): where an image belongs, when an attempt closes, how boards are found.

The writer keeps the boards in use in memory. An attempt is rebuilt from rows by repeating the calls that were made when
those rows were written.
"""

import json
import string
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, func, select

from daemon.storage.database.schema import boards, inspections, recipes
from routing_rules.routes import Verdict, worst

Row = dict[str, Any]
BoardKey = tuple[str, str]
ClosingReason = Literal["complete", "time_limit"]

#: The largest number that a message and a row can hold.
MAX_ATTEMPT = 2**63 - 1
#: Boards whose attempts stay in memory; a line has a few at a time, and a forgotten one costs two queries.
_CACHED_BOARDS = 1024
_FOLD = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_LAST_CHARACTER = chr(0x10FFFF)
_SURROGATES = range(0xD800, 0xE000)


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
    attempts: Mapping[int, Attempt], named: int | None, component: str, designator: str
) -> AttemptChoice:
    """Choose the attempt of an image among all attempts at its board; `named` is its publisher's choice, if any."""
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
    # A publisher named the largest number: the first free one follows.
    return AttemptChoice(next(number for number in count(1) if number not in attempts), opens=True)


def _joins(attempt: Attempt, component: str, designator: str) -> AttemptChoice | None:
    if not attempt.closed:
        return AttemptChoice(attempt.number)
    return AttemptChoice(attempt.number, late=True) if attempt.lacks(component, designator) else None


@dataclass(slots=True)
class BoardAttempts:
    """The attempts at one board (type, serial), with their rows in `boards` by attempt number."""

    attempts: dict[int, Attempt] = field(default_factory=dict[int, Attempt])
    rows: dict[int, Row] = field(default_factory=dict[int, Row])

    def choose(self, named: int | None, component: str, designator: str) -> AttemptChoice:
        return choose_attempt(self.attempts, named, component, designator)

    def add(self, row: Row, plan: BoardPlan) -> Attempt:
        """Add the attempt of a row: open, or closed if the row has a verdict."""
        attempt = Attempt(row["board_id"], row["attempt"], plan, closed=row["verdict"] is not None)
        self.attempts[attempt.number] = attempt
        self.rows[attempt.number] = row
        return attempt


class BoardCache:
    """The boards in use. After a failed transaction `forget` its boards: memory must not know more than the disk."""

    def __init__(self) -> None:
        self._boards: OrderedDict[BoardKey, BoardAttempts] = OrderedDict()

    def get(self, connection: Connection, board_type: str, serial: str) -> BoardAttempts:
        key = (board_type, serial)
        board = self._boards.get(key)
        if board is None:
            board = self._boards[key] = _load(connection, board_type, serial)
        self._boards.move_to_end(key)
        return board

    def forget(self, keys: Iterable[BoardKey]) -> None:
        for key in keys:
            self._boards.pop(key, None)

    def trim(self) -> None:
        """Drop the least used beyond the bound; between transactions only, so that none is loaded twice in one."""
        while len(self._boards) > _CACHED_BOARDS:
            self._boards.popitem(last=False)


def _load(connection: Connection, board_type: str, serial: str) -> BoardAttempts:
    board = BoardAttempts()
    rows = connection.execute(
        select(boards, recipes.c.positions, recipes.c.time_limit_s)
        .join(
            recipes,
            (recipes.c.rules_version == boards.c.rules_version) & (recipes.c.board_type == boards.c.board_type),
            isouter=True,
        )
        .where(boards.c.board_type == board_type, boards.c.serial == serial)
        .order_by(boards.c.attempt)
    ).mappings()
    by_id: dict[int, Attempt] = {}
    for row in rows:
        plan = BoardPlan.of_row(row["positions"], row["time_limit_s"])
        attempt = board.add({name: row[name] for name in boards.c.keys()}, plan)  # noqa: SIM118  # a column collection
        by_id[attempt.board_id] = attempt
    if not by_id:
        return board
    images = connection.execute(
        select(
            *(inspections.c.inspection_id, inspections.c.board_id, inspections.c.component),
            *(inspections.c.designator, inspections.c.verdict, inspections.c.defect),
        )
        .where(inspections.c.board_id.in_(by_id))
        .order_by(inspections.c.inspection_id)
    )
    for inspection_id, board_id, component, designator, verdict, defect in images:
        by_id[board_id].take(component, designator)
        if verdict is not None:
            by_id[board_id].judge(inspection_id, component, designator, verdict, defect)
    return board


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
