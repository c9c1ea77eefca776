"""What the Line page asks the database: today's counts, kept up by `seq`, and the newest boards.

Counting a day anew for every look would cost as much as the day is long. Rows get their `seq` once, in order, and never
change their verdict after it: so each is counted once, when it has come.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Row

from daemon.dashboard.site.database import Database

#: Rows are counted in steps of so many numbers: each is a short question, however much there is.
_STEP = 50_000
_STEPS_AT_ONCE = 4

_LAST = "SELECT max(seq) FROM {table}"
_FROM = "SELECT seq, completed_at FROM {table} WHERE seq >= :seq ORDER BY seq"
_COUNT = """
SELECT verdict, count(*) AS number FROM {table}
WHERE seq > :after AND seq <= :until AND completed_at >= :since {only}
GROUP BY verdict
"""
_BOARDS = """
SELECT board_id, board_type, serial, attempt, lot, station, first_seen_at, completed_at, expected, inspected, verdict,
       reason, failed
FROM boards ORDER BY board_id DESC
"""
_DONE = """
SELECT board_id, count(*) AS images, sum(CASE WHEN status = 'done' THEN 1 ELSE 0 END) AS done
FROM inspections WHERE board_id = :board_id GROUP BY board_id
"""
NEWEST: Final = 30


@dataclass(slots=True)
class Day:
    """What is counted of one UTC day. `is_whole` is false while a start still goes through what there was before."""

    since: str
    boards: Counter[str] = field(default_factory=Counter)
    images: Counter[str] = field(default_factory=Counter)
    is_whole: bool = False

    @property
    def first_pass_yield(self) -> float | None:
        """Boards that passed at their first attempt, of all that were closed at it."""
        closed = sum(self.boards.values())
        return self.boards["pass"] / closed if closed else None


class Today:
    """The counts of today; `look` brings them up to what the database holds. Any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._day = Day("")
        self._seq = {"boards": 0, "inspections": 0}

    def look(self, day: str) -> Day:
        """`day` is today, as `2026-11-21`. NoDatabase and TooMuchToCount as the database has them."""
        with self._lock:
            if self._day.since != day:
                self._seq = {table: self._first(table, day) - 1 for table in self._seq}
                self._day = Day(day)
            whole = [
                self._count("boards", self._day.boards, "AND attempt = 1"),
                self._count("inspections", self._day.images, ""),
            ]
            self._day.is_whole = all(whole)
            return Day(day, Counter(self._day.boards), Counter(self._day.images), self._day.is_whole)

    def _count(self, table: str, counted: Counter[str], only: str) -> bool:
        """True once everything is counted."""
        last = self._database.rows(_LAST.format(table=table), limit=1)[0][0] or 0
        for _ in range(_STEPS_AT_ONCE):
            after = self._seq[table]
            if after >= last:
                return True
            until = min(after + _STEP, last)
            places = {"after": after, "until": until, "since": self._day.since}
            for row in self._database.rows(_COUNT.format(table=table, only=only), places, limit=10):
                counted[row.verdict] += row.number
            self._seq[table] = until
        return self._seq[table] >= last

    def _first(self, table: str, day: str) -> int:
        """The first number of `day`, found by halving: the order of numbers is that of completion."""
        low = 0
        high = (self._database.rows(_LAST.format(table=table), limit=1)[0][0] or 0) + 1
        while low < high:
            middle = (low + high) // 2
            found = self._database.rows(_FROM.format(table=table), {"seq": middle}, limit=1)
            if not found or found[0].completed_at >= day:
                high = middle
            else:
                low = found[0].seq + 1
        return low


def newest_boards(database: Database) -> list[Row[Any]]:
    """The boards that came last, the newest first."""
    return database.rows(_BOARDS + f" LIMIT {NEWEST}", limit=NEWEST)


def images_done(database: Database, board_id: int) -> tuple[int, int]:
    """Of an open board: images that came, and those that are judged."""
    found = database.rows(_DONE, {"board_id": board_id}, limit=1)
    return (found[0].images, found[0].done) if found else (0, 0)
