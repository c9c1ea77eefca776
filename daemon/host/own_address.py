"""The address under which other PCs reach this one, for a socket that listens on every address."""

import socket
from ipaddress import IPv4Address
from urllib.parse import urlsplit

import psutil

EVERYWHERE = ("0.0.0.0", "::", "*")  # noqa: S104 - compared, not bound


def reachable(url: str) -> str:
    """Return `url`, with the address of this PC if it names all addresses."""
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
