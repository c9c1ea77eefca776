"""The web pages of one line as an application: every page's routes, the login, events, probes, and errors in words."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, FastAPI, Form, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from daemon.dashboard.pages import board, defects, experts, line, machine, review
from daemon.dashboard.site.access import AccessGuard, Keyring, safe_path
from daemon.dashboard.site.database import NoDatabase, TooMuchToCount
from daemon.dashboard.site.live import MAX_LISTENERS, TooManyListeners
from daemon.dashboard.site.server import PageThreads
from daemon.dashboard.site.site import Site
from daemon.host.children import beat
from daemon.monitor.answers import NoAnswer, http_answer
from daemon.wire.control import ControlError

#: Every page's routes. A new page is imported above and adds its line here.
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
#: Probes that ask the daemon at once. They wait for no page: a reader's long question does not make the line sick.
_PROBES = 2
_STATIC = Path(__file__).parent / "static"


def make_app(site: Site, keyring: Keyring, heart: int | None) -> AccessGuard:
    """Return the ASGI application behind its guard. It writes its heartbeat for the daemon to `heart`."""

    @contextlib.asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        limiter = anyio.to_thread.current_default_thread_limiter()
        limiter.total_tokens = _THREADS
        tasks = [
            asyncio.create_task(site.live.run()),
            asyncio.create_task(beat(heart, PageThreads(limiter).are_progressing)),
        ]
        yield
        for task in tasks:
            task.cancel()
        site.database.close()

    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # malformed forms are answered, not logged
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=life, redirect_slashes=False)
    app.state.site = site
    _add_login(app, site, keyring)
    _add_events_and_probes(app, site)
    for page in PAGES:
        app.include_router(page(site))
    app.mount("/static", StaticFiles(directory=_STATIC), name="static")
    _add_error_pages(app, site)
    return AccessGuard(app, keyring)


def _add_login(app: FastAPI, site: Site, keyring: Keyring) -> None:
    @app.get("/login")
    def login(request: Request, next: str = "/") -> Response:  # noqa: A002 - the field's name in the address
        if keyring.is_open:
            return RedirectResponse("/", 303)
        return site.page(request, "login.html", next=safe_path(next), problem="")

    @app.post("/login")
    async def enter(
        request: Request,
        token: Annotated[str, Form(max_length=4096)] = "",
        next: Annotated[str, Form(max_length=2048)] = "/",  # noqa: A002
    ) -> Response:
        if not keyring.is_open and not await keyring.admits(f"Bearer {token}", request.scope["state"]):
            problem = "This is not the token."
            return site.page(request, "login.html", status_code=401, next=safe_path(next), problem=problem)
        response = RedirectResponse(safe_path(next), 303)
        if not keyring.is_open:
            is_https = request.headers.get("x-forwarded-proto") == "https"
            keyring.set_cookie(response, secure=is_https)
        return response

    @app.post("/logout")
    async def leave(request: Request) -> Response:
        await anyio.to_thread.run_sync(keyring.log_out, request.headers.get("cookie", ""))
        site.live.close()  # also the streams of this session; the other pages connect again by themselves
        response = RedirectResponse("/login", 303)
        response.delete_cookie(keyring.cookie_name, httponly=True, samesite="strict")
        return response


def _add_events_and_probes(app: FastAPI, site: Site) -> None:
    @app.get("/events")
    async def events(
        topic: Annotated[list[str], Query(min_length=1, max_length=8)],
        last_event_id: Annotated[str, Header(max_length=64)] = "",
    ) -> Response:
        try:
            return site.live.stream(topic, last_event_id)
        except KeyError as error:
            raise HTTPException(404, f"topic {error}: expected one of {', '.join(site.live.names)}") from None
        except TooManyListeners:
            text = f"{MAX_LISTENERS} live pages are open already: close one, or try again later\n"
            return PlainTextResponse(text, 503, headers={"Retry-After": "10"})

    limiter = anyio.CapacityLimiter(_PROBES)

    def ask(kind: str) -> Mapping[str, Any]:
        try:
            return site.ask_daemon(kind)
        except ControlError as error:
            raise NoAnswer(error.reason) from None

    @app.get("/metrics")
    @app.get("/healthz")
    @app.get("/readyz")
    async def probe(request: Request) -> Response:
        result = await anyio.to_thread.run_sync(http_answer, request.url.path, ask, limiter=limiter)
        return Response(result.text, result.status, media_type=result.media_type)


def _add_error_pages(app: FastAPI, site: Site) -> None:
    """Show errors on a page of their own, in words; a program gets one line."""

    def show(request: Request, status: int, title: str, remedy: str) -> Response:
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(f"{title}: {remedy}\n", status)
        return site.page(request, "problem.html", status_code=status, title=title, remedy=remedy)

    def http_error(request: Request, error: Any) -> Response:
        titles = {404: "There is no such page", 405: "This method is not allowed here"}
        return show(request, error.status_code, titles.get(error.status_code, "Refused"), str(error.detail))

    def malformed(request: Request, error: Any) -> Response:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        return show(request, 422, "The address or the form is wrong", f"{field}: {first['msg']}")

    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, malformed)
    for kind, status, title, remedy in (
        (TooMuchToCount, 503, "Too much to count", "{}"),
        (NoDatabase, 503, "The results cannot be read now", "{}. The line itself goes on; try again."),
        (ControlError, 503, "The daemon does not answer", "{}"),
        (Exception, 500, "This page is broken", "The daemon's log says why; the line itself goes on."),
    ):
        app.add_exception_handler(
            kind,
            lambda request, error, answer=(status, title), remedy=remedy: show(request, *answer, remedy.format(error)),
        )
