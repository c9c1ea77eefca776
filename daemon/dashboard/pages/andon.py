"""The figures of the page Line: yield by hour and shift, the last board, what fails now, cameras that send nothing."""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from daemon.config.plant_time import PlantTime, Span
from daemon.dashboard.pages.board import BOARDS, final_verdicts, json_rows
from daemon.dashboard.pages.drawings import WIDE, Bar, BarChart
from daemon.dashboard.site.database import Database
from daemon.dashboard.site.stored_rules import StoredRules
from daemon.units import counted, utc_text, wall_seconds

#: How long counts are kept: the longest time that the page looks back.
_WINDOW_S = 48 * 3600.0
_HOURS, _SHIFTS = 12, 6
#: Numbers of `seq` that one short question counts, and questions at each refresh.
_STEP = 50_000
_STEPS_AT_ONCE = 4
_TABLES = {"boards": "AND attempt = 1", "inspections": ""}
#: Failed boards of which the most frequent failures are counted, and failures that are listed.
_MAX_FAILED_BOARDS = 2000
_MAX_LISTED = 4
#: A larger board's images are not searched for a picture.
_MAX_SEARCHED_IMAGES = 5000
_MAX_FINDINGS = 30
#: Boards from which the usual pause is taken. A pause of more than an hour is a break; after eight the line is off.
_PAUSE_BOARDS = 60
_BREAK_S, _OFF_S = 3600.0, 8 * 3600.0
_MIN_SILENCE_S, _SILENCE_FACTOR = 300.0, 5.0

_LAST = "SELECT max(seq) FROM {table}"
_FROM = "SELECT seq, completed_at FROM {table} WHERE seq >= :seq ORDER BY seq"
_COUNT = """
SELECT substr(completed_at, 1, 16) AS minute, verdict, count(*) AS number FROM {table}
WHERE seq > :after AND seq <= :until {only}
GROUP BY substr(completed_at, 1, 16), verdict
"""
_LAST_BOARD = f"{BOARDS} WHERE boards.seq IS NOT NULL ORDER BY boards.seq DESC LIMIT 1"
#: First attempts that people passed, less those that people failed although the line had passed them.
_PASSED_BY_REVIEW = """
SELECT sum(CASE WHEN final_boards.verdict = 'pass' THEN 1 ELSE 0 END)
     - sum(CASE WHEN boards.verdict = 'pass' THEN 1 ELSE 0 END)
FROM boards JOIN final_boards ON final_boards.board_id = boards.board_id
WHERE boards.attempt = 1 AND boards.completed_at >= :since AND boards.completed_at < :until AND boards.board_id IN (
    SELECT coalesce(reviews.board_id, inspections.board_id)
    FROM reviews LEFT JOIN inspections ON inspections.inspection_id = reviews.inspection_id
    WHERE reviews.at >= :since
)
"""
_FINDINGS = """
SELECT inspection_id, component, designator, verdict, defect, reason, image_path
FROM inspections WHERE board_id = :board_id AND verdict IN ('fail', 'unknown', 'review') ORDER BY inspection_id
"""
_BOXES = "SELECT label, confidence, x1, y1, x2, y2 FROM detections WHERE inspection_id = :id ORDER BY confidence DESC"
_FAILED = f"""
SELECT board_type, failed FROM boards WHERE verdict = 'fail' AND completed_at >= :since
ORDER BY completed_at DESC LIMIT {_MAX_FAILED_BOARDS}
"""  # noqa: S608 - our own number
_NEWEST_IMAGE = "SELECT accepted_at FROM inspections ORDER BY inspection_id DESC LIMIT 1"
_BEGINNINGS = f"SELECT first_seen_at FROM boards ORDER BY board_id DESC LIMIT {_PAUSE_BOARDS}"  # noqa: S608


class VerdictCounter:
    """Counts verdicts by minute, each once by `seq`: counting the day anew would take ever longer. Any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._seq: dict[str, int] = {}
        self._minutes: dict[str, dict[str, Counter[str]]] = {table: {} for table in _TABLES}
        #: False while rows from before the start are still being counted.
        self.is_whole = False

    def look(self, now_s: float) -> None:
        since = utc_text(now_s - _WINDOW_S)
        with self._lock:
            if not self._seq:
                self._seq = {table: self._first_seq(table, since) - 1 for table in _TABLES}
            whole = [self._count(table) for table in _TABLES]  # `all` would stop at the first that is not
            self.is_whole = all(whole)
            for table, minutes in self._minutes.items():
                self._minutes[table] = {minute: counts for minute, counts in minutes.items() if minute >= since[:16]}

    def verdicts(self, table: str, span: Span) -> Counter[str]:
        with self._lock:
            minutes = self._minutes[table]
            total: Counter[str] = Counter()
            for minute, counts in minutes.items():
                if span.since <= f"{minute}:00.000Z" < span.until:
                    total.update(counts)
            return total

    def _count(self, table: str) -> bool:
        last = self._database.number(_LAST.format(table=table))
        sql = _COUNT.format(table=table, only=_TABLES[table])
        for _ in range(_STEPS_AT_ONCE):
            after = self._seq[table]
            if after >= last:
                return True
            until = min(after + _STEP, last)
            for row in self._database.rows(sql, {"after": after, "until": until}, limit=_STEP):
                self._minutes[table].setdefault(row.minute, Counter())[row.verdict] += row.number
            self._seq[table] = until
        return self._seq[table] >= last

    def _first_seq(self, table: str, since: str) -> int:
        """Bisect: rows are numbered in the order of their completion."""
        low, high = 0, self._database.number(_LAST.format(table=table)) + 1
        while low < high:
            middle = (low + high) // 2
            row = self._database.first(_FROM.format(table=table), seq=middle)
            if row is None or row.completed_at >= since:
                high = middle
            else:
                low = row.seq + 1
        return low


def first_pass_yield(verdicts: Mapping[str, int]) -> float | None:
    closed = sum(verdicts.values())
    return verdicts.get("pass", 0) / closed if closed else None


def passed_by_review(database: Database, day: Span) -> int | None:
    """Return how many more first attempts passed after review (negative: fewer); None if none was reviewed."""
    row = database.first(_PASSED_BY_REVIEW, since=day.since, until=day.until)
    return None if row is None or row[0] is None else int(row[0])


def yield_charts(
    counter: VerdictCounter, clock: PlantTime, goal: float | None, now_s: float
) -> list[tuple[str, BarChart]]:
    """Return charts, with their titles, of the last hours, and of the last shifts if there are any."""
    now = utc_text(now_s)
    hours = clock.hours(Span(utc_text(now_s - _HOURS * 3600), now))[1:]  # the first is not whole
    parts: dict[str, list[tuple[str, Span]]] = {
        "Yield by hour": [(clock.text(hour.since, "time")[:2], hour) for hour in hours]
    }
    shifts = clock.shifts(Span(utc_text(now_s - _WINDOW_S), now))
    whole = [shift for shift in shifts if shift.since >= utc_text(now_s - _WINDOW_S)]
    if whole:
        parts["Yield by shift"] = [(shift.name, shift) for shift in whole[-_SHIFTS:]]

    def chart(spans: Sequence[tuple[str, Span]]) -> BarChart:
        bars = [_yield_bar(name, counter.verdicts("boards", span), goal) for name, span in spans]
        return BarChart(bars, most=1.0, goal=goal, wide=WIDE // 2)

    return [(title, chart(spans)) for title, spans in parts.items()]


def _yield_bar(name: str, verdicts: Counter[str], goal: float | None) -> Bar:
    share, boards = first_pass_yield(verdicts), counted(verdicts.total(), "board")
    if share is None:
        return Bar(name, None, "", f"{name}: no boards closed", "open")
    tone = "accent" if goal is None else "pass" if share >= goal else "fail"
    below = "▼" if goal is not None and share < goal else ""
    return Bar(name, share, f"{below}{100 * share:.0f}", f"{name}: {100 * share:.1f} % of {boards} passed", tone)


def last_board(database: Database) -> dict[str, Any] | None:
    """Return the `board` that closed last, its final `verdict`, and `decided_by`, a person or the daemon.

    `findings` are its images that did not pass, the worst first; `shown` is the first of them with a picture.
    """
    board = database.first(_LAST_BOARD)
    if board is None:
        return None
    final, findings = None, []
    if board.inspected <= _MAX_SEARCHED_IMAGES:
        final = final_verdicts(database, [board.board_id]).get(board.board_id)
        findings = database.rows(_FINDINGS, {"board_id": board.board_id}, limit=_MAX_FINDINGS)
        findings.sort(key=lambda row: ("fail", "unknown", "review").index(row.verdict))
    shown = next((row for row in findings if row.image_path), None)
    return {
        "board": board,
        "verdict": final.verdict if final else board.verdict,
        "decided_by": final.decided_by if final else "daemon",
        "findings": findings,
        "shown": shown,
        "boxes": database.rows(_BOXES, {"id": shown.inspection_id}, limit=50) if shown else [],
        "missing": json_rows(board.missing),
    }


def fails_now(database: Database, rules: StoredRules, since: str) -> tuple[list[Any], list[Any]]:
    """Return the most frequent defects and positions of boards failed since then, as (name, boards)."""
    defects: Counter[str] = Counter()
    positions: Counter[str] = Counter()
    for board in database.rows(_FAILED, {"since": since}, limit=_MAX_FAILED_BOARDS):
        failed = json_rows(board.failed)
        defects.update({rules.defect(one.get("defect")) or "no code" for one in failed})
        positions.update({f"{one.get('designator', '?')} on {board.board_type}" for one in failed})
    return defects.most_common(_MAX_LISTED), positions.most_common(_MAX_LISTED)


def silence(database: Database, now_s: float) -> tuple[float, float] | None:
    """Return seconds without an image and the usual pause between boards; None if that is not unusual."""
    newest = database.first(_NEWEST_IMAGE)
    begun = [wall_seconds(row.first_seen_at) for row in database.rows(_BEGINNINGS, limit=_PAUSE_BOARDS)]
    return unusual_silence(begun, wall_seconds(newest.accepted_at) if newest else None, now_s)


def unusual_silence(boards_s: Sequence[float], newest_s: float | None, now_s: float) -> tuple[float, float] | None:
    """Return the seconds since `newest_s` and the usual pause between `boards_s`; None if that is usual.

    Unusual is over five times the 90th percentile and five minutes. A line without images for eight hours is off.
    """
    pauses = sorted(pause for pause in (b - a for a, b in pairwise(sorted(boards_s))) if pause <= _BREAK_S)
    if newest_s is None or not pauses:
        return None
    usual_s = pauses[len(pauses) * 9 // 10]
    silent_s = now_s - newest_s
    limit_s = min(max(_MIN_SILENCE_S, _SILENCE_FACTOR * usual_s), _BREAK_S)
    return (silent_s, usual_s) if limit_s <= silent_s <= _OFF_S else None
