"""The web pages of one line, put together: which pages there are, and what surrounds them all."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import anyio.to_thread
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from daemon.dashboard.pages import board, defects, experts, line, machine, review
from daemon.dashboard.site import common_routes
from daemon.dashboard.site.access import Guard, Keyring
from daemon.dashboard.site.database import NoDatabase, TooMuchToCount
from daemon.dashboard.site.page_threads import PageThreads
from daemon.dashboard.site.site import Site
from daemon.host.child_heartbeat import beat
from daemon.wire.control import ControlError

#: Every page's routes, by name: a new page is imported above and adds its line here.
PAGES: Sequence[Callable[[Site], APIRouter]] = (
    line.router,
    board.router,
    review.router,
    defects.router,
    experts.router,
    machine.router,
)
#: Questions to the database and the daemon that run at once. More would only wait for each other.
_THREADS = 8
_STATIC = Path(__file__).parent / "static"


def make_app(site: Site, keyring: Keyring, heart: int | None) -> Guard:
    """The ASGI application, which beats for the daemon. Whoever may not in is answered by the guard around it."""

    @contextlib.asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        limiter = anyio.to_thread.current_default_thread_limiter()
        limiter.total_tokens = _THREADS
        tasks = [
            asyncio.create_task(site.live.run()),
            asyncio.create_task(beat(heart, PageThreads(limiter).are_getting_on)),
        ]
        yield
        for task in tasks:
            task.cancel()
        site.database.close()

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=life, redirect_slashes=False)
    app.include_router(common_routes.router(site, keyring))
    for page in PAGES:
        app.include_router(page(site))
    app.mount("/static", StaticFiles(directory=_STATIC), name="static")
    _answer_errors(app, site)
    return Guard(app, keyring)


def _answer_errors(app: FastAPI, site: Site) -> None:
    """What goes wrong is said on a page of its own, in words; a program that asked gets one line."""

    def say(request: Request, status: int, title: str, remedy: str) -> Response:
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(f"{title}: {remedy}\n", status)
        template = "_problem.html" if "HX-Request" in request.headers else "problem.html"
        return site.page(request, template, status_code=status, title=title, remedy=remedy)

    @app.exception_handler(HTTPException)
    def refused(request: Request, error: HTTPException) -> Response:  # pyright: ignore[reportUnusedFunction]
        title = {404: "There is no such page", 405: "This is not how it is asked"}.get(error.status_code, "Refused")
        return say(request, error.status_code, title, str(error.detail))

    @app.exception_handler(RequestValidationError)
    def malformed(request: Request, error: RequestValidationError) -> Response:  # pyright: ignore[reportUnusedFunction]
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return say(request, 422, "The address or the form is wrong", f"{where}: {first['msg']}")

    @app.exception_handler(TooMuchToCount)
    def too_much(request: Request, error: TooMuchToCount) -> Response:  # pyright: ignore[reportUnusedFunction]
        remedy = str(error) or "The question took too long and was stopped. Ask for a shorter time or fewer rows."
        return say(request, 503, "Too much to count", remedy)

    @app.exception_handler(NoDatabase)
    def no_database(request: Request, error: NoDatabase) -> Response:  # pyright: ignore[reportUnusedFunction]
        return say(request, 503, "The results cannot be read now", f"{error}. The line itself goes on; try again.")

    @app.exception_handler(ControlError)
    def no_daemon(request: Request, error: ControlError) -> Response:  # pyright: ignore[reportUnusedFunction]
        return say(request, 503, "The daemon does not answer", error.reason)

    @app.exception_handler(Exception)
    def broken(request: Request, _: Exception) -> Response:  # pyright: ignore[reportUnusedFunction]
        return say(request, 500, "This page is broken", "The log of the daemon says why; the line itself goes on.")
