"""The page Line: the last board's verdict, yield, the failures of now, and problems of the line itself.

To add an alarm, write a function from control's `status` to alarms and add it to ALARM_SOURCES.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from daemon.config.plant_time import PlantTime, Span
from daemon.dashboard.pages.board import BOARDS, final_verdicts, json_rows, listed
from daemon.dashboard.pages.drawings import WIDE, Bar, BarChart
from daemon.dashboard.pages.experts import ExpertOverview
from daemon.dashboard.pages.machine import duration
from daemon.dashboard.site.database import CachedAnswer, Database, NoDatabase, TooMuchToCount, ask_or
from daemon.dashboard.site.site import Site
from daemon.dashboard.site.stored_rules import StoredRules
from daemon.storage.disk_space import DiskSpace, places
from daemon.units import counted, size_text, utc_text, wall_seconds
from daemon.wire.control import ControlError

_NEWEST_BOARDS = 30
#: Open boards whose images are counted at each refresh; a line works at a few.
_MAX_OPEN_COUNTED = 8
_MAX_NAMES = 3
#: A consumer that is further behind than this raises an alarm.
_MAX_BEHIND = 1000
#: A disk with less free than this share raises an alarm long before intake must refuse images.
_TIGHT = 0.05
#: Seconds for which charts and alarms that read rows are cached, for all readers.
_FIGURES_S, _WATCH_S = 5.0, 2.0
_HOUR_S = 3600.0
#: Images whose components are counted on a line without experts.
_COLLECTED_IMAGES = 5000

_BOARDS = f"{BOARDS} ORDER BY board_id DESC LIMIT {_NEWEST_BOARDS}"
_JUDGED = "SELECT count(*) FROM inspections WHERE board_id = :board_id AND status = 'done'"
_COLLECTED = """
SELECT count(DISTINCT component) FROM inspections WHERE reason = 'no_expert' AND inspection_id > :after
"""

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
#: Boards whose median interval is taken; a last verdict older than this many intervals, and seconds, is old.
_AGE_BOARDS, _AGE_FACTOR, _MIN_AGE_S = 21, 10.0, 10.0

_LAST = "SELECT max(seq) FROM {table}"
_FROM = "SELECT seq, completed_at FROM {table} WHERE seq >= :seq ORDER BY seq"
_COUNT = """
SELECT substr(completed_at, 1, 16) AS minute, verdict, count(*) AS number FROM {table}
WHERE seq > :after AND seq <= :until {only}
GROUP BY substr(completed_at, 1, 16), verdict
"""
_LAST_BOARD = f"{BOARDS} WHERE boards.seq IS NOT NULL ORDER BY boards.seq DESC LIMIT 1"
_CLOSED = f"SELECT completed_at FROM boards WHERE seq IS NOT NULL ORDER BY seq DESC LIMIT {_AGE_BOARDS}"  # noqa: S608
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

Status = Mapping[str, Any]


def router(site: Site) -> APIRouter:
    routes = APIRouter()
    page = _LinePage(site)
    site.add_part("andon", "_andon.html", page.andon, "The last board cannot be read now")
    site.add_part("line", "_line.html", page.now, "")
    site.add_part("figures", "_figures.html", page.figures, "The yield cannot be counted now", _FIGURES_S)
    site.add_part("boards", "_boards.html", page.boards, "The boards cannot be read now")

    @routes.get("/")
    def line(request: Request, kiosk: str | None = None) -> HTMLResponse:
        return site.page(request, "line.html", is_kiosk=kiosk is not None, line=site.config.line)

    return routes


class _LinePage:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._counter = VerdictCounter(site.database)
        self._experts = ExpertOverview(site)
        self._watched = CachedAnswer(_WATCH_S, self._watch)
        ask: Callable[[], Mapping[str, Any]] = lambda: ask_or({}, lambda: site.ask_daemon("health"), "health", [])  # noqa: E731
        self._health = CachedAnswer(_WATCH_S, ask)
        self._passed_by_review = CachedAnswer(_FIGURES_S, lambda: passed_by_review(site.database, self._today()))

    def andon(self) -> dict[str, Any]:
        last = last_board(self._site.database)
        shown = last["shown"] if last else None
        closed = [wall_seconds(row.completed_at) for row in self._site.database.rows(_CLOSED, limit=_AGE_BOARDS)]
        age_s = verdict_age(closed, time.time(), is_ready=self._health.get().get("ready", {}).get("ok", False))
        size = self._site.pictures.size(shown.image_path) if shown else None
        age = "at an unknown time" if (age_s or 0) < 0 else f"{duration(age_s)} ago"
        return {"last": last, "age": None if age_s is None else age, "size": size}

    def now(self) -> dict[str, Any]:
        status: Status | ControlError
        try:
            status = {**self._site.status(), **self._watched.get()}
        except ControlError as error:
            status = error
        problem, by_review, now_s = None, None, time.time()
        try:
            self._counter.look(now_s)
            by_review = self._passed_by_review.get()
        except (NoDatabase, TooMuchToCount) as error:
            problem = f"Today's boards and images are not counted: {error}"
        today = self._today()
        boards = self._counter.verdicts("boards", today)
        return {
            "status": {} if isinstance(status, ControlError) else status,
            "alarms": alarms(status),
            "today": today,
            "boards": boards,
            "images": self._counter.verdicts("inspections", today),
            "first_pass_yield": first_pass_yield(boards),
            "final_yield": (boards["pass"] + by_review) / boards.total() if by_review is not None and boards else None,
            "is_whole": self._counter.is_whole,
            "problem": problem,
        }

    def _today(self) -> Span:
        return self._site.plant.days(self._site.today())

    def figures(self) -> dict[str, Any]:
        now_s, goal = time.time(), self._site.config.plant.yield_goal
        shift = self._site.plant.shift_at(now_s)
        self._counter.look(now_s)
        since = shift.since if shift else utc_text(now_s - _HOUR_S)
        defects, positions = fails_now(self._site.database, self._site.rules, since)
        today = first_pass_yield(self._counter.verdicts("boards", self._today()))
        return {
            "today": today,
            "is_below": today is not None and goal is not None and today < goal,
            "charts": yield_charts(self._counter, self._site.plant, goal, now_s),
            "goal": goal,
            "when": f"this shift ({shift.name})" if shift else "in the last hour",
            "defects": defects,
            "positions": positions,
        }

    def boards(self) -> dict[str, Any]:
        database = self._site.database
        boards = database.rows(_BOARDS, limit=_NEWEST_BOARDS)
        open_ids = [board.board_id for board in boards if board.verdict is None][:_MAX_OPEN_COUNTED]
        judged = {board_id: database.number(_JUDGED, board_id=board_id) for board_id in open_ids}
        return {"rows": listed(database, boards), "judged": judged}

    def _watch(self) -> dict[str, Any]:
        site, config, unknown = self._site, self._site.config, list[str]()
        health = self._health.get()
        return {
            "drifted": self._experts.drifted(),
            "unusable": ask_or([], self._experts.unusable, "experts", unknown),
            "collecting": ask_or(0, self._collected, "components", unknown),
            "silent": ask_or(None, lambda: silence(site.database, time.time()), "images", unknown),
            "disks": DiskSpace(places(config)).look(),
            "ready": health.get("ready", {}).get("text", ""),
            "rejected": health.get("rejected", ()),
        }

    def _collected(self) -> int:
        after = self._site.database.id_before_newest(_COLLECTED_IMAGES)
        return 0 if self._experts.is_any_known() else self._site.database.number(_COLLECTED, after=after)


# Figures: yield by hour and shift, the last board, what fails now, cameras that send nothing


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
    """Return the `board` that closed last, its final `verdict`, and by whom (`final`, a row of `final_verdicts`).

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
        "final": final,
        "findings": findings,
        "shown": shown,
        "boxes": database.rows(_BOXES, {"id": shown.inspection_id}, limit=50) if shown else [],
        "missing": json_rows(board.missing),
    }


def verdict_age(closed_s: Sequence[float], now_s: float, *, is_ready: bool) -> float | None:
    """Return the seconds since the newest board if over ten usual intervals, or the line is not ready; else None.

    A negative age means that the clock was set back.
    """
    if not closed_s:
        return None
    age_s = now_s - closed_s[0]
    usual_s = median([abs(later - earlier) for later, earlier in pairwise(closed_s)] or [_MIN_SILENCE_S])
    is_new = -_MIN_AGE_S <= age_s <= max(_AGE_FACTOR * usual_s, _MIN_AGE_S)
    return None if is_ready and is_new else age_s


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


# Alarms


@dataclass(frozen=True, slots=True)
class LineAlarm:
    """A `trouble` stops images or verdicts; a `notice` does not."""

    level: Literal["trouble", "notice"]
    title: str
    remedy: str
    #: Of an alarm of the rules: its images, and since when it is active.
    images: Sequence[Mapping[str, Any]] = ()
    since: str | None = None


def alarms(status: Status | ControlError) -> list[LineAlarm]:
    if isinstance(status, ControlError):
        return [LineAlarm("trouble", f"The daemon does not answer: {status.reason}", "systemctl status coserve")]
    raised = [alarm for source in ALARM_SOURCES for alarm in source(status)]
    return sorted(raised, key=lambda alarm: alarm.level != "trouble")


def _state_alarms(status: Status) -> Iterable[LineAlarm]:
    state, last_error = status.get("state"), status.get("last_error")
    if state == "degraded":
        ready = str(status.get("ready") or "").removeprefix("degraded").lstrip(": ")
        for problem in (unusable := status.get("unusable", ())):  # these have alarms of their own
            ready = ready.replace(f"expert {problem}", "")
        ready = "; ".join(filter(None, ready.split("; ")))
        if ready or not unusable:
            yield LineAlarm("trouble", ready or str(last_error or "The line is degraded."), "coserve status says more")
    elif state == "draining":
        remedy = "coserve drain --off accepts images again"
        yield LineAlarm("notice", "The line is draining: it accepts no new images.", remedy)
    elif state == "starting":
        title = "The line is starting: its experts are being loaded."
        yield LineAlarm("notice", title, "Images are judged meanwhile.")
    if clock := status.get("clock"):
        yield LineAlarm("trouble", clock, "Set it by the network: timedatectl set-ntp true; coserve doctor.")
    if files := status.get("files"):
        yield LineAlarm("notice", files, f"Images are judged by edition {status.get('edition')}.")


def _camera_alarms(status: Status) -> Iterable[LineAlarm]:
    for row in status.get("rejected", ())[:_MAX_NAMES]:
        count = counted(row["images"], "image")
        source, code = row["source"] or "An unknown source", row["code"].replace("_", " ")
        title = f"{source}: {count} rejected in the last hour ({code})."
        yield LineAlarm("notice", title, f"Newest reason: {row['reason']}")
    if status.get("silent") and status.get("state") in ("ready", "degraded"):
        silent_s, usual_s = status["silent"]
        title = f"No image for {duration(silent_s)}: boards usually come within {duration(usual_s)} of each other."
        yield LineAlarm("notice", title, "Look at the conveyor, the scanner and the camera program.")


def _rule_alarms(status: Status) -> Iterable[LineAlarm]:
    for row in status.get("alarms", ()):
        remedy = row.get("remedy") or f"Alarm {row['alarm']} of the rules."
        yield LineAlarm("notice", f"{row['text']}.", remedy, row["images"], row["since"])


def _expert_alarms(status: Status) -> Iterable[LineAlarm]:
    """Warn of weights that are missing or damaged, components without an expert, and drift from training."""
    problems, count, names = status.get("unusable", ()), status.get("collecting", 0), status.get("drifted", ())
    if problems:
        more = f" (and {len(problems) - 1} more: see Experts)" if len(problems) > 1 else ""
        yield LineAlarm("trouble", f"{problems[0]}{more}", "coserve check; put the file back, then coserve reload")
    if count:
        verb = "has" if count == 1 else "have"
        title = f"This line collects: {counted(count, 'component type')} {verb} no expert yet."
        yield LineAlarm("notice", title, "coserve dataset export, then coserve train classifier; see Experts.")
    if names:
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        verb = "answers" if len(names) == 1 else "answer"
        title = f"Drift: {', '.join(names[:_MAX_NAMES])}{more} {verb} with another confidence than in training."
        yield LineAlarm("notice", title, "Check light, lens and parts; coserve experts show NAME; train again.")


def _disk_alarms(status: Status) -> Iterable[LineAlarm]:
    tight = {space.disk: (name, space) for name, space in reversed(status.get("disks", {}).items())
             if space.free_bytes < _TIGHT * space.total_bytes}  # fmt: skip
    for name, space in tight.values():
        title = f"The disk of the {name} has only {size_text(space.free_bytes)} free."
        yield LineAlarm("notice", title, "Delete what is not needed, or set retention.images_for; see Machine.")


def _process_alarms(status: Status) -> Iterable[LineAlarm]:
    for child in status.get("children", ()):
        if child.get("state") in ("waiting", "hung"):
            end = f" ({child['last_end']})" if child.get("last_end") else ""
            title = f"{child.get('name')} is not running{end}; it is restarted automatically."
            yield LineAlarm("notice", title, "The log says why.")
    for consumer in status.get("consumers", ()):
        name, state, behind = consumer.get("name"), consumer.get("state"), consumer.get("behind") or 0
        error, missed = consumer.get("last_error"), consumer.get("missed")
        if missed:
            title = f"Consumer {name} missed {counted(missed, 'result')}: pruned before delivery."
            remedy = "Keep results longer (retention.results_for), or remove what delays the consumer sooner."
            yield LineAlarm("notice", title, remedy)
        if error or state in ("refused", "waiting"):
            why = f": {error}" if error else ""
            backlog = f", {counted(behind, 'result')} behind" if behind else ""
            yield LineAlarm("notice", f"Consumer {name} is {state}{backlog}{why}", _CATCHES_UP)
        elif behind > _MAX_BEHIND:
            yield LineAlarm("notice", f"Consumer {name} is {counted(behind, 'result')} behind.", _CATCHES_UP)


_CATCHES_UP = "It catches up automatically, as far back as results are kept (retention.results_for)."
ALARM_SOURCES: Sequence[Callable[[Status], Iterable[LineAlarm]]] = (
    _state_alarms,
    _rule_alarms,
    _expert_alarms,
    _camera_alarms,
    _disk_alarms,
    _process_alarms,
)
