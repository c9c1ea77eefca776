"""Access, read again while the line runs: allowed clients, the server's keys, the token of HTTP."""

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import structlog

from daemon.errors import StartError
from daemon.wire.endpoints import Gate
from daemon.wire.sockets import ServerKeys


class Guarded(Protocol):
    """A socket's driver with endpoints that other machines may reach."""

    def rebind(self, keys: ServerKeys) -> None: ...


class HttpToken(Protocol):
    """A server of HTTP: the daemon's own, or its web pages."""

    def reload(self) -> list[str]:
        """Read the token again; what is wrong with it, and then the old one stays."""
        ...


class Access:
    """The gate of the sockets and the token of HTTP; either may be absent. `reload` may be called from any thread."""

    def __init__(self, gate: Gate | None, sockets: Sequence[Guarded], http: HttpToken | None) -> None:
        self._gate = gate
        self._sockets, self._http = sockets, http
        self._reloading = threading.Lock()
        self._lost: str | None = None
        self._log: Any = structlog.get_logger("access")

    @property
    def problem(self) -> str | None:
        """Why clients beyond this machine cannot come in although they may, None where they can."""
        if self._gate is not None and self._gate.has_started and not self._gate.is_alive:
            return "the authenticator has ended, so that no new client can connect: coserve reload starts it again"
        return self._lost

    def reload(self) -> dict[str, Any]:
        """Read every key and the token again: `clients` allowed, `cut` (their connections were), `problems`.

        A file that cannot be used leaves what it said before in force, and stops nothing else. When this returns, no
        revoked client is heard, and none is connected any more.
        """
        with self._reloading:
            problems = self._http.reload() if self._http else []
            if self._gate is None:
                return {"clients": 0, "cut": False, "problems": problems}
            cut, found = self._gate.reload()
            problems += found
            if cut or self._lost is not None:
                problems += self._cut(self._gate.keys)
        self._log.info("keys_reloaded", clients=self._gate.clients, cut=cut, problems=len(problems))
        return {"clients": self._gate.clients, "cut": cut, "problems": problems}

    def _cut(self, keys: ServerKeys) -> list[str]:
        problems: list[str] = []
        for guarded in self._sockets:
            try:
                guarded.rebind(keys)
            except StartError as error:
                problems.append(f"{error}; coserve reload tries again")
                self._log.error("endpoint_lost", problem=str(error))
        self._lost = problems[0] if problems else None
        return problems
