"""What is no page of its own: the login, events, and the three paths that probes ask for."""

from collections.abc import Mapping
from typing import Annotated, Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, Form, Header, Query, Request
from fastapi.responses import PlainTextResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException

from daemon.dashboard.site.access import Keyring, safe_path
from daemon.dashboard.site.live import Full
from daemon.dashboard.site.site import Site
from daemon.monitor.http_answers import NoAnswer, answer
from daemon.wire.control import ControlError

#: Probes that ask the daemon at once. They wait for no page: a long question of a reader is no sickness of the line.
_PROBES = 2


def router(site: Site, keyring: Keyring) -> APIRouter:
    routes = APIRouter()
    _add_login(routes, site, keyring)

    @routes.get("/events")
    async def events(
        topic: Annotated[list[str], Query(min_length=1, max_length=8)],
        last_event_id: Annotated[str, Header(max_length=64)] = "",
    ) -> Response:
        try:
            return site.live.stream(topic, last_event_id)
        except KeyError as error:
            raise HTTPException(404, f"topic {error}: there are {', '.join(site.live.names)}") from None
        except Full:
            text = "64 pages listen already: close one, or look again later\n"
            return PlainTextResponse(text, 503, headers={"Retry-After": "10"})

    probes = anyio.CapacityLimiter(_PROBES)

    def ask(kind: str) -> Mapping[str, Any]:
        try:
            return site.ask_daemon(kind)
        except ControlError as error:
            raise NoAnswer(error.reason) from None

    @routes.get("/metrics")
    @routes.get("/healthz")
    @routes.get("/readyz")
    async def probe(request: Request) -> Response:
        found = await anyio.to_thread.run_sync(answer, request.url.path, ask, limiter=probes)
        return Response(found.text, found.status, media_type=found.media_type)

    return routes


def _add_login(routes: APIRouter, site: Site, keyring: Keyring) -> None:
    @routes.get("/login")
    def login(request: Request, next: str = "/") -> Response:  # noqa: A002 - the field's name in the address
        if keyring.is_open:
            return RedirectResponse("/", 303)
        return site.page(request, "login.html", next=safe_path(next), problem="")

    @routes.post("/login")
    async def enter(
        request: Request,
        token: Annotated[str, Form(max_length=4096)] = "",
        next: Annotated[str, Form(max_length=2048)] = "/",  # noqa: A002
    ) -> Response:
        if not keyring.is_open and not keyring.is_bearer(f"Bearer {token}"):
            has_waited = await keyring.slow_down()
            problem = "This is not the token." if has_waited else "Too many wrong tokens at once: wait a moment."
            status = 401 if has_waited else 429
            return site.page(request, "login.html", status_code=status, next=safe_path(next), problem=problem)
        answer = RedirectResponse(safe_path(next), 303)
        if not keyring.is_open:
            is_https = request.headers.get("x-forwarded-proto") == "https"
            answer.set_cookie(
                *(keyring.cookie_name, keyring.new_cookie(), keyring.cookie_s()),
                httponly=True,
                samesite="strict",
                secure=is_https,
            )
        return answer

    @routes.post("/logout")
    def leave() -> Response:
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(keyring.cookie_name, httponly=True, samesite="strict")
        return answer
