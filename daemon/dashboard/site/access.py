"""Who may see the pages, and what a page may do: the outermost layer, before any route.

On loopback without a token whoever is on this PC may, but only under a loopback name: a web site elsewhere that points
its own name here (DNS rebinding) is refused. With a token, browsers log in once and carry a cookie that is made from
the token and is not the token; programs send `Authorization: Bearer TOKEN`. Nothing that changes anything is taken
from another site's page.
"""

import asyncio
import hmac
import ipaddress
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from daemon.wire.http_token import Token, TokenError, no_token_text, read_token

#: A form has a few fields; nothing else is sent here.
MAX_BODY_BYTES = 64 * 1024
_COOKIE_S = 30 * 86400
#: How long a wrong token waits for its answer, and how many may wait at once: eight guesses a second in all.
_WRONG_WAITS_S = 1.0
_WRONG_AT_ONCE = 8
_OPEN_PATHS = ("/login",)
_OPEN_FOLDER = "/static/"

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self';"
        " frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Keyring:
    """The token in force, None on loopback without one, and the cookies that are made from it."""

    def __init__(self, token_file: Path | None) -> None:
        """TokenError where the file cannot be used."""
        self._file = token_file
        self._token: Token | None = read_token(token_file) if token_file else None
        self._waiting = 0
        self._log: Any = structlog.get_logger("dashboard_access")

    @property
    def is_open(self) -> bool:
        return self._token is None

    def reload(self) -> None:
        """Read the token again: a new one voids every cookie, one that cannot be used leaves the old in force."""
        if self._file is None:
            return
        try:
            self._token = read_token(self._file)
        except TokenError as error:
            self._log.error("reload_refused", problem=f"security.http_token: {error}")

    @property
    def cookie_name(self) -> str:
        """Of this token: two lines on one PC, which differ in their ports only, would share one name."""
        return f"coserve_{self._token.sign('name of the cookie')[:8]}" if self._token else "coserve"

    def new_cookie(self) -> str:
        until = str(int(time.time()) + _COOKIE_S)
        return f"{until}.{self._sign(until)}"

    def cookie_s(self) -> int:
        return _COOKIE_S

    def has_cookie(self, header: str) -> bool:
        until, _, mark = cookie_parser(header).get(self.cookie_name, "").partition(".")
        is_ours = hmac.compare_digest(mark.encode("utf-8", "replace"), self._sign(until).encode())
        return is_ours and until.isdecimal() and int(until) > time.time()

    def is_bearer(self, authorization: str) -> bool:
        return self._token is not None and self._token.matches(authorization)

    async def slow_down(self) -> bool:
        """Let whoever gave a wrong token wait; False where too many wait already."""
        if self._waiting >= _WRONG_AT_ONCE:
            return False
        self._waiting += 1
        try:
            await asyncio.sleep(_WRONG_WAITS_S)
        finally:
            self._waiting -= 1
        return True

    def _sign(self, until: str) -> str:
        return self._token.sign(f"cookie until {until}") if self._token else ""


class Guard:
    """ASGI: lets a request through to `app`, or answers it."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self.app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        app = await self._refusal(scope) or self.app
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # routes know GET; the server leaves the body out
        await app(scope, _measured(receive), _with_headers(send))

    async def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that does not come through; None to one that does."""
        headers = Headers(scope=scope)
        return (
            self._misshapen(headers)
            or await self._not_let_in(scope, headers)
            or self._not_taken(scope["method"], headers)
        )

    def _misshapen(self, headers: Headers) -> Response | None:
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            return _plain(413, f"at most {MAX_BODY_BYTES} bytes are taken")
        if len(headers.getlist("host")) != 1 or len(headers.getlist("authorization")) > 1:
            return _plain(400, "one Host, and one Authorization at the most")
        if self._keyring.is_open and not is_loopback_name(headers["host"]):
            return _plain(421, "this line's pages answer to loopback names only, such as http://127.0.0.1")
        return None

    async def _not_let_in(self, scope: Scope, headers: Headers) -> Response | None:
        keyring, authorization, path = self._keyring, headers.get("authorization"), scope["path"]
        if keyring.is_open or path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER):
            return None
        if authorization is None and keyring.has_cookie(headers.get("cookie", "")):
            return None
        if authorization is not None:
            if keyring.is_bearer(authorization):
                return None
            if not await keyring.slow_down():
                return _plain(429, "too many wrong tokens at once", **{"Retry-After": "2"})
        return _ask_for_token(scope, headers)

    def _not_taken(self, method: str, headers: Headers) -> Response | None:
        if method not in ("GET", "HEAD", "POST"):
            return _plain(405, "only GET, HEAD and POST", Allow="GET, HEAD, POST")
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return _plain(403, "another site's page may link here, and do no more")
        if method == "POST" and not self._is_same_origin(headers):
            return _plain(403, "this may be sent from the line's own pages only (Origin, Sec-Fetch-Site)")
        return None

    def _is_same_origin(self, headers: Headers) -> bool:
        """A browser says where a form was sent from. Whoever has the token itself is no browser that was misled."""
        if "authorization" in headers:
            return not self._keyring.is_open
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and urlsplit(origin).netloc.lower() != headers["host"].lower():
            return False
        if site is not None and site != "same-origin":
            return False
        return origin is not None or site is not None


def _ask_for_token(scope: Scope, headers: Headers) -> Response:
    """A browser that opens a page is sent to the login; a program, and a fragment of a page, hear what is missing."""
    if "HX-Request" in headers:
        return _plain(401, "log in again", **{"HX-Redirect": "/login"})
    if "authorization" not in headers and "text/html" in headers.get("accept", ""):
        query = scope["query_string"].decode("latin-1")
        wanted = f"{scope['path']}?{query}" if query else scope["path"]
        return RedirectResponse(f"/login?next={quote(wanted, safe='/')}", 303)
    missing = no_token_text(headers.get("authorization", ""))
    return _plain(401, missing, **{"WWW-Authenticate": 'Bearer realm="coserve"'})


def is_loopback_name(host: str) -> bool:
    """Whether a `Host` header names this machine by an address or name that means itself wherever it is said."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        if name == "localhost":
            return True
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def safe_path(path: str) -> str:
    """Where to go after the login: a path of ours. Anything a browser could read as another site becomes `/`."""
    is_ours = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_ours and "\\" not in path else "/"


def _plain(status: int, text: str, **headers: str) -> Response:
    return PlainTextResponse(f"{text}\n", status, headers=headers)


def _measured(receive: Receive) -> Receive:
    """A body without an announced length ends where it becomes too long: as if the sender had gone."""
    taken = 0

    async def measured() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        return message if taken <= MAX_BODY_BYTES else {"type": "http.disconnect"}

    return measured


def _with_headers(send: Send) -> Callable[[Message], Awaitable[None]]:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
            headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return sending
