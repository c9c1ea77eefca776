"""Binding: ipc files with mode 0660 and never over a living daemon's, TCP beyond loopback only behind CURVE."""

import ipaddress
import os
import re
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from daemon.errors import StartError
from daemon.folders import make_folder

#: sun_path of a Unix socket, without its final zero byte.
MAX_IPC_PATH_BYTES = 107
TCP = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^:\[\]]+):(?P<port>\d{1,5}|\*)")
_IPC_MODE = 0o660


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The daemon's CURVE key pair, Z85 text."""

    public: bytes
    secret: bytes = field(repr=False)


def is_open(endpoint: str) -> bool:
    """Whether other machines can reach this endpoint: TCP on any address but loopback."""
    match = TCP.fullmatch(endpoint)
    if match is None:
        return endpoint.startswith("tcp://")
    host = match["host"].strip("[]")
    if host in ("localhost", "lo"):
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True  # "*" or the name of an interface


def ipc_problem(path: str) -> str | None:
    """Why no socket can be bound at `path`, with what to do; None where one can."""
    size = len(os.fsencode(path))
    if not path or path in ("*", "@") or path.startswith("@"):
        return f"ipc://{path} names no file: its access could not be limited to a group"
    if size > MAX_IPC_PATH_BYTES:
        return f"the socket's path {path} is {size} bytes long, {MAX_IPC_PATH_BYTES} at most: name a shorter one"
    return None


def bind(sock: "zmq.Socket[Any]", endpoints: Sequence[str], keys: ServerKeys | None = None) -> list[str]:
    """Bind every endpoint and answer them as bound (ports filled in); StartError says which cannot, and why.

    A socket's security is that of the moment of binding: local endpoints first without, then open ones with CURVE.
    """
    bound: dict[str, str] = {}
    for endpoint in sorted(endpoints, key=is_open):
        if is_open(endpoint):
            if keys is None:
                raise StartError(f"{endpoint} can be reached from other machines, which needs CURVE")
            sock.curve_publickey = keys.public
            sock.curve_secretkey = keys.secret
            sock.curve_server = True
        bound[endpoint] = _bind_ipc(sock, endpoint) if endpoint.startswith("ipc://") else _bind_tcp(sock, endpoint)
    return [bound[endpoint] for endpoint in endpoints]


def _bind_tcp(sock: "zmq.Socket[Any]", endpoint: str) -> str:
    sock.ipv6 = "[" in endpoint
    try:
        sock.bind(endpoint)
    except zmq.ZMQError as error:
        raise StartError(f"cannot bind {endpoint}: {error.strerror}; is another program using it?") from None
    return sock.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def _bind_ipc(sock: "zmq.Socket[Any]", endpoint: str) -> str:
    path = Path(endpoint.removeprefix("ipc://"))
    problem = ipc_problem(str(path))
    if problem:
        raise StartError(problem)
    try:
        make_folder(path.parent)
        _remove_stale(path)
        sock.bind(endpoint)
        path.chmod(_IPC_MODE)
    except zmq.ZMQError as error:
        raise StartError(f"cannot bind {endpoint}: {error.strerror}") from None
    except OSError as error:
        raise StartError(f"cannot bind {endpoint}: {error.strerror or error}") from None
    return endpoint


def _remove_stale(path: Path) -> None:
    """Remove the socket of a process that is gone. libzmq would remove anything here, a living daemon's socket too."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartError(f"cannot bind ipc://{path}: a file that is no socket is in the way; remove it or name another")
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


def keep_alive(sock: "zmq.Socket[Any]") -> None:
    """Let the kernel find TCP peers that vanished without a word, within half a minute."""
    sock.tcp_keepalive = 1
    sock.tcp_keepalive_idle = 15
    sock.tcp_keepalive_intvl = 5
    sock.tcp_keepalive_cnt = 3
