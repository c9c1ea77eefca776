"""The page Line: how the line is doing now, and its boards as they come."""

from datetime import UTC, datetime

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from daemon.dashboard.pages.alarms import Status, alarms
from daemon.dashboard.pages.board import failures
from daemon.dashboard.pages.drifted import DriftWatch
from daemon.dashboard.pages.questions_line import Day, Today, images_done, newest_boards
from daemon.dashboard.site.database import NoDatabase, TooMuchToCount
from daemon.dashboard.site.site import Site
from daemon.wire.control import ControlError

#: Open boards whose images are counted at each look; a line works at a few.
_OPEN_COUNTED = 8


def router(site: Site) -> APIRouter:
    routes = APIRouter()
    today, drift = Today(site.database), DriftWatch(site)

    def now() -> str:
        return _now(site, today, drift)

    def boards() -> str:
        return _boards(site)

    site.live.add("line", now)
    site.live.add("boards", boards)

    @routes.get("/")
    def line(request: Request) -> HTMLResponse:
        return site.page(request, "line.html", now=now(), boards=boards())

    return routes


def _now(site: Site, today: Today, drift: DriftWatch) -> str:
    """State, alarms and today's numbers, as a fragment."""
    status: Status | ControlError
    try:
        status = {**site.status(), "drifted": drift.names()}
    except ControlError as error:
        status = error
    day, problem = Day(""), None
    try:
        day = today.look(f"{datetime.now(UTC):%Y-%m-%d}")
    except (NoDatabase, TooMuchToCount) as error:
        problem = str(error) or "today's boards are not counted: the database takes too long"
    return site.render(
        "_line.html",
        status={} if isinstance(status, ControlError) else status,
        alarms=alarms(status),
        day=day,
        problem=problem,
    )


def _boards(site: Site) -> str:
    try:
        boards = newest_boards(site.database)
        is_open = [board.board_id for board in boards if board.verdict is None]
        done = {board_id: images_done(site.database, board_id) for board_id in is_open[:_OPEN_COUNTED]}
    except (NoDatabase, TooMuchToCount) as error:
        return site.render("_problem.html", title="The boards cannot be read now", remedy=str(error))
    return site.render("_boards.html", rows=[(board, failures(board)) for board in boards], done=done)
