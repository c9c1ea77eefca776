"""The page Line: the last board's verdict, yield, the failures of now, and problems of the line itself.

To add an alarm, write a function from control's `status` to alarms and add it to ALARM_SOURCES.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from daemon.config.plant_time import Span
from daemon.dashboard.pages.andon import (
    VerdictCounter,
    fails_now,
    first_pass_yield,
    last_board,
    passed_by_review,
    silence,
    yield_charts,
)
from daemon.dashboard.pages.board import BOARDS, listed
from daemon.dashboard.pages.experts import ExpertOverview
from daemon.dashboard.pages.machine import duration
from daemon.dashboard.site.database import CachedAnswer, NoDatabase, TooMuchToCount, ask_or
from daemon.dashboard.site.site import Site
from daemon.storage.disk_space import DiskSpace, places
from daemon.units import counted, size_text, utc_text
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
    """Values for the live parts."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._counter = VerdictCounter(site.database)
        self._experts = ExpertOverview(site)
        self._watched = CachedAnswer(_WATCH_S, self._watch)
        self._passed_by_review = CachedAnswer(_FIGURES_S, lambda: passed_by_review(site.database, self._today()))

    def andon(self) -> dict[str, Any]:
        last = last_board(self._site.database)
        shown = last["shown"] if last else None
        return {"last": last, "size": self._site.pictures.size(shown.image_path) if shown else None}

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
        health: Mapping[str, Any] = ask_or({}, lambda: site.ask_daemon("health"), "health", unknown)
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
        yield LineAlarm("trouble", ready or str(last_error or "The line is degraded."), "coserve status says more")
    elif state == "draining":
        remedy = "coserve drain --off accepts images again"
        yield LineAlarm("notice", "The line is draining: it accepts no new images.", remedy)
    elif state == "starting":
        title = "The line is starting: its experts are being loaded."
        yield LineAlarm("notice", title, "Images are judged meanwhile.")
    if files := status.get("files"):
        yield LineAlarm("notice", files, f"Images are judged by edition {status.get('edition')}.")


def _camera_alarms(status: Status) -> Iterable[LineAlarm]:
    """Warn of rejected images, and of none when boards usually come."""
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
        yield LineAlarm("notice", f"{row['text']}.", f"Alarm {row['alarm']} of the rules.", row["images"], row["since"])


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
    """Warn of disks that will soon be full; full ones make the line degraded."""
    tight = {space.disk: (name, space) for name, space in reversed(status.get("disks", {}).items())
             if space.free_bytes < _TIGHT * space.total_bytes}  # fmt: skip
    for name, space in tight.values():
        title = f"The disk of the {name} has only {size_text(space.free_bytes)} free."
        yield LineAlarm("notice", title, "Delete what is not needed, or set retention.images_for; see Machine.")


def _process_alarms(status: Status) -> Iterable[LineAlarm]:
    """Warn of processes beside the daemon that do not run or deliver; the line goes on without them."""
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
