"""Notifications to the service manager: sd_notify(3), one datagram for each.

Packages such as systemd-watchdog cannot send `RELOADING=1` and its time in one datagram, and use the wall clock.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import structlog

#: Time limit of one datagram to a manager that does not read its socket.
_SEND_WITHIN_S = 1.0
#: A long start (a new schema for a large database) asks for this much more time, this often, and no longer than that.
_MORE_TIME_S = 30.0
_ASK_EVERY_S = 10.0
_START_AT_MOST_S = 3600.0


class Notifier:
    """Speaks to `$NOTIFY_SOCKET`, a path or an abstract address; without one nothing is sent. For any thread."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self._log: Any = structlog.get_logger("notify")
        self.watchdog_s = _watchdog_s(environ) if self._address else None
        self._status = ""

    def ready(self, status: str) -> None:
        """Report that the start, or a reload, is done."""
        self._tell("READY=1", _sentence(status))

    def status(self, status: str) -> None:
        """Set the sentence of `systemctl status`; sent only when it changes."""
        if status != self._status:
            self._tell(_sentence(status))
            self._status = status

    def alive(self) -> None:
        """Send the watchdog's ping."""
        self._tell("WATCHDOG=1")

    def reloading(self, status: str) -> None:
        """Report that a reload begins; `ready` ends it."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", _sentence(status))

    def stopping(self, status: str) -> None:
        self._tell("STOPPING=1", _sentence(status))

    def extend(self, seconds: float) -> None:
        """Ask for `seconds` more time for a start or a stop that takes long, so that it does not count as a hang."""
        self._tell(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}", "WATCHDOG=1")

    @contextmanager
    def patience(self) -> Iterator[None]:
        """While the body runs, ask for more time every ten seconds, for an hour at most."""
        done = threading.Event()

        def ask() -> None:
            until_s = time.monotonic() + _START_AT_MOST_S
            while not done.wait(_ASK_EVERY_S) and time.monotonic() < until_s:
                self.extend(_MORE_TIME_S)

        asking = threading.Thread(target=ask, name="patience", daemon=True)
        if self._address:
            self.extend(_MORE_TIME_S)
            asking.start()
        try:
            yield
        finally:
            done.set()
            if asking.ident is not None:
                asking.join()

    def _tell(self, *assignments: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(_SEND_WITHIN_S)
                sock.sendto("\n".join(assignments).encode(errors="replace"), self._address)
        except OSError as error:
            self._log.warning("not_notified", news=assignments[0], error=str(error))


def _address(notify_socket: str) -> str:
    """Return the address to send to; empty without a manager, or for vsock, which is not supported."""
    if notify_socket.startswith("@"):
        return "\0" + notify_socket[1:]
    return notify_socket if notify_socket.startswith("/") else ""


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    """Return the seconds within which the manager expects `alive`; None without a watchdog for this process."""
    usec, process = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or int(usec) == 0 or process not in ("", str(os.getpid())):
        return None
    return int(usec) / 1e6


def _sentence(status: str) -> str:
    return f"STATUS={' '.join(status.split())}"
