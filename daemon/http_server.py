"""HTTP for whoever watches the line: `/metrics` for Prometheus, `/healthz` and `/readyz`. It changes nothing.

The standard library's WSGI server, kept from doing three things: to wait for ever for a slow client, to start a thread
for each of a thousand clients, and to ask a name server for this machine's name.
"""

import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from daemon.errors import StartError
from daemon.http_token import TokenError, read_token
from daemon.sockets import is_open_host

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

_CONNECTIONS = 16
_REQUEST_S = 5.0
_LOOK_UP_S = 0.1
#: States in which images are taken and judged; one that is degraded needs a person, and serves on.
_READY = ("ready", "degraded")


class HttpServer:
    """One line's HTTP endpoint. With a token file every path needs `Authorization: Bearer TOKEN`."""

    def __init__(
        self, endpoint: str, registry: CollectorRegistry, state: Callable[[], str], token_file: Path | None = None
    ) -> None:
        """`state` is control's `status.state`. TokenError where the token cannot be used."""
        self._endpoint = endpoint
        self._state = state
        self._token_file = token_file
        self._token = read_token(token_file) if token_file else None
        self._metrics = make_wsgi_app(registry)
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Bind and begin to answer. The endpoint as bound; StartError where that fails, or where it would be open."""
        parts = urlsplit(self._endpoint)
        host = parts.hostname or ""
        try:
            self._server = _Server(host, parts.port or 0)
        except OSError as error:
            raise StartError(f"endpoints.http {self._endpoint}: {error.strerror}") from None
        bound, port = self._server.server_address[:2]
        if self._token is None and is_open_host(str(bound)):
            self._server.server_close()
            raise StartError(f"endpoints.http: {self._endpoint} can be reached from other machines: it needs a token")
        self._server.set_app(self._answer)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_LOOK_UP_S,), name="http", daemon=True)
        self._thread.start()
        return f"http://[{bound}]:{port}" if ":" in str(bound) else f"http://{bound}:{port}"

    def reload(self) -> list[str]:
        """Read the token again; what is wrong with it, and then the old one stays."""
        if self._token_file is None:
            return []
        try:
            self._token = read_token(self._token_file)
        except TokenError as error:
            return [f"security.http_token: {error}"]
        return []

    def stop(self) -> None:
        """Close; requests in hand are cut."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.cut_all()

    def _answer(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if self._token is not None and not self._token.matches(environ.get("HTTP_AUTHORIZATION", "")):
            challenge = ("WWW-Authenticate", 'Bearer realm="coserve"')
            return _say(start_response, "401 Unauthorized", "a bearer token is needed", challenge)
        if environ["REQUEST_METHOD"] != "GET":
            return _say(start_response, "405 Method Not Allowed", "only GET", ("Allow", "GET"))
        match environ["PATH_INFO"]:
            case "/metrics":
                return self._metrics(environ, start_response)
            case "/healthz":
                return _say(start_response, "200 OK", "alive")
            case "/readyz":
                state = self._state()
                return _say(start_response, "200 OK" if state in _READY else "503 Service Unavailable", state)
            case _:
                return _say(start_response, "404 Not Found", "there are /metrics, /healthz and /readyz")


def _say(start_response: "StartResponse", status: str, text: str, *headers: tuple[str, str]) -> Iterable[bytes]:
    body = f"{text}\n".encode()
    plain = ("Content-Type", "text/plain; charset=utf-8")
    start_response(status, [plain, ("Content-Length", str(len(body))), ("Cache-Control", "no-store"), *headers])
    return [body]


class _Handler(WSGIRequestHandler):
    """One request per connection. Nothing of it is logged: headers carry the token."""

    timeout = _REQUEST_S
    server_version = "coserve"
    sys_version = ""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's signature
        pass


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """At most 16 connections of at most 5 s each. One that comes when there are more takes the oldest one's place."""

    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._slots = threading.Semaphore(_CONNECTIONS)
        self._lock = threading.Lock()
        self._until_s: dict[socket.socket, float] = {}
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # WSGIServer's own asks a name server who we are
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

    def cut_all(self) -> None:
        self._cut(lambda _: True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing to say: the client is gone, or was cut. (The base class prints a traceback for each.)"""

    def _cut(self, is_due: Callable[[float], bool]) -> None:
        """End connections from outside: what waits for their bytes wakes up, and their threads close them."""
        with self._lock:
            for request in [one for one, until_s in self._until_s.items() if is_due(until_s)]:
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the client was faster
