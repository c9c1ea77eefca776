"""Checks of permissions, secrets, ports and connections."""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from daemon.config.settings import Config
from daemon.host.machine import EVERYWHERE
from daemon.wire.keys import open_to
from daemon.wire.sockets import TCP
from tools.setup import service_files
from tools.setup.doctor.context import DoctorContext, Finding, acting_as, database_of, ok, warn, wrong
from tools.terminal.console import as_typed

_CONNECT_S = 2.0


def permissions(context: DoctorContext) -> Iterator[Finding]:
    """Check each folder and file with the rights of the line's user."""
    config, user = context.config, context.user.pw_name
    if config is None:
        return
    if context.is_service and user != "coserve":
        yield wrong("permissions", "the service's user coserve does not exist", "coserve install-service makes it")
    refused: list[Finding] = []
    with acting_as(context.user) as is_possible:
        if not is_possible:
            so = f"only root can look with the rights of {user}"
            yield warn("permissions", so, f"sudo {as_typed(f'doctor {context.path}')}")
            return
        for name, path in _read(context, config).items():
            if problem := _cannot(path, os.R_OK):
                refused.append(wrong("permissions", f"{name}: {user} cannot read {path}", problem))
        for name, folder in _written(context, config).items():
            if problem := _cannot(folder, os.W_OK | os.X_OK):
                remedy = problem if folder.is_dir() else f"{problem}; or make it: install -d -o {user} {folder}"
                refused.append(wrong("permissions", f"{name}: {user} cannot write to {folder}", remedy))
    yield from refused
    if not refused:
        yield ok("permissions", f"{user} can read and write all that the line needs")


def _read(context: DoctorContext, config: Config) -> dict[str, Path]:
    assert context.path is not None
    files = {"configuration": context.path, "rules": config.rules, "catalog": config.catalog}
    files |= service_files.secrets(config)
    return {name: file for name, file in files.items() if file.exists()}


def _written(context: DoctorContext, config: Config) -> dict[str, Path]:
    places = dict(context.folders)
    for endpoint in (*config.endpoints.intake, config.endpoints.control):
        if endpoint.startswith("ipc://"):
            places.setdefault("sockets", Path(endpoint.removeprefix("ipc://")).parent)
    database = database_of(config)
    if database is not None and database.exists():
        places["database's file"] = database
    return places


def _cannot(path: Path, mode: int) -> str | None:
    """Return how to grant a missing right, None if it is there. A missing folder needs the right of its parent."""
    present = next(place for place in (path, *path.parents) if place.exists())
    rights = mode if present == path or not mode & os.W_OK else os.W_OK | os.X_OK
    if present.is_file() and present == path:
        rights &= ~os.X_OK
    if os.access(present, rights, effective_ids=True):
        return None
    with suppress(OSError):
        state = present.stat()
        return f"{present} is {stat.filemode(state.st_mode)} of {_name(state.st_uid)}: chown or chmod it"
    return f"chown or chmod {present}"


def _name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def secrets(context: DoctorContext) -> Iterator[Finding]:
    """Report secrets that others can read; a start of the line would refuse them too."""
    if context.config is None:
        return
    for key, file in service_files.secrets(context.config).items():
        if not file.exists():
            continue
        readers = open_to(file)
        if readers:
            so = f"{key}: {file} can be read by {readers}"
            yield wrong("secrets", so, f"chmod 600 {file}, and make a new one if others may have read it")
        else:
            yield ok("secrets", f"{key}: {file} is for its owner alone")


def brokers(context: DoctorContext) -> Iterator[Finding]:
    """Try to connect to each server that gets results."""
    consumers = context.config.consumers if context.config else {}
    for name, server in [(name, server) for name, consumer in consumers.items() for server in consumer.servers()]:
        where = f"consumers.{name}: {server[0]}:{server[1]}"
        try:
            socket.create_connection(server, timeout=_CONNECT_S).close()
        except OSError as error:
            so = f"{where} does not take a connection ({error.strerror or error})"
            yield warn(
                "consumers", so, "nothing is lost: results wait here; look at the broker, its port, the firewall"
            )
        else:
            yield ok("consumers", f"{where} takes connections")


def ports(context: DoctorContext) -> Iterator[Finding]:
    """Check each port (ours, free, or taken by another program) and each address."""
    if context.config is None:
        return
    endpoints = context.config.endpoints
    named = {f"endpoints.intake {item}": item for item in endpoints.intake} | {"endpoints.results": endpoints.results}
    if endpoints.http:
        named["endpoints.http"] = endpoints.http
    listening = [
        (*map(str, item.laddr), item.pid)  # address, port
        for item in psutil.net_connections("tcp")
        if item.status == psutil.CONN_LISTEN and item.laddr
    ]
    taken = 0
    for name, endpoint in named.items():
        host, port = _address(endpoint)
        if host is None or not port:
            continue
        if problem := _no_such_address(host):
            taken += 1
            yield wrong("ports", f"{name}: {problem}", "name an address of this machine (ip address), or 127.0.0.1")
        owner = next((pid for ip, its, pid in listening if its == str(port) and _overlap(ip, host)), -1)
        if owner == -1 or _is_ours(owner, context):
            continue
        taken += 1
        so = f"{name}: port {port} is taken by {_who(owner)}"
        yield wrong("ports", so, "end that program, or name another port in coserve.yaml")
    if not taken:
        yield ok("ports", f"{len(named)} endpoints: their ports are {'the line’s' if context.is_running else 'free'}")


def _address(endpoint: str) -> tuple[str | None, int]:
    if endpoint.startswith("http://"):
        parts = urlsplit(endpoint)
        return parts.hostname, parts.port or 0
    match = TCP.fullmatch(endpoint)
    if match is None or match["port"] == "*":
        return None, 0
    return match["host"].strip("[]"), int(match["port"])


def _no_such_address(host: str) -> str | None:
    """Return a problem if no network card has this address; names are resolved by the daemon."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return f"no network card of this machine has the address {host}"
    return None


def _overlap(first: str, second: str) -> bool:
    second = "127.0.0.1" if second == "localhost" else second
    return first == second or first in EVERYWHERE or second in EVERYWHERE


def _is_ours(pid: int | None, context: DoctorContext) -> bool:
    """Return True for the daemon or its child. A hidden process number counts while our daemon answers."""
    if pid is None:
        return context.is_running
    try:
        family = [pid, *(parent.pid for parent in psutil.Process(pid).parents())]
    except psutil.Error:
        return context.is_running
    return context.daemon_pid in family


def _who(pid: int | None) -> str:
    if pid is None:
        return "another user's program (root sees which)"
    try:
        return f"{psutil.Process(pid).name()}, process {pid}"
    except psutil.Error:
        return f"process {pid}"
