"""Where sockets may be bound: whatever other machines can reach only behind CURVE with an allow-list of clients."""

import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from daemon.errors import StartError
from daemon.sockets import TCP, ServerKeys, ipc_problem, is_open


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The server's secret key file (zmq.auth certificate) and the folder of allowed clients' public keys."""

    server_key: Path
    allowed_clients: Path


def check_endpoints(intake: Sequence[str], results: str, control: str, curve: CurveKeys | None) -> list[str]:
    """Everything that forbids to bind these endpoints, each with what to do; empty where they may be bound."""
    problems = [problem for endpoint in intake for problem in _check("endpoints.intake", endpoint, curve)]
    problems += _check("endpoints.results", results, curve)
    if control.startswith("tcp://"):
        problems.append(f"endpoints.control: {control} is not ipc: control is never reached over the network")
    else:
        problems += _check("endpoints.control", control, curve)
    named = [*intake, results, control]
    twice = sorted(
        {endpoint for endpoint in named if named.count(endpoint) > 1 and not endpoint.endswith((":*", ":0"))}
    )
    problems += [f"endpoints: {endpoint} is named twice" for endpoint in twice]
    if curve is not None:
        problems += _check_keys(curve)
    return problems


def _check(name: str, endpoint: str, curve: CurveKeys | None) -> list[str]:
    if endpoint.startswith("ipc://"):
        problem = ipc_problem(endpoint.removeprefix("ipc://"))
        return [f"{name}: {problem}"] if problem else []
    match = TCP.fullmatch(endpoint)
    if match is None or (match["port"] != "*" and int(match["port"]) > 65535):
        return [f"{name}: expected ipc://PATH or tcp://ADDRESS:PORT, not {endpoint!r}"]
    if is_open(endpoint) and curve is None:
        remedy = "set security.server_key and security.allowed_clients, or bind 127.0.0.1"
        return [f"{name}: {endpoint} can be reached from other machines, which needs CURVE: {remedy}"]
    return []


def _check_keys(curve: CurveKeys) -> list[str]:
    problems: list[str] = []
    try:
        if zmq.auth.load_certificate(curve.server_key)[1] is None:
            problems.append(f"security.server_key: {curve.server_key} has no secret key: name the .key_secret file")
        elif stat.S_IMODE(curve.server_key.stat().st_mode) & 0o077:
            problems.append(f"security.server_key: {curve.server_key} can be read by others: chmod 600 it")
    except (OSError, ValueError) as error:
        problems.append(f"security.server_key: {curve.server_key} is not a key file: {error}")
    if not curve.allowed_clients.is_dir():
        problems.append(f"security.allowed_clients: {curve.allowed_clients} is not a folder of clients' .key files")
    return problems


class Gate:
    """The daemon's allow-list of CURVE clients: one authenticator for every socket of a ZeroMQ context."""

    def __init__(self, context: "zmq.Context[Any]", curve: CurveKeys) -> None:
        self._curve = curve
        self.keys = _server_keys(curve)
        self._authenticator = ThreadAuthenticator(context)

    def start(self) -> None:
        """Answer libzmq's questions from now on. Before any open endpoint is bound: without it everybody may in."""
        self._authenticator.start()
        self.reload()

    def reload(self) -> None:
        """Read the folder of allowed clients again; connections that stand are kept."""
        self._authenticator.configure_curve(domain="*", location=self._curve.allowed_clients)

    def stop(self) -> None:
        self._authenticator.stop()


def _server_keys(curve: CurveKeys) -> ServerKeys:
    try:
        public, secret = zmq.auth.load_certificate(curve.server_key)
    except (OSError, ValueError) as error:
        raise StartError(f"security.server_key: {curve.server_key} is not a key file: {error}") from None
    if secret is None:
        raise StartError(f"security.server_key: {curve.server_key} has no secret key: name the .key_secret file")
    return ServerKeys(public, secret)
