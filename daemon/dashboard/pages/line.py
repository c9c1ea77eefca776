"""The page Line: state, alarms, today's numbers, and the boards as they come.

Alarms say what needs a person now and what to do about it. They are made from control's `status`, with the experts that
drift added as `drifted`. To add an alarm, write a function from the status to alarms and add it to ALARM_SOURCES.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from daemon.dashboard.pages.board import failures
from daemon.dashboard.pages.experts import ExpertOverview
from daemon.dashboard.site.database import Database, NoDatabase, TooMuchToCount
from daemon.dashboard.site.site import Site
from daemon.wire.control import ControlError

_NEWEST_BOARDS = 30
#: Open boards whose images are counted at each look; a line works at a few.
_MAX_OPEN_COUNTED = 8
#: Rows are counted in steps of so many numbers, each a short question, and in so many steps at each look.
_STEP = 50_000
_STEPS_AT_ONCE = 4
#: Experts that an alarm names.
_MAX_NAMES = 3
#: A consumer that is further behind than this raises an alarm.
_MAX_BEHIND = 1000

_LAST = "SELECT max(seq) FROM {table}"
_FROM = "SELECT seq, completed_at FROM {table} WHERE seq >= :seq ORDER BY seq"
_COUNT = """
SELECT verdict, count(*) AS number FROM {table}
WHERE seq > :after AND seq <= :until AND completed_at >= :since {only}
GROUP BY verdict
"""
_BOARDS = f"""
SELECT board_id, board_type, serial, attempt, lot, station, first_seen_at, completed_at, expected, inspected, verdict,
       reason, failed
FROM boards ORDER BY board_id DESC LIMIT {_NEWEST_BOARDS}
"""  # noqa: S608 - our own number
_JUDGED = "SELECT count(*) FROM inspections WHERE board_id = :board_id AND status = 'done'"

Status = Mapping[str, Any]


def router(site: Site) -> APIRouter:
    routes = APIRouter()
    today, experts = TodayCounter(site.database), ExpertOverview(site)

    def now() -> str:
        return _now(site, today, experts)

    def boards() -> str:
        return _boards(site)

    site.live.add("line", now)
    site.live.add("boards", boards)

    @routes.get("/")
    def line(request: Request) -> HTMLResponse:
        return site.page(request, "line.html", now=now(), boards=boards())

    return routes


def _now(site: Site, today: "TodayCounter", experts: ExpertOverview) -> str:
    """Render state, alarms and today's numbers."""
    status: Status | ControlError
    try:
        status = {**site.status(), "drifted": experts.drifted()}
    except ControlError as error:
        status = error
    day, problem = DayCounts(""), None
    try:
        day = today.counts(site.day_began())
    except (NoDatabase, TooMuchToCount) as error:
        problem = f"Today's boards and images are not counted: {error}"
    return site.render(
        "_line.html",
        status={} if isinstance(status, ControlError) else status,
        alarms=alarms(status),
        day=day,
        problem=problem,
    )


def _boards(site: Site) -> str:
    """Render the newest boards; of open ones, with how many of their images are judged."""
    try:
        boards = site.database.rows(_BOARDS, limit=_NEWEST_BOARDS)
        open_ids = [board.board_id for board in boards if board.verdict is None][:_MAX_OPEN_COUNTED]
        judged = {board_id: site.database.number(_JUDGED, board_id=board_id) for board_id in open_ids}
    except (NoDatabase, TooMuchToCount) as error:
        return site.render("_problem.html", title="The boards cannot be read now", remedy=str(error))
    return site.render("_boards.html", rows=[(board, failures(board)) for board in boards], judged=judged)


# Today's numbers


@dataclass(slots=True)
class DayCounts:
    """Verdicts since the day began. `is_whole` is False until the counting of rows before the start has caught up."""

    since: str
    boards: Counter[str] = field(default_factory=Counter)
    images: Counter[str] = field(default_factory=Counter)
    is_whole: bool = False

    @property
    def first_pass_yield(self) -> float | None:
        """Return the share of boards that passed, of all that were closed at their first attempt."""
        closed = sum(self.boards.values())
        return self.boards["pass"] / closed if closed else None


class TodayCounter:
    """Counts today's verdicts, for any thread. Counting the whole day at each look would cost more as the day goes on.

    Rows get their `seq` once, in order, and never change their verdict after it: each is counted once.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._day = DayCounts("")
        self._seq = {"boards": 0, "inspections": 0}

    def counts(self, since: str) -> DayCounts:
        """Return the counts of the day that began at `since`, which is today; NoDatabase or TooMuchToCount."""
        with self._lock:
            if self._day.since != since:
                self._seq = {table: self._first_seq(table, since) - 1 for table in self._seq}
                self._day = DayCounts(since)
            whole = [
                self._count("boards", self._day.boards, "AND attempt = 1"),
                self._count("inspections", self._day.images, ""),
            ]
            return DayCounts(since, Counter(self._day.boards), Counter(self._day.images), all(whole))

    def _count(self, table: str, counts: Counter[str], only: str) -> bool:
        """Add the rows that are new, and return True once all are counted."""
        last = self._database.number(_LAST.format(table=table))
        for _ in range(_STEPS_AT_ONCE):
            after = self._seq[table]
            if after >= last:
                return True
            until = min(after + _STEP, last)
            values = {"after": after, "until": until, "since": self._day.since}
            for row in self._database.rows(_COUNT.format(table=table, only=only), values, limit=10):
                counts[row.verdict] += row.number
            self._seq[table] = until
        return self._seq[table] >= last

    def _first_seq(self, table: str, since: str) -> int:
        """Return the first `seq` of the day by bisection: rows are numbered in the order of their completion."""
        low, high = 0, self._database.number(_LAST.format(table=table)) + 1
        while low < high:
            middle = (low + high) // 2
            row = self._database.first(_FROM.format(table=table), seq=middle)
            if row is None or row.completed_at >= since:
                high = middle
            else:
                low = row.seq + 1
        return low


# Alarms


@dataclass(frozen=True, slots=True)
class LineAlarm:
    """A `trouble` stops images or verdicts of the line; a `notice` does not."""

    level: Literal["trouble", "notice"]
    title: str
    remedy: str


def alarms(status: Status | ControlError) -> list[LineAlarm]:
    """Return all alarms: troubles first, then in the order of ALARM_SOURCES."""
    if isinstance(status, ControlError):
        return [LineAlarm("trouble", f"The daemon does not answer: {status.reason}", "systemctl status coserve")]
    raised = [alarm for source in ALARM_SOURCES for alarm in source(status)]
    return sorted(raised, key=lambda alarm: alarm.level != "trouble")


def _state_alarms(status: Status) -> Iterable[LineAlarm]:
    state, last_error = status.get("state"), status.get("last_error")
    if state == "degraded":
        yield LineAlarm("trouble", str(last_error or "The line is degraded."), "coserve status says more")
    elif state == "draining":
        remedy = "coserve drain --off accepts images again"
        yield LineAlarm("notice", "The line is draining: it accepts no new images.", remedy)
    elif state == "starting":
        title = "The line is starting: its experts are being loaded."
        yield LineAlarm("notice", title, "Images are judged meanwhile.")


def _child_alarms(status: Status) -> Iterable[LineAlarm]:
    """Processes beside the line that do not run: the line goes on without them."""
    for child in status.get("children", ()):
        if child.get("state") in ("waiting", "hung"):
            end = f" ({child['last_end']})" if child.get("last_end") else ""
            title = f"{child.get('name')} is not running{end}; it is restarted automatically."
            yield LineAlarm("notice", title, "The log says why.")


def _consumer_alarms(status: Status) -> Iterable[LineAlarm]:
    """Consumers of the results that are behind or refused."""
    for consumer in status.get("consumers", ()):
        name, state, behind = consumer.get("name"), consumer.get("state"), consumer.get("behind") or 0
        error, missed = consumer.get("last_error"), consumer.get("missed")
        if missed:
            remedy = "Keep results longer (retention.results_for), or remove what delays the consumer sooner."
            yield LineAlarm("notice", f"Consumer {name} missed {missed:,} results: they were pruned before.", remedy)
        if error or state in ("refused", "waiting"):
            why = f": {error}" if error else ""
            backlog = f", {behind:,} results behind" if behind else ""
            yield LineAlarm("notice", f"Consumer {name} is {state}{backlog}{why}", _CATCHES_UP)
        elif behind > _MAX_BEHIND:
            yield LineAlarm("notice", f"Consumer {name} is {behind:,} results behind.", _CATCHES_UP)


def _drift_alarms(status: Status) -> Iterable[LineAlarm]:
    """Experts whose confidence has drifted from training: images are judged as before."""
    names = status.get("drifted", ())
    if names:
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        verb = "answers" if len(names) == 1 else "answer"
        title = f"Drift: {', '.join(names[:_MAX_NAMES])}{more} {verb} with another confidence than in training."
        yield LineAlarm("notice", title, "Check light, lens and parts; coserve experts show NAME; train again.")


_CATCHES_UP = "It catches up automatically, as far back as results are kept (retention.results_for)."
ALARM_SOURCES: Sequence[Callable[[Status], Iterable[LineAlarm]]] = (
    _state_alarms,
    _child_alarms,
    _consumer_alarms,
    _drift_alarms,
)
