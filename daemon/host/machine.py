"""This PC and the process on it: its address for others, its file handles, the owners of our import packages."""

import resource
import socket
from importlib import import_module
from importlib.metadata import packages_distributions
from ipaddress import IPv4Address
from pathlib import Path
from urllib.parse import urlsplit

import psutil

EVERYWHERE = ("0.0.0.0", "::", "*")  # noqa: S104 - compared, not bound
#: Upper bound for systems that set no limit.
_MAX_HANDLES = 65_536
#: The distributions that may own each package. The camera's side is also one of its own.
OWNERS = {name: {"coserve"} for name in ("daemon", "experts", "routing_rules", "tools")}
OWNERS["coserve_client"] = {"coserve", "coserve-client"}


def reachable(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{own_address()}:{parts.port}" if parts.hostname in EVERYWHERE else url


def own_address() -> str:
    """Return the IPv4 address of the first network that is up; without one, this PC's name."""
    up = {name for name, network in psutil.net_if_stats().items() if network.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses if name in up else ():
            if entry.family == socket.AF_INET:
                address = IPv4Address(entry.address)
                if not (address.is_loopback or address.is_link_local):
                    return entry.address
    return socket.gethostname()


def raise_handle_limit() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = _MAX_HANDLES if hard == resource.RLIM_INFINITY else min(hard, _MAX_HANDLES)
    if soft != resource.RLIM_INFINITY and soft < possible:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    return possible


def handle_shares(handles: int) -> dict[str, int]:
    """Return the connections that each socket accepts; most handles stay for files and children."""
    return {"intake": min(2048, handles // 8), "results": min(1024, handles // 16), "control": min(64, handles // 32)}


def foreign_owners() -> dict[str, list[str]]:
    distributions = packages_distributions()
    home = Path(__file__).resolve().parents[2]
    foreign: dict[str, list[str]] = {}
    for name, owners in OWNERS.items():
        others = sorted(set(distributions.get(name, [])) - owners)
        folder = Path(next(iter(import_module(name).__path__))).resolve()
        if folder.parent not in (home, home / "tools" / "client"):
            others.append(str(folder))
        if others:
            foreign[name] = others
    return foreign
