"""`endpoints.http` where the extra `dashboard` is installed: bound here, served by a process beside the line.

The daemon keeps the listening socket: a port in use ends its start, and clients that connect while the web process
is started again wait a moment instead of being refused. If that process ends again and again and its next start is far
off, the daemon answers probes itself until then: the state of the pages says nothing about the line.
"""

import contextlib
import importlib.util
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from daemon.host.children import ChildSpec
from daemon.monitor.http_server import Health, HttpServer, bind_http, url_of
from daemon.wire.keys import read_token

NAME = "dashboard"
#: A wait that is longer is answered: the first after an end is half a second, and a page then only takes longer.
_STAND_IN_S = 0.5
#: What the web process imports beyond what the line itself needs, by the names of the packages.
_NEEDED = {
    "fastapi": "fastapi",
    "jinja2": "jinja2",
    "PIL": "pillow",
    "python_multipart": "python-multipart",
    "uvicorn": "uvicorn",
}


def missing_packages() -> list[str]:
    """Return the packages of the extra `dashboard` that are not installed."""
    return [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]


class WebPages:
    """The socket of the web process, and its signals; started and stopped as `HttpServer` is."""

    _health: Health

    def __init__(
        self, config: Path, endpoint: str, token_file: Path | None, hang_up: Callable[[str], None], stand_in: HttpServer
    ) -> None:
        """`hang_up` sends SIGHUP to a child; `stand_in` answers while that is away. TokenError: no usable token."""
        self._config = config
        self._stand_in = stand_in
        self._endpoint = endpoint
        self._token_file = token_file
        self._hang_up = hang_up
        self._listener: socket.socket | None = None
        if token_file is not None:
            read_token(token_file)

    def start(self, health: Health) -> str:
        """Bind; return the address. StartError if that fails, or if it would be open without a token."""
        self._health = health
        self._listener = bind_http(self._endpoint, has_token=self._token_file is not None)
        return url_of(self._listener)

    def child(self) -> ChildSpec:
        """The process that serves the socket, once that is bound."""
        assert self._listener is not None
        fd = self._listener.fileno()
        argv = (sys.executable, "-m", "daemon.dashboard", str(self._config.resolve()), "--fd", str(fd))
        return ChildSpec(
            NAME, argv, pass_fds=(fd,), beats=True, on_wait=self._answer_meanwhile, on_start=self._stand_in.stop
        )

    def _answer_meanwhile(self, wait_s: float) -> None:
        assert self._listener is not None
        if wait_s > _STAND_IN_S:
            # A machine at its limits has no descriptor or no thread left: then clients wait.
            with contextlib.suppress(OSError, RuntimeError):
                self._stand_in.serve(self._listener.dup(), self._health)

    def reload(self) -> list[str]:
        """Have the token read again. With a problem, which is returned, the old one stays."""
        problems = self._stand_in.reload()
        if self._token_file is not None and not problems:
            self._hang_up(NAME)
        return problems

    def stop(self) -> None:
        """Close the socket; the process is stopped with the other children."""
        self._stand_in.stop()
        if self._listener is not None:
            self._listener.close()
