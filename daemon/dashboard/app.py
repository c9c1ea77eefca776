"""The web pages of one line as an application: every page's routes, and probes of the daemon."""

from typing import Any

import anyio
import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from daemon.dashboard.pages import board, defects, experts, line, machine, review
from daemon.dashboard.site.access import AccessGuard, Keyring
from daemon.dashboard.site.site import Site
from daemon.dashboard.site.web_app import web_app
from daemon.wire.control import ControlError

PAGES = (line, board, review, defects, experts, machine)
#: Concurrent probes. They have threads of their own, so that a slow page does not make the line look unhealthy.
_PROBES = 2
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def make_app(site: Site, keyring: Keyring, heart: int | None) -> AccessGuard:
    app = web_app(site, keyring, [page.router(site) for page in PAGES], heart=heart)
    _add_probes(app, site)
    return AccessGuard(app, keyring)


def _add_probes(app: FastAPI, site: Site) -> None:
    limiter = anyio.CapacityLimiter(_PROBES)

    async def ask(kind: str) -> dict[str, Any]:
        return await anyio.to_thread.run_sync(site.ask_daemon, kind, limiter=limiter)

    @app.get("/metrics")
    async def metrics() -> Response:  # pyright: ignore[reportUnusedFunction]
        try:
            return Response((await ask("metrics"))["text"], media_type=_EXPOSITION)
        except ControlError as error:
            return _no_answer(error)

    @app.get("/healthz")
    @app.get("/readyz")
    async def health(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        try:
            part = (await ask("health"))["alive" if request.url.path == "/healthz" else "ready"]
        except ControlError as error:
            return _no_answer(error)
        return PlainTextResponse(f"{part['text']}\n", 200 if part["ok"] else 503)


def _no_answer(error: ControlError) -> Response:
    return PlainTextResponse(f"no answer from the daemon: {error.reason}\n", 503)
