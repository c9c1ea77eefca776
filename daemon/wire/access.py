"""Access, read again while the line runs: allowed clients, the server's keys, the token of HTTP."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from daemon.errors import StartError
from daemon.wire.endpoints import Gate
from daemon.wire.sockets import ServerKeys


class Access:
    """The gate of the sockets and the token of HTTP; either may be absent. `reload` may be called from any thread."""

    def __init__(
        self, gate: Gate | None, rebind: Sequence[Callable[[ServerKeys], None]], reload_token: Callable[[], list[str]]
    ) -> None:
        """`rebind` cuts the clients of each socket; `reload_token` returns the problems of HTTP's token."""
        self._gate = gate
        self._rebind, self._reload_token = rebind, reload_token
        self._reloading = threading.Lock()
        self._lost: str | None = None
        self._log: Any = structlog.get_logger("access")

    @property
    def problem(self) -> str | None:
        """Return why allowed clients of other machines cannot connect, None if they can."""
        if self._gate is not None and self._gate.has_started and not self._gate.is_alive:
            return "the authenticator has ended, so that no new client can connect: coserve reload starts it again"
        return self._lost

    def reload(self) -> dict[str, Any]:
        """Read every key and the token again; return `clients` allowed, `cut` (True if all were cut), `problems`.

        The old content of an unusable file stays in force, and the other files are still read. When this returns, no
        revoked client is connected and no message of one is read.
        """
        with self._reloading:
            problems = self._reload_token()
            if self._gate is None:
                return {"clients": 0, "cut": False, "problems": problems}
            cut, key_problems = self._gate.reload()
            problems += key_problems
            if cut or self._lost is not None:
                problems += self._cut(self._gate.keys)
        self._log.info("keys_reloaded", clients=self._gate.clients, cut=cut, problems=len(problems))
        return {"clients": self._gate.clients, "cut": cut, "problems": problems}

    def _cut(self, keys: ServerKeys) -> list[str]:
        problems: list[str] = []
        for rebind in self._rebind:
            try:
                rebind(keys)
            except StartError as error:
                problems.append(f"{error}; coserve reload tries again")
                self._log.error("endpoint_lost", problem=str(error))
        self._lost = problems[0] if problems else None
        return problems
