"""The web application around a set of pages: login, live events, style sheets and scripts, and errors in words."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, FastAPI, Form, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from daemon.dashboard.site.access import Keyring, safe_path
from daemon.dashboard.site.database import NoDatabase, TooMuchToCount
from daemon.dashboard.site.server import PageThreads
from daemon.dashboard.site.site import PageShell
from daemon.host.children import heartbeat
from daemon.wire.control import ControlError

#: Questions to the database and the daemon that run at once. More would only wait for each other.
_THREADS = 8
_STATIC = Path(__file__).parents[1] / "static"


def web_app(
    shell: PageShell,
    keyring: Keyring,
    routers: Sequence[APIRouter],
    *,
    heart: int | None = None,
    unaffected: str = "the line itself goes on",
) -> FastAPI:
    """Return the application without AccessGuard. `unaffected` tells readers of an error page what goes on."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        limiter = anyio.to_thread.current_default_thread_limiter()
        limiter.total_tokens = _THREADS
        beating = heartbeat(heart, PageThreads(limiter).are_progressing)
        tasks = [asyncio.create_task(shell.live.run()), asyncio.create_task(beating)]
        yield
        for task in tasks:
            task.cancel()
        shell.database.close()

    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # malformed forms are answered, not logged
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False)
    app.state.site = shell
    _add_login(app, shell, keyring)

    @app.get("/events")
    async def events(topic: Annotated[list[str], Query(min_length=1, max_length=8)]) -> Response:  # pyright: ignore[reportUnusedFunction]
        return shell.live.stream(topic)

    for router in routers:
        app.include_router(router)
    app.mount("/static", StaticFiles(directory=_STATIC), name="static")
    _add_error_pages(app, shell, unaffected)
    return app


def _add_login(app: FastAPI, shell: PageShell, keyring: Keyring) -> None:
    @app.get("/login")
    def login(request: Request, next: str = "/") -> Response:  # noqa: A002 - the field's name in the address
        if keyring.is_open:
            return RedirectResponse("/", 303)
        return shell.page(request, "login.html", next=safe_path(next), problem="")

    @app.post("/login")
    async def enter(
        request: Request,
        token: Annotated[str, Form(max_length=4096)] = "",
        next: Annotated[str, Form(max_length=2048)] = "/",  # noqa: A002
    ) -> Response:
        if not keyring.is_open and not await keyring.admits(f"Bearer {token}", request.scope["state"]):
            problem = "This is not the token."
            return shell.page(request, "login.html", status_code=401, next=safe_path(next), problem=problem)
        response = RedirectResponse(safe_path(next), 303)
        if not keyring.is_open:
            is_https = request.headers.get("x-forwarded-proto") == "https"
            keyring.set_cookie(response, secure=is_https)
        return response

    @app.post("/logout")
    async def leave(request: Request) -> Response:
        await anyio.to_thread.run_sync(keyring.log_out, request.headers.get("cookie", ""))
        shell.live.close()  # also the streams of this session; the other pages connect again by themselves
        response = RedirectResponse("/login", 303)
        response.delete_cookie(keyring.cookie_name, httponly=True, samesite="strict")
        return response


def _add_error_pages(app: FastAPI, shell: PageShell, unaffected: str) -> None:
    def show(request: Request, status: int, title: str, remedy: str) -> Response:
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(f"{title}: {remedy}\n", status)
        return shell.page(request, "problem.html", status_code=status, title=title, remedy=remedy)

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
        (NoDatabase, 503, "The results cannot be read now", f"{{}}. {unaffected.capitalize()}; try again."),
        (ControlError, 503, "The daemon does not answer", "{}"),
        (Exception, 500, "This page is broken", f"The log says why; {unaffected}."),
    ):
        app.add_exception_handler(
            kind,
            lambda request, error, answer=(status, title), remedy=remedy: show(request, *answer, remedy.format(error)),
        )
