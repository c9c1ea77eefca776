"""Access to the daemon: checks of endpoints, `Gate` for keys, `Access` to reload keys and token."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog
import zmq
from zmq.auth.thread import ThreadAuthenticator

from daemon.errors import StartError
from daemon.wire.keys import KeyFileError, fingerprint, read_allow_list, read_server_keys, read_token, unusable
from daemon.wire.sockets import TCP, ZAP_DOMAIN, ServerKeys, ipc_problem, is_open, is_open_host

#: A refused client is logged once in this time, and at most this many different ones.
_TELL_AGAIN_S = 60.0
_REFUSED_TOLD = 32
_LAST_PORT = 65535
_ALL = {"*", "0.0.0.0", "::"}  # noqa: S104  compared, not bound


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The server's secret key file (zmq.auth certificate) and the folder of allowed clients' public keys."""

    server_key: Path
    allowed_clients: Path


def check_endpoints(
    intake: Sequence[str], results: str, control: str, curve: CurveKeys | None, http: str | None = None
) -> list[str]:
    problems = [problem for endpoint in intake for problem in _check("endpoints.intake", endpoint, curve)]
    problems += _check("endpoints.results", results, curve)
    problems += _check("endpoints.control", control, curve)
    named = [(key, endpoint) for key, endpoint in (*(("intake", one) for one in intake), ("results", results))]
    named += [("control", control), *([("http", http)] if http else [])]
    problems += [
        f"endpoints.{second}: {again} is named twice (endpoints.{first})"
        for at, (second, again) in enumerate(named)
        for first, endpoint in named[:at]
        if _is_same(endpoint, again)
    ]
    if curve is not None:
        problems += _check_keys(curve)
    return problems


def _is_same(first: str, second: str) -> bool:
    """Return True if they clash: the same path, or the same port on one address or on all."""
    one, other = urlsplit(first), urlsplit(second)
    if "ipc" in (one.scheme, other.scheme):
        return first == second
    port, hosts = one.netloc.rpartition(":")[2], {one.hostname, other.hostname}
    return (
        port not in ("*", "0") and port == other.netloc.rpartition(":")[2] and (len(hosts) == 1 or bool(hosts & _ALL))
    )


def _check(name: str, endpoint: str, curve: CurveKeys | None) -> list[str]:
    if endpoint.startswith("ipc://"):
        problem = ipc_problem(endpoint.removeprefix("ipc://"))
        return [f"{name}: {problem}"] if problem else []
    match = TCP.fullmatch(endpoint)
    if match is None:
        return [f"{name}: expected ipc://PATH or tcp://ADDRESS:PORT, not {endpoint!r}"]
    if match["port"] != "*" and int(match["port"]) > _LAST_PORT:
        return [f"{name}: {endpoint}: ports end at {_LAST_PORT}"]
    if is_open(endpoint) and curve is None:
        remedy = "set security.server_key and security.allowed_clients, or bind 127.0.0.1"
        return [f"{name}: {endpoint} can be reached from other machines, which needs CURVE: {remedy}"]
    return []


def check_http(endpoint: str | None, token: Path | None) -> list[str]:
    """Return the problems that forbid serving HTTP at `endpoint`: open without a token, an unusable token."""
    problems: list[str] = []
    if endpoint is not None and token is None and is_open_host(urlsplit(endpoint).hostname or ""):
        remedy = "set security.http_token, or bind 127.0.0.1 and put a reverse proxy before it"
        problems.append(f"endpoints.http: {endpoint} can be reached from other machines, which needs a token: {remedy}")
    return problems + [f"{key}: {problem}" for key, problem in unusable([("security.http_token", token, read_token)])]


def check_allowed_clients(curve: CurveKeys | None) -> list[str]:
    """Return the allow-list's unusable files and duplicate keys. The line starts anyway."""
    try:
        problems = read_allow_list(curve.allowed_clients).problems if curve else ()
    except OSError:
        return []  # check_endpoints reports it
    return [f"security.allowed_clients: {problem}" for problem in problems]


def _check_keys(curve: CurveKeys) -> list[str]:
    problems: list[str] = []
    try:
        read_server_keys(curve.server_key)
    except KeyFileError as error:
        problems.append(f"security.server_key: {error}")
    folder = curve.allowed_clients
    if not folder.is_dir():
        problems.append(f"security.allowed_clients: {folder} is not a folder of clients' .key files: make it (mkdir)")
    elif folder.stat().st_mode & 0o002:
        problems.append(f"security.allowed_clients: everybody may write into {folder}: chmod o-w it")
    return problems


class Gate:
    """The allow-list of CURVE clients for every socket of a context. While it does not answer, all are refused."""

    def __init__(self, context: "zmq.Context[Any]", curve: CurveKeys) -> None:
        self._context = context
        self._curve = curve
        self._clients: Mapping[str, str] = {}
        self._refused_at_s: dict[str, float] = {}
        self._log: Any = structlog.get_logger("gate")
        try:
            self.keys = read_server_keys(curve.server_key)
        except KeyFileError as error:
            raise StartError(f"security.server_key: {error}") from None
        self._authenticator = ThreadAuthenticator(context)
        self.has_started = False

    @property
    def is_alive(self) -> bool:
        """True if the authenticator runs; without it no client can connect."""
        return self._authenticator.is_alive()

    def start(self) -> None:
        """Start the authenticator; call it before any open endpoint is bound."""
        self._start_authenticator()
        self.has_started = True
        self.reload()

    def _start_authenticator(self) -> None:
        self._authenticator.configure_curve_callback(ZAP_DOMAIN.decode(), self)
        self._authenticator.start()

    def callback(self, _domain: str, key: bytes) -> bool:
        """Admit or refuse a client; pyzmq's authenticator calls this in its own thread."""
        public = key.decode("ascii")
        if public in self._clients:
            return True
        self._tell_refused(public)
        return False

    def _tell_refused(self, public: str) -> None:
        """Log a refused client once a minute: it retries several times a second, and no reply tells it why."""
        now_s = time.monotonic()
        self._refused_at_s = {key: at_s for key, at_s in self._refused_at_s.items() if now_s - at_s < _TELL_AGAIN_S}
        if public not in self._refused_at_s and len(self._refused_at_s) < _REFUSED_TOLD:
            self._refused_at_s[public] = now_s
            folder = str(self._curve.allowed_clients)
            self._log.warning("client_refused", fingerprint=fingerprint(public), folder=folder)

    def is_allowed(self, client: str) -> bool:
        return client in self._clients

    def reload(self) -> tuple[bool, list[str]]:
        """Read the allowed clients and the server's keys again; the old ones of an unreadable file stay in force.

        Return True if open connections must be cut (a client was revoked, or the server has new keys), and the problems
        of the files.
        """
        before, keys, problems = self._clients, self.keys, list[str]()
        try:
            allowed = read_allow_list(self._curve.allowed_clients)
        except OSError as error:
            problems.append(f"security.allowed_clients: {self._curve.allowed_clients}: {error.strerror}")
        else:
            self._clients = allowed.clients
            problems += [f"security.allowed_clients: {problem}" for problem in allowed.problems]
        try:
            self.keys = read_server_keys(self._curve.server_key)
        except KeyFileError as error:
            problems.append(f"security.server_key: {error}")
        if not self.is_alive:
            self._revive()
        for problem in problems:
            self._log.warning("key_not_used", problem=problem)
        return bool(before.keys() - self._clients.keys()) or keys != self.keys, problems

    @property
    def clients(self) -> int:
        return len(self._clients)

    def stop(self) -> None:
        if not self.is_alive and self._authenticator.pipe:
            self._authenticator.pipe.close(linger=0)  # pyzmq would wait forever for a thread that has ended
            self._authenticator.pipe = None  # type: ignore[assignment]
        self._authenticator.stop()

    def _revive(self) -> None:
        self._log.error("authenticator_restarted")
        self.stop()
        self._authenticator = ThreadAuthenticator(self._context)
        self._start_authenticator()


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
