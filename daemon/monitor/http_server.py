"""HTTP without the web pages: `/metrics` for Prometheus, `/healthz` and `/readyz`. It changes nothing.

With the extra `dashboard` the web pages answer these paths too (daemon/dashboard), on a socket that is bound here;
while their process is away for longer, this stands in for it (daemon/monitor/web_pages.py).

The standard library's WSGI server, changed so that it never waits without limit for a slow client, starts a
thread for each of a thousand clients, or asks a name server for this machine's name.
"""

import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, generate_latest

from daemon.errors import StartError
from daemon.monitor.answers import PATHS, http_answer
from daemon.wire.keys import TokenError, no_token_text, read_token
from daemon.wire.sockets import is_loopback_name, is_open_host

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

_CONNECTIONS = 16
_REQUEST_S = 5.0
_LOOK_UP_S = 0.1
#: Running requests get this long at a stop, also those that wait for their client's bytes.
_FINISH_S = 1.0
_FINISH_POLL_S = 0.01
_BACKLOG = 128
_PAGES_AWAY = (
    "The web pages end again and again and are started again in half a minute at the latest; the line itself goes on."
    " The daemon's log says why (child_ended)."
)


def bind_http(endpoint: str, *, has_token: bool) -> socket.socket:
    """Return a listening socket for `endpoint`; StartError if that fails, or if it would be open without a token."""
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, parts.port or 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise StartError(f"endpoints.http {endpoint}: {error.strerror or error}") from None
    if not has_token and is_open_host(str(listener.getsockname()[0])):
        listener.close()
        raise StartError(f"endpoints.http: {endpoint} can be reached from other machines: it needs a token")
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the address that a socket is bound to."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


Health = Callable[[], Mapping[str, Any]]


class HttpServer:
    """One line's HTTP endpoint. With a token file every path needs `Authorization: Bearer TOKEN`."""

    _health: Health

    def __init__(
        self, endpoint: str, registry: CollectorRegistry, token_file: Path | None = None, *, stands_in: bool = False
    ) -> None:
        """Read the token (TokenError). A server that `stands_in` says of other paths that the web pages are away."""
        self._stands_in = stands_in
        self._endpoint = endpoint
        self._token_file = token_file
        self._token = read_token(token_file) if token_file else None
        self._registry = registry
        self._server: _ProbeServer | None = None
        self._thread: threading.Thread | None = None

    def start(self, health: Health) -> str:
        """Bind, begin to answer, and return the endpoint as bound; StartError if that fails or it would be open."""
        listener = bind_http(self._endpoint, has_token=self._token is not None)
        self.serve(listener, health)
        return url_of(listener)

    def serve(self, listener: socket.socket, health: Health) -> None:
        """Begin to answer at a socket that listens, and that `stop` closes."""
        self._health = health
        server = _ProbeServer(listener)
        server.set_app(self._answer)
        thread = threading.Thread(target=server.serve_forever, args=(_LOOK_UP_S,), name="http", daemon=True)
        thread.start()
        self._server, self._thread = server, thread

    def reload(self) -> list[str]:
        """Read the token again. With a problem, which is returned, the old one stays."""
        try:
            self._token = read_token(self._token_file) if self._token_file else None
        except TokenError as error:
            return [f"security.http_token: {error}"]
        return []

    def stop(self) -> None:
        """Take no more requests, finish the running ones, close. Does nothing before `serve`."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.finish()
        self._server = self._thread = None

    def _answer(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if self._token is None and not is_loopback_name(environ.get("HTTP_HOST", "localhost")):
            return _say(start_response, "421 Misdirected Request", "only loopback names are answered: http://127.0.0.1")
        if self._stands_in and environ["PATH_INFO"] not in PATHS:
            again = ("Retry-After", "30")
            return _say(start_response, "503 Service Unavailable", _PAGES_AWAY, again)
        authorization = environ.get("HTTP_AUTHORIZATION", "")
        if self._token is not None and not self._token.matches(authorization):
            challenge = ("WWW-Authenticate", 'Bearer realm="coserve"')
            return _say(start_response, "401 Unauthorized", no_token_text(authorization), challenge)
        if environ["REQUEST_METHOD"] != "GET":
            return _say(start_response, "405 Method Not Allowed", "only GET", ("Allow", "GET"))
        if environ["PATH_INFO"] not in PATHS:
            return _say(start_response, "404 Not Found", "there are /metrics, /healthz and /readyz")
        reply = http_answer(environ["PATH_INFO"], self._ask)
        status = f"{reply.status} {HTTPStatus(reply.status).phrase}"
        return _say(start_response, status, reply.text.removesuffix("\n"), media_type=reply.media_type)

    def _ask(self, kind: str) -> Mapping[str, Any]:
        if kind == "health":
            return self._health()
        return {"text": generate_latest(self._registry).decode()}


def _say(
    start_response: "StartResponse",
    status: str,
    text: str,
    *headers: tuple[str, str],
    media_type: str = "text/plain; charset=utf-8",
) -> Iterable[bytes]:
    body = f"{text}\n".encode()
    kind = ("Content-Type", media_type)
    start_response(status, [kind, ("Content-Length", str(len(body))), ("Cache-Control", "no-store"), *headers])
    return [body]


class _Handler(WSGIRequestHandler):
    """One request per connection. Nothing of it is logged: headers carry the token."""

    timeout = _REQUEST_S
    server_version = "coserve"
    sys_version = ""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's signature
        pass


class _ProbeServer(socketserver.ThreadingMixIn, WSGIServer):
    """At most 16 connections of at most 5 s each. One that comes when there are more takes the oldest one's place."""

    daemon_threads = True

    def __init__(self, listener: socket.socket) -> None:
        self._slots = threading.Semaphore(_CONNECTIONS)
        self._lock = threading.Lock()
        self._until_s: dict[socket.socket, float] = {}
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()  # the base class made one that it would bind itself, and ask a name server who we are
        self.socket = listener
        self.server_address = listener.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self._cut(lambda until_s: until_s == min(self._until_s.values()))
            if not self._slots.acquire(timeout=1.0):
                super().shutdown_request(request)
                return
        with self._lock:
            self._until_s[request] = time.monotonic() + _REQUEST_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            if self._until_s.pop(request, None) is not None:
                self._slots.release()
        super().shutdown_request(request)

    def service_actions(self) -> None:
        now_s = time.monotonic()
        self._cut(lambda until_s: until_s < now_s)

    def finish(self) -> None:
        """Wait a moment for running requests; cut those that have not ended by then."""
        until_s = time.monotonic() + _FINISH_S
        while self._until_s and time.monotonic() < until_s:
            time.sleep(_FINISH_POLL_S)
        self._cut(lambda _: True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing to say: the client is gone, or was cut. (The base class prints a traceback for each.)"""

    def _cut(self, is_due: Callable[[float], bool]) -> None:
        """Shut connections down: threads that wait for their bytes wake up and close them."""
        with self._lock:
            for request in [each for each, until_s in self._until_s.items() if is_due(until_s)]:
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the client was faster
