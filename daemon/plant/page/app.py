"""The plant's pages as an application: lines, boards of all lines, the history of one serial, defects, events."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from sqlalchemy import Row
from starlette.exceptions import HTTPException

from daemon.dashboard.pages.line import unusual_silence
from daemon.dashboard.pages.machine import duration
from daemon.dashboard.site.access import AccessGuard, Keyring
from daemon.dashboard.site.database import CachedAnswer, Database
from daemon.dashboard.site.live import LiveTopics
from daemon.dashboard.site.site import PageShell, SearchText
from daemon.dashboard.site.web_app import web_app
from daemon.plant.hub import Hub, picture
from daemon.plant.reading import open_hub_for_reading
from experts.catalog import Digest
from routing_rules.defects import defect_in_words

NAVIGATION = (("/", "Plant", "l"), ("/boards", "Boards", "b"), ("/defects", "Defects", "d"))
_RANGES = {"today": 1, "7d": 7, "30d": 30}
#: Seconds from one rendering of a live part to the next, for all readers together.
_LIVE_S = 5.0
#: Seconds for which names of defects are kept, and how many are read.
_NAMES_S, _MAX_NAMES = 30.0, 10_000
_NOT_READ = "The hub's database cannot be read now; the lines go on"
_SHORT_LIST = 10
_LISTED_DEFECTS = 200
LIST_BOARDS = 100
MAX_EVENTS = 50
#: Limits of the attempts at one serial on all lines, and of the findings of one attempt.
_MAX_ATTEMPTS = 50
_MAX_FINDINGS = 100
MAX_LINES = 1000

LINE_NAMES = "SELECT line FROM lines ORDER BY line"
#: Each line with its images and first attempts today and in seven days, and the ends of its last boards.
_LINES = """
SELECT l.line, l.last_at, l.last_seen, y.*, boards_passed / nullif(boards, 0.0) AS share,
       week_passed / nullif(week_boards, 0.0) AS week_share,
       ARRAY(SELECT CAST(extract(epoch FROM at) AS float8) FROM boards AS b
             WHERE b.line = l.line ORDER BY at DESC LIMIT 60) AS ends
FROM lines AS l CROSS JOIN LATERAL (
    SELECT coalesce(sum(inspected) FILTER (WHERE hour >= CAST(:day AS timestamptz)), 0) AS images,
           coalesce(sum(failed) FILTER (WHERE hour >= CAST(:day AS timestamptz)), 0) AS failed,
           coalesce(sum(review) FILTER (WHERE hour >= CAST(:day AS timestamptz)), 0) AS review,
           coalesce(sum(unknown) FILTER (WHERE hour >= CAST(:day AS timestamptz)), 0) AS unknown,
           coalesce(sum(first_boards) FILTER (WHERE hour >= CAST(:day AS timestamptz)), 0) AS boards,
           sum(first_passed) FILTER (WHERE hour >= CAST(:day AS timestamptz)) AS boards_passed,
           sum(first_boards) AS week_boards, sum(first_passed) AS week_passed
    FROM yields_by_hour AS y WHERE y.line = l.line AND hour >= CAST(:week AS timestamptz)
) AS y ORDER BY l.line
"""
#: Defects since then, as the lines judged, the most frequent first, with the count on each line.
DEFECTS = """
SELECT defect, component, sum(fails) AS fails, string_agg(line || ' ' || fails, ', ' ORDER BY fails DESC, line) AS lines
FROM (
    SELECT defect, component, line, sum(count) AS fails FROM defects_by_hour
    WHERE hour >= CAST(:since AS timestamptz) GROUP BY defect, component, line
) AS by_line
GROUP BY defect, component ORDER BY 3 DESC, defect, component
"""
EVENTS = "SELECT event_id, line, at, kind, text FROM events ORDER BY event_id DESC"
#: `decision` is the newest one, of `decided_by` about one of the images, where the board's verdict is another.
_BOARDS = """
SELECT b.line, b.epoch, b.seq, b.at, b.board_type, b.board_serial, b.attempt, b.lot, b.station, b.verdict,
       b.final_verdict, b.decided_by, (
    SELECT decision.verdict || ' for ' || decision.designator FROM board_decisions AS decision
    WHERE (line, board_epoch, board_type, board_serial, attempt, reviewer, at)
        = (b.line, b.epoch, b.board_type, b.board_serial, b.attempt, b.decided_by, b.decided_at)
      AND decision.verdict <> b.final_verdict LIMIT 1
) AS decision
FROM lines CROSS JOIN LATERAL (
    SELECT * FROM final_boards AS b WHERE b.line = lines.line {condition} ORDER BY at DESC LIMIT {limit}
) AS b
WHERE CAST(:line AS text) = '' OR lines.line = :line
ORDER BY b.at {order}, b.line, b.seq LIMIT {limit}
"""
_HAS_SERIAL = "AND board_serial = :serial"
_BEGINS = 'AND board_serial COLLATE "C" >= :serial AND board_serial COLLATE "C" < :behind'
#: Images of one attempt that did not pass, or that a person decided.
_FINDINGS = """
SELECT i.designator, i.component, i.at, i.reason, i.verdict AS verdict_by_line, p.sha256,
       i.final_verdict AS verdict, i.final_defect AS defect
FROM final_images AS i
LEFT JOIN pictures AS p ON p.line = i.line AND p.epoch = i.epoch AND p.seq = i.seq AND p.state = 'stored'
WHERE i.line = :line AND i.epoch = :epoch AND i.board_type = :board_type AND i.board_serial = :serial
  AND i.attempt = :attempt AND (i.verdict <> 'pass' OR i.decided_at IS NOT NULL)
ORDER BY array_position(ARRAY['fail', 'unknown', 'review', 'pass'], i.final_verdict), i.seq
"""
_DECISIONS = """
SELECT at, reviewer, verdict, defect, designator, note FROM board_decisions
WHERE line = :line AND board_epoch = :epoch AND board_type = :board_type AND board_serial = :serial
  AND attempt = :attempt ORDER BY at, seq
"""
_DEFECT_NAMES = "SELECT DISTINCT n.code, n.name FROM lines, jsonb_each_text(defects) AS n(code, name) ORDER BY 1, 2"


class PlantSite(PageShell):
    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        database = Database(hub.engine.url.render_as_string(hide_password=False), open_hub_for_reading)
        folder = Path(__file__).parent / "templates"
        clock, has_token = hub.settings.plant, hub.token is not None
        super().__init__(database, clock, NAVIGATION, self.defect, folder, has_token=has_token)
        self._defect_names = CachedAnswer(_NAMES_S, self.read_defect_names).get
        self.templates.globals["serial_path"] = serial_path

    def defect(self, code: str | None) -> str:
        """Name a defect as the lines' rules do: `bridge (D207)`, with both names where two lines differ."""
        return defect_in_words(code, self._defect_names()) if code else ""

    def read_defect_names(self) -> dict[str, str]:
        names: dict[str, str] = {}
        for row in self.database.rows(_DEFECT_NAMES, limit=_MAX_NAMES):
            names[row.code] = f"{names[row.code]} or {row.name}" if row.code in names else row.name
        return names

    def since(self, days: int) -> str:
        """Return when the plant's last `days` days began, today included, as UTC text."""
        return self.plant.days(self.today() - timedelta(days=days - 1)).since


def plant_pages(hub: Hub, folder: Path) -> tuple[AccessGuard, LiveTopics]:
    """Return the guarded pages and their live parts; the database need not answer yet.

    Logged-out sessions are kept in `folder`. CredentialError if a file cannot be used.
    """
    keyring, site = Keyring(hub.settings.http_token, folder / "logged_out"), PlantSite(hub)
    app = web_app(site, keyring, [router(site)], unaffected="the lines go on")
    return AccessGuard(app, keyring), site.live


def serial_path(board_type: str, serial: str) -> str:
    return f"/serial/{quote(board_type, safe='')}/{quote(serial, safe='')}"


def router(site: PlantSite) -> APIRouter:
    routes = APIRouter()

    def causes(days: int, limit: int) -> dict[str, Any]:
        since = site.since(days)
        return {"since": since, "causes": site.database.rows(DEFECTS, {"since": since}, limit=limit)}

    def lines() -> Mapping[str, Any]:
        days, silent_after_s = (site.since(1), site.since(7)), site.hub.settings.silent_after
        shown = lines_now(site.database, *days, silent_after_s, time.time())
        return {"since": days[0], "goal": site.hub.settings.plant.yield_goal, "lines": shown}

    contexts: dict[str, Callable[[], Mapping[str, Any]]] = {
        "lines": lines,
        "defects": lambda: causes(1, _SHORT_LIST),
        "events": lambda: {"events": site.database.rows(EVENTS, limit=MAX_EVENTS)},
    }
    for name, context in contexts.items():
        answer = CachedAnswer(_LIVE_S, context)
        site.add_part(name, f"_plant_{name}.html", answer.get, _NOT_READ, _LIVE_S)

    @routes.get("/")
    def plant(request: Request) -> HTMLResponse:
        return site.page(request, "plant.html")

    @routes.get("/boards")
    def boards(request: Request, serial: SearchText = "", line: SearchText = "") -> Response:
        rows = find_boards(site.database, serial, line)
        matches = {(row.board_type, row.board_serial) for row in rows}
        if serial and len(matches) == 1:
            return RedirectResponse(serial_path(*matches.pop()), 303)
        shown: dict[str, Any] = {"boards": rows[:LIST_BOARDS], "more": len(rows) > LIST_BOARDS}
        names = site.database.rows(LINE_NAMES, limit=MAX_LINES)
        shown |= {"serial": serial, "line": line, "names": [row.line for row in names]}
        return site.page(request, "plant_boards.html", **shown)

    @routes.get("/defects")
    def defects(request: Request, range: Annotated[Literal["today", "7d", "30d"], Query()] = "7d") -> HTMLResponse:  # noqa: A002 - the address's name
        return site.page(request, "plant_defects.html", range=range, **causes(_RANGES[range], _LISTED_DEFECTS))

    _add_serial(routes, site)
    return routes


def _add_serial(routes: APIRouter, site: PlantSite) -> None:
    @routes.get("/serial/{_:path}")
    def serial(request: Request) -> HTMLResponse:
        names = [unquote(part) for part in request.scope["raw_path"].decode("ascii").split("/")[2:]]
        if len(names) != 2:
            raise HTTPException(404, "expected /serial/TYPE/SERIAL, with %2F for a slash in either")
        board_type, serial = names
        attempts = board_attempts(site.database, board_type, serial)
        if not attempts:
            raise HTTPException(404, f"no line has sent a board {board_type} {serial}: search for its beginning")
        shown: dict[str, Any] = {"attempts": attempts, "lines": {board.line for board, _, _ in attempts}}
        return site.page(request, "plant_serial.html", board_type=board_type, serial=serial, **shown)

    @routes.get("/images/{sha256}")
    def image(sha256: Digest) -> Response:
        return picture(site.hub, sha256)


# Questions, each limited in rows and time


@dataclass(frozen=True, slots=True)
class LineState:
    """A line's state in words, its look (`pass`: connected, `fail`: silent, `review`: no images), and what to do."""

    text: str
    look: Literal["pass", "fail", "review"]
    remedy: str = ""


def lines_now(
    database: Database, day: str, week: str, silent_after_s: float, now_s: float
) -> list[tuple[Row[Any], LineState]]:
    rows = database.rows(_LINES, {"day": day, "week": week}, limit=MAX_LINES)
    lines = [(row, line_state(row.last_seen, row.last_at, row.ends, silent_after_s, now_s)) for row in rows]
    return sorted(lines, key=lambda line: ("fail", "review", "pass").index(line[1].look))


def line_state(
    last_seen: datetime | None, last_at: datetime | None, ends: Sequence[float], silent_after_s: float, now_s: float
) -> LineState:
    if last_seen is None:
        return LineState("never connected", "fail", "Look at coserve status on the line: its consumer says why.")
    away_s = now_s - last_seen.timestamp()
    if away_s > silent_after_s:
        remedy = "The line judges on and sends everything later: look at its PC, its network and coserve status there."
        return LineState(f"silent for {duration(away_s)}", "fail", remedy)
    silence = unusual_silence(ends, last_at.timestamp() if last_at else None, now_s)
    if silence is not None:
        silent_s, usual_s = silence
        remedy = f"Boards usually come within {duration(usual_s)} of each other: look at conveyor, scanner and camera."
        return LineState(f"connected, no image for {duration(silent_s)}", "review", remedy)
    return LineState("connected", "pass")


def find_boards(database: Database, serial: str, line: str) -> list[Row[Any]]:
    """Return the newest boards with this serial, else those whose serial begins with it: one list, and one row more."""
    if not serial:
        return _boards(database, "", line=line)
    return _boards(database, _HAS_SERIAL, serial=serial, line=line) or _boards(
        database, _BEGINS, serial=serial, behind=serial + chr(0x10FFFF), line=line
    )


def _boards(database: Database, condition: str, order: str = "DESC", line: str = "", **values: str) -> list[Row[Any]]:
    question = _BOARDS.format(condition=condition, order=order, limit=LIST_BOARDS + 1)
    return database.rows(question, {"line": line, **values}, limit=LIST_BOARDS + 1)


def board_attempts(database: Database, board_type: str, serial: str) -> list[tuple[Row[Any], list[Any], list[Any]]]:
    condition = f"{_HAS_SERIAL} AND board_type = :board_type"
    boards = _boards(database, condition, "ASC", serial=serial, board_type=board_type)[:_MAX_ATTEMPTS]

    def of(board: Row[Any], question: str) -> list[Row[Any]]:
        key: Mapping[str, Any] = {"line": board.line, "epoch": board.epoch, "attempt": board.attempt}
        return database.rows(question, {**key, "board_type": board_type, "serial": serial}, limit=_MAX_FINDINGS)

    return [(board, of(board, _FINDINGS), of(board, _DECISIONS)) for board in boards]
