"""The plant's pages as an application: lines, boards of all lines, the history of one serial, defects, events."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException

from daemon.dashboard.site.access import AccessGuard, Keyring
from daemon.dashboard.site.database import CachedAnswer, Database
from daemon.dashboard.site.live import LiveTopics
from daemon.dashboard.site.site import PageShell, SearchText
from daemon.dashboard.site.web_app import web_app
from daemon.plant.hub import Hub, picture
from daemon.plant.page import questions
from daemon.plant.reading import open_hub_for_reading
from experts.catalog import Digest

NAVIGATION = (("/", "Plant", "l"), ("/boards", "Boards", "b"), ("/defects", "Defects", "d"))
_RANGES = {"today": 1, "7d": 7, "30d": 30}
#: Seconds from one rendering of a live part to the next, for all readers together.
_LIVE_S = 5.0
_NOT_READ = "The hub's database cannot be read now; the lines go on"
_SHORT_LIST = 10
_LISTED_DEFECTS = 200


class PlantSite(PageShell):
    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        database = Database(hub.engine.url.render_as_string(hide_password=False), open_hub_for_reading)
        folder = Path(__file__).parent / "templates"
        super().__init__(database, hub.settings.plant, NAVIGATION, str, folder, has_token=hub.token is not None)
        self.templates.globals["serial_path"] = serial_path

    def since(self, days: int) -> str:
        """Return when the plant's last `days` days began, today included, as UTC text."""
        return self.plant.days(self.today() - timedelta(days=days - 1)).since


def plant_pages(hub: Hub, folder: Path) -> tuple[AccessGuard, LiveTopics]:
    """Return the guarded pages and their live parts; the database need not answer yet.

    Logged-out sessions are kept in `folder`. TokenError if a file cannot be used.
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
        return {"since": since, "causes": site.database.rows(questions.DEFECTS, {"since": since}, limit=limit)}

    def lines() -> Mapping[str, Any]:
        days, silent_after_s = (site.since(1), site.since(7)), site.hub.settings.silent_after
        shown = questions.lines_now(site.database, *days, silent_after_s, time.time())
        return {"since": days[0], "goal": site.hub.settings.plant.yield_goal, "lines": shown}

    contexts: dict[str, Callable[[], Mapping[str, Any]]] = {
        "lines": lines,
        "defects": lambda: causes(1, _SHORT_LIST),
        "events": lambda: {"events": site.database.rows(questions.EVENTS, limit=questions.MAX_EVENTS)},
    }
    for name, context in contexts.items():
        answer = CachedAnswer(_LIVE_S, context)
        site.add_part(name, f"_plant_{name}.html", answer.get, _NOT_READ, _LIVE_S)

    @routes.get("/")
    def plant(request: Request) -> HTMLResponse:
        return site.page(request, "plant.html")

    @routes.get("/boards")
    def boards(request: Request, serial: SearchText = "", line: SearchText = "") -> Response:
        rows = questions.find_boards(site.database, serial, line)
        matches = {(row.board_type, row.board_serial) for row in rows}
        if serial and len(matches) == 1:
            return RedirectResponse(serial_path(*matches.pop()), 303)
        shown: dict[str, Any] = {"boards": rows[: questions.LIST_BOARDS], "more": len(rows) > questions.LIST_BOARDS}
        names = site.database.rows(questions.LINE_NAMES, limit=questions.MAX_LINES)
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
        attempts = questions.board_attempts(site.database, board_type, serial)
        if not attempts:
            raise HTTPException(404, f"no line has sent a board {board_type} {serial}: search for its beginning")
        shown: dict[str, Any] = {"attempts": attempts, "lines": {board.line for board, _, _ in attempts}}
        return site.page(request, "plant_serial.html", board_type=board_type, serial=serial, **shown)

    @routes.get("/images/{sha256}")
    def image(sha256: Digest) -> Response:
        return picture(site.hub, sha256)
