"""Access to the pages, checked before any route.

On loopback without a token everybody on this PC has access, but only under a loopback name (DNS rebinding). With a
token, browsers log in once and carry a cookie signed with it; programs send `Authorization: Bearer TOKEN`. Requests
that change something are refused if another site's page sends them.
"""

import asyncio
import hmac
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from daemon.wire.keys import CredentialError, Token, no_token_text, read_token
from daemon.wire.sockets import is_loopback_name
from experts.durable import replace_durably

#: Enough for a form of a few fields; nothing else is sent here.
MAX_BODY_BYTES = 64 * 1024
_COOKIE_S = 30 * 86400
_ENDED_MODE = 0o600
#: A wrong token waits this long for its answer; while this many wait, the right one does too.
_WRONG_TOKEN_WAIT_S = 1.0
_MANY_WRONG_TOKENS = 8
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


class TokenGuesses:
    """Delays wrong tokens; while many of them wait, the right one waits too: timing tells nothing."""

    def __init__(self) -> None:
        self._waiting = 0

    async def delay(self, state: dict[str, Any], *, is_right: bool) -> None:
        """`state` is the request's: when connections run out, guesses are closed first (server.py)."""
        if not is_right or self._waiting >= _MANY_WRONG_TOKENS:
            state["is_guess"] = not is_right
            self._waiting += not is_right
            try:
                await asyncio.sleep(_WRONG_TOKEN_WAIT_S)
            finally:
                self._waiting -= not is_right
        state["is_admitted"] = is_right


class Keyring:
    """The token in force (None on loopback without one) and the cookies signed with it.

    A cookie is `SESSION.SIGNATURE`, its session `UNTIL.NUMBER`. Logged-out sessions are kept in a file, so that a
    restart does not bring them back.
    """

    def __init__(self, token_file: Path | None, ended_file: Path) -> None:
        """Read token and sessions; CredentialError if one of the files cannot be used."""
        self._file = token_file
        self._ended_file = ended_file
        self._ended: set[str] = set()
        self._ending = threading.Lock()
        try:
            self._ended.update(ended_file.read_text("ascii", "replace").split())
        except FileNotFoundError:
            pass
        except OSError as error:
            raise CredentialError(
                f"{ended_file} cannot be read: {error.strerror}: give it to the daemon's user"
            ) from None
        self._token: Token | None = read_token(token_file) if token_file else None
        self._guesses = TokenGuesses()
        self._log: Any = structlog.get_logger("dashboard_access")

    @property
    def is_open(self) -> bool:
        return self._token is None

    def reload(self) -> None:
        """Read the token again. A new one voids every cookie; after an error the old one stays in force."""
        if self._file is None:
            return
        try:
            self._token = read_token(self._file)
        except CredentialError as error:
            self._log.error("reload_refused", problem=f"security.http_token: {error}")

    @property
    def cookie_name(self) -> str:
        """A name for each token: two lines on one PC differ only in their ports, which cookies ignore."""
        return f"coserve_{self._token.sign('name of the cookie')[:8]}" if self._token else "coserve"

    def set_cookie(self, response: Response, *, secure: bool) -> None:
        session = f"{int(time.time()) + _COOKIE_S}.{secrets.token_hex(8)}"
        value = f"{session}.{self._sign(session)}"
        response.set_cookie(self.cookie_name, value, _COOKIE_S, httponly=True, samesite="strict", secure=secure)

    def log_out(self, header: str) -> None:
        """End the session of a `Cookie` header for every holder of that cookie."""
        session = self.session_of(header)
        if session is None:
            return
        now = str(int(time.time()))
        with self._ending:
            self._ended = {each for each in self._ended if each > now} | {session}
            try:
                replace_durably(self._ended_file, "\n".join(self._ended), _ENDED_MODE)
            except OSError as error:
                self._log.error("logout_not_kept", file=str(self._ended_file), error=error.strerror)

    def session_of(self, header: str) -> str | None:
        session, _, signature = cookie_parser(header).get(self.cookie_name, "").rpartition(".")
        is_ours = hmac.compare_digest(signature.encode("utf-8", "replace"), self._sign(session).encode())
        is_ours &= not self.is_open
        is_valid = is_ours and int(session.partition(".")[0]) > time.time() and session not in self._ended
        return session if is_valid else None

    async def admits(self, authorization: str, state: dict[str, Any]) -> bool:
        is_right = self._token is not None and self._token.matches(authorization)
        await self._guesses.delay(state, is_right=is_right)
        return is_right

    def _sign(self, session: str) -> str:
        return self._token.sign(f"session {session}") if self._token else ""


class AccessGuard:
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
        await app(scope, _limited(receive), _with_headers(send))

    async def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        return (
            self._malformed(headers)
            or await self._unauthorized(scope, headers)
            or self._forbidden(scope["method"], headers)
        )

    def _malformed(self, headers: Headers) -> Response | None:
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            return _plain(413, f"a request has at most {MAX_BODY_BYTES} bytes")
        if len(headers.getlist("host")) != 1 or len(headers.getlist("authorization")) > 1:
            return _plain(400, "expected one Host header and at most one Authorization")
        if self._keyring.is_open and not is_loopback_name(headers["host"]):
            return _plain(421, "these pages answer to loopback names only, such as http://127.0.0.1")
        return None

    async def _unauthorized(self, scope: Scope, headers: Headers) -> Response | None:
        keyring, authorization, path = self._keyring, headers.get("authorization"), scope["path"]
        if keyring.is_open or path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER):
            return None
        if authorization is None and keyring.session_of(headers.get("cookie", "")) is not None:
            scope["state"]["is_admitted"] = True
            return None
        if authorization is not None and await keyring.admits(authorization, scope["state"]):
            return None
        return _ask_for_token(scope, headers)

    def _forbidden(self, method: str, headers: Headers) -> Response | None:
        if method not in ("GET", "HEAD", "POST"):
            return _plain(405, "only GET, HEAD and POST", Allow="GET, HEAD, POST")
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return _plain(403, "another site's page may link here and nothing else")
        if method == "POST" and not self._is_same_origin(headers):
            return _plain(403, "only the line's own pages may send this (Origin, Sec-Fetch-Site)")
        return None

    def _is_same_origin(self, headers: Headers) -> bool:
        """Return True if the browser says that our own page sent this, or if the request carries the token."""
        if "authorization" in headers:
            return not self._keyring.is_open
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        is_ours = origin is None or origin.partition("://")[2].lower() == headers["host"].lower()
        return is_ours and site in (None, "same-origin") and (origin, site) != (None, None)


def _ask_for_token(scope: Scope, headers: Headers) -> Response:
    if "authorization" not in headers and "text/html" in headers.get("accept", ""):
        query = scope["query_string"].decode("latin-1")
        target = f"{scope['path']}?{query}" if query else scope["path"]
        return RedirectResponse(f"/login?next={quote(target, safe='/')}", 303)
    return _plain(
        401, no_token_text(headers.get("authorization", "")), **{"WWW-Authenticate": 'Bearer realm="coserve"'}
    )


def safe_path(path: str) -> str:
    """Return `path` if it stays on this site, `/` if a browser could read it as another site."""
    is_ours = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_ours and "\\" not in path else "/"


def _plain(status: int, text: str, **headers: str) -> Response:
    return PlainTextResponse(f"{text}\n", status, headers=headers)


def _limited(receive: Receive) -> Receive:
    """End a body of unknown length where it becomes too long, as if the sender had disconnected."""
    received_bytes = 0

    async def limited() -> Message:
        nonlocal received_bytes
        message = await receive()
        received_bytes += len(message.get("body", b""))
        return message if received_bytes <= MAX_BODY_BYTES else {"type": "http.disconnect"}

    return limited


def _with_headers(send: Send) -> Callable[[Message], Awaitable[None]]:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
            headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return send_with_headers
