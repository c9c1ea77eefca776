"""`endpoints.http`: bound by the daemon, served by a process beside the line (daemon/dashboard).

The daemon keeps the listening socket, so that clients wait for a restart of the web process instead of being refused.
"""

import socket
import sys
from collections.abc import Callable
from pathlib import Path

from daemon.host.children import ChildSpec
from daemon.wire.keys import TokenError, read_token
from daemon.wire.sockets import bind_http, url_of

NAME = "dashboard"
#: Longest pause before a restart: a page that kills the process must not silence `/metrics` and `/healthz` for long.
_LONGEST_BACK_OFF_S = 2.0


class WebPages:
    def __init__(self, config: Path, endpoint: str, token_file: Path | None, hang_up: Callable[[str], None]) -> None:
        """`hang_up` sends SIGHUP to a child. TokenError: no usable token."""
        self._config = config
        self._endpoint = endpoint
        self._token_file = token_file
        self._hang_up = hang_up
        self._listener: socket.socket | None = None
        if token_file is not None:
            read_token(token_file)

    def start(self) -> str:
        self._listener = bind_http(self._endpoint, has_token=self._token_file is not None)
        return url_of(self._listener)

    def child(self) -> ChildSpec:
        assert self._listener is not None
        fd = self._listener.fileno()
        argv = (sys.executable, "-m", "daemon.dashboard", str(self._config.resolve()), "--fd", str(fd))
        lost = "the pages, /healthz, /readyz and /metrics do not answer"
        return ChildSpec(NAME, argv, pass_fds=(fd,), beats=True, longest_back_off_s=_LONGEST_BACK_OFF_S, lost=lost)

    def reload(self) -> list[str]:
        if self._token_file is not None:
            try:
                read_token(self._token_file)
            except TokenError as error:
                return [f"security.http_token: {error}"]
            self._hang_up(NAME)
        return []

    def stop(self) -> None:
        """Close the socket; the process is stopped with the other children."""
        if self._listener is not None:
            self._listener.close()
