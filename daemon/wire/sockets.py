"""Binding: ipc files with mode 0660 and never over a living daemon's, TCP beyond loopback only behind CURVE."""

import contextlib
import errno
import ipaddress
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq

from daemon.errors import StartError
from daemon.host.folders import make_folder

#: sun_path of a Unix socket, without its final zero byte.
MAX_IPC_PATH_BYTES = 107
TCP = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^:\[\]]+):(?P<port>\d{1,9}|\*)")
#: The ZAP domain of CURVE sockets. It is enforced: a client is refused if the authenticator does not answer.
ZAP_DOMAIN = b"coserve"
_IPC_MODE = 0o660
#: Connections that may wait for libzmq: TCP drops the rest of a burst, and their clients try again after a second.
_TCP_BACKLOG, _IPC_BACKLOG, _HTTP_BACKLOG = 256, 100, 128
_REBIND_S = 5.0
_DEFAULT_ADVICE = "`coserve doctor CONFIG` names the program that uses it; `endpoints` in CONFIG says where to listen"
_BIND_ADVICE: dict[int | None, str] = {
    errno.EADDRNOTAVAIL: "no network card of this machine has that address (yet)",
    errno.ENODEV: "this machine has no such network card (yet)",
    errno.EACCES: "ports below 1024 are for root",
}


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The daemon's CURVE key pair, Z85 text."""

    public: bytes
    secret: bytes = field(repr=False)


def is_open(endpoint: str) -> bool:
    """Return True if other machines can reach this endpoint: TCP on any address but loopback."""
    match = TCP.fullmatch(endpoint)
    if match is None:
        return endpoint.startswith("tcp://")
    return is_open_host(match["host"].strip("[]"))


def is_open_host(host: str) -> bool:
    """Return True if other machines can reach `host`: any address but loopback, and any other name."""
    if host == "localhost":
        return not _is_here(host)
    # "*", an interface, a name, 127.1 or 2130706433 may mean any address
    return host != "lo" and not _is_loopback_address(host)


def is_loopback_name(host: str) -> bool:
    """Return True if a `Host` header has a name or address that means this machine wherever it is resolved."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    return name == "localhost" or _is_loopback_address(name)


def _is_loopback_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _is_here(name: str) -> bool:
    """Return True if `name` means loopback only on this machine: /etc/hosts may differ."""
    try:
        addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(addresses) and all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in addresses)


def ipc_problem(path: str) -> str | None:
    size = len(os.fsencode(path))
    if not path or path in ("*", "@") or path.startswith("@"):
        return f"ipc://{path} names no file: its access could not be limited to a group"
    if size > MAX_IPC_PATH_BYTES:
        return f"the socket's path {path} is {size} bytes long, {MAX_IPC_PATH_BYTES} at most: name a shorter one"
    return None


def bind(sock: "zmq.Socket[Any]", endpoints: Sequence[str], keys: ServerKeys | None = None) -> list[str]:
    """Bind local endpoints, then open ones with CURVE: libzmq fixes security when it binds. Raises StartError."""
    bound: dict[str, str] = {}
    for endpoint in sorted(endpoints, key=is_open):
        if is_open(endpoint):
            if keys is None:
                raise StartError(f"{endpoint} can be reached from other machines, which needs CURVE")
            _require_curve(sock, keys)
        bound[endpoint] = _bind_ipc(sock, endpoint) if endpoint.startswith("ipc://") else _bind_tcp(sock, endpoint)
    return [bound[endpoint] for endpoint in endpoints]


def bind_http(endpoint: str, *, has_token: bool) -> socket.socket:
    """Return a listening socket for `endpoint`; StartError if that fails, or if it would be open without a token."""
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, parts.port or 0), family=family, backlog=_HTTP_BACKLOG)
    except OSError as error:
        advice = _BIND_ADVICE.get(error.errno, _DEFAULT_ADVICE)
        raise StartError(f"endpoints.http {endpoint}: {error.strerror or error}; {advice}") from None
    if not has_token and is_open_host(str(listener.getsockname()[0])):
        listener.close()
        raise StartError(f"endpoints.http: {endpoint} can be reached from other machines: it needs a token")
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def rebind(sock: "zmq.Socket[Any]", bound: Sequence[str], keys: ServerKeys) -> None:
    """Bind those of the `bound` endpoints that are open again, under `keys`; local ones stay bound.

    libzmq cuts every connection of an endpoint that is unbound. Clients reconnect automatically and are asked for their
    key again. StartError if an endpoint could not be bound within 5 s.
    """
    for endpoint in filter(is_open, bound):
        linger, sock.linger = sock.linger, 0  # a client that is cut gets none of its waiting messages
        with contextlib.suppress(zmq.ZMQError):  # it was not bound: the last attempt failed
            sock.unbind(endpoint)
        sock.linger = linger
        _require_curve(sock, keys)
        until_s = time.monotonic() + _REBIND_S
        while True:
            try:
                _bind_tcp(sock, endpoint)
                break
            except StartError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.01)  # libzmq closes the old listener in a thread of its own


def _require_curve(sock: "zmq.Socket[Any]", keys: ServerKeys) -> None:
    """Require CURVE for later bindings; clients are refused while the authenticator does not answer."""
    sock.curve_publickey = keys.public
    sock.curve_secretkey = keys.secret
    sock.curve_server = True
    sock.zap_domain = ZAP_DOMAIN
    sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def _bind_tcp(sock: "zmq.Socket[Any]", endpoint: str) -> str:
    sock.ipv6 = "[" in endpoint
    sock.backlog = _TCP_BACKLOG
    try:
        sock.bind(endpoint)
    except zmq.ZMQError as error:
        advice = _BIND_ADVICE.get(error.errno, _DEFAULT_ADVICE)
        raise StartError(f"cannot bind {endpoint}: {zmq.strerror(error.errno or 0)}; {advice}") from None
    bound = sock.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    if is_open(bound) and not is_open(endpoint):
        sock.unbind(bound)
        raise StartError(f"{endpoint} is {bound} here, which other machines can reach: that needs CURVE")
    return bound


def _bind_ipc(sock: "zmq.Socket[Any]", endpoint: str) -> str:
    path = Path(endpoint.removeprefix("ipc://"))
    problem = ipc_problem(str(path))
    if problem:
        raise StartError(problem)
    try:
        make_folder(path.parent)
        _remove_stale(path)
        sock.backlog = _IPC_BACKLOG
        sock.bind(endpoint)
        path.chmod(_IPC_MODE)
    except (zmq.ZMQError, OSError) as error:
        raise StartError(f"cannot bind {endpoint}: {error.strerror or error}") from None
    return endpoint


def _remove_stale(path: Path) -> None:
    """Remove the socket of a process that is gone. libzmq would remove anything here, a living daemon's socket too."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartError(
            f"cannot bind ipc://{path}: a file that is not a socket is in the way: remove it or name another"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise StartError(f"cannot bind ipc://{path}: a socket is in the way ({error.strerror})") from None
    raise StartError(f"cannot bind ipc://{path}: another process listens there")


def remove_files(endpoints: Sequence[str]) -> None:
    """Remove the files of bound ipc endpoints, which libzmq leaves; before the socket closes, while they are ours."""
    for endpoint in endpoints:
        if endpoint.startswith("ipc://"):
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


def end_context(context: "zmq.Context[Any]", within_s: float = 3.0) -> bool:
    """End a context whose sockets are closed; return False if libzmq did not finish `within_s`.

    It can wait for ever, about once in fifty times, for subscribers that never read and vanish while their socket here
    closes. Then threads of libzmq remain, which end with the process.
    """
    ending = threading.Thread(target=context.destroy, kwargs={"linger": 0}, name="end-context", daemon=True)
    ending.start()
    ending.join(within_s)
    return not ending.is_alive()
