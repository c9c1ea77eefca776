"""The web pages of one line as an application: every page's routes, and probes of the daemon."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from daemon.dashboard.pages import board, defects, experts, line, machine, review, teach
from daemon.dashboard.site.access import AccessGuard, Keyring
from daemon.dashboard.site.site import Site
from daemon.dashboard.site.web_app import web_app
from daemon.monitor.answers import NoAnswer, http_answer
from daemon.wire.control import ControlError

#: Every page's routes. A new page is imported above and adds its line here.
PAGES: Sequence[Callable[[Site], APIRouter]] = (
    line.router,
    board.router,
    review.router,
    defects.router,
    experts.router,
    teach.router,
    machine.router,
)
#: Probes that ask the daemon at once. They wait for no page: a reader's long question does not make the line sick.
_PROBES = 2


def make_app(site: Site, keyring: Keyring, heart: int | None) -> AccessGuard:
    """Return the ASGI application behind its guard. It writes its heartbeat for the daemon to `heart`."""
    app = web_app(site, keyring, [page(site) for page in PAGES], site.database.close, heart=heart)
    _add_probes(app, site)
    return AccessGuard(app, keyring)


def _add_probes(app: FastAPI, site: Site) -> None:
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
