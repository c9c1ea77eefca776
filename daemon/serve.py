"""`coserve run`: start the line, wait for a signal, stop it in order (docs/service.md)."""

import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
from logging_journald import check_journal_stream

from daemon.app import App
from daemon.dispatch.pool import Devices
from daemon.errors import ConfigError, StartError
from daemon.host.logs import configure_logs
from daemon.host.machine import foreign_owners
from daemon.line.line import load_line
from daemon.units import printable

#: Time limit of one datagram to a manager that does not read its socket.
_SEND_WITHIN_S = 1.0
#: A long start (a new schema for a large database) asks for this much more time, this often, and no longer than that.
_MORE_TIME_S = 30.0
_ASK_EVERY_S = 10.0
_START_AT_MOST_S = 3600.0


class Notifier:
    """Speaks to `$NOTIFY_SOCKET` (sd_notify(3)), if any. Any thread.

    Packages such as systemd-watchdog cannot send `RELOADING=1` and its time in one datagram.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self._log: Any = structlog.get_logger("notify")
        self.watchdog_s = _watchdog_s(environ) if self._address else None
        self._status = ""

    def ready(self, status: str) -> None:
        self._tell("READY=1", _sentence(status))

    def status(self, status: str) -> None:
        """Set the sentence of `systemctl status`; sent only when it changes."""
        if status != self._status:
            self._tell(_sentence(status))
            self._status = status

    def alive(self) -> None:
        self._tell("WATCHDOG=1")

    def reloading(self, status: str) -> None:
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", _sentence(status))

    def stopping(self, status: str) -> None:
        self._tell("STOPPING=1", _sentence(status))

    def extend(self, seconds: float) -> None:
        """Ask for `seconds` more time for a long start or stop, so that it does not count as a hang."""
        self._tell(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}", "WATCHDOG=1")

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Ask for more time every ten seconds while the body runs, for an hour at most."""
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


_STARTING_POLL_S = 0.02
_POLL_S = 0.2
_READY_WITHIN_S = 10.0
#: A probe goes through the line this often; oftener where the watchdog is impatient.
_PROBE_S = 5.0
#: A probe that one thread has held for this long is logged, and again each time the duration doubles.
_SLOW_S = 10.0
#: The sentence of `systemctl status` is looked at this often.
_STATUS_S = 1.0
#: A drain, or a copy of the database, that goes on asks for this much more time about once a second.
_DRAIN_EXTENSION_S = 15.0


class _Signals:
    """Requests of signals. A second request to stop means: at once."""

    def __init__(self) -> None:
        self.stop, self.hurry, self.reload = threading.Event(), threading.Event(), threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: (self.hurry if self.stop.is_set() else self.stop).set())
        signal.signal(signal.SIGHUP, lambda *_: self.reload.set())


def serve(config: Path, devices: Devices | None = None, record: Path | None = None, note: str | None = None) -> int:
    """Run the daemon of `config` until SIGTERM or SIGINT, on this PC's devices unless others are given.

    `record` is the file for the scheduler's calls, in place of the one in `config`; `note` is why it starts. Return the
    exit status: 0; 2, with one line on stderr, if it could not start; 1 if a defect ended it.
    """
    configure_logs(sys.stderr)
    faulthandler.enable()  # the watchdog ends a daemon that hangs by SIGABRT: the log then has each thread's stack
    signals, notifier = _Signals(), Notifier()
    app = _start(config, notifier, devices, record, note)
    status = 2 if app is None else _run(app, notifier, signals)
    _leave_threads_behind(status)
    return status


def _start(
    config: Path, notifier: Notifier, devices: Devices | None, record: Path | None, note: str | None
) -> App | None:
    """Return the running line; None, and one line on stderr, if it could not start."""
    try:
        with notifier.patience():
            _refuse_foreign_packages()
            app = App(load_line(config, record=record), config, notifier.status, devices=devices, note=note)
            app.start()
    except ConfigError as error:
        problems = error.problems
    except Exception as error:  # noqa: BLE001 - a defect, or a machine at its limits (threads, memory)
        structlog.get_logger("serve").exception("start_failed")
        problems = (f"{config}: {type(error).__name__}: {error}",)
    else:
        return app
    more = len(problems) - 1
    rest = f" (and {more} more: coserve check {config})" if more else ""
    first = printable(problems[0].replace("\n", " "))
    notifier.status(f"cannot start: {first}")
    priority = "<3>" if check_journal_stream() else ""
    print(f"{priority}coserve: cannot start: {first}{rest}", file=sys.stderr)
    return None


def _run(app: App, notifier: Notifier, signals: _Signals) -> int:
    """Watch the line until a signal says stop, then stop it. Return 1 if a defect of ours ended either."""
    log: Any = structlog.get_logger("serve")
    status = 0
    try:
        _Watch(app, notifier, signals).keep()
    except Exception:
        log.exception("watchdog_failed")
        status = 1
    notifier.stopping("stopping: running batches finish, what waits stays in the journal")

    def tell(progress: str) -> None:
        notifier.status(f"stopping: {progress}")
        notifier.extend(_DRAIN_EXTENSION_S)

    def goes_on(backlog: int) -> bool:
        tell(f"{backlog} images are still to be judged")
        return not signals.hurry.is_set()

    try:
        app.stop(goes_on, tell)
    except Exception:
        log.exception("stop_defect")
        status = 1
    return status


def _leave_threads_behind(status: int) -> None:
    """Exit here if threads are left: a batch or a load goes on, or hangs, or a stop has failed.

    The interpreter's own exit would wait for some, and end others in the middle of native code, which aborts the
    process. Everything durable is closed by now, or is as a kill would leave it.
    """
    left = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    if left:
        structlog.get_logger("serve").warning("threads_left_behind", threads=", ".join(left))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class _Watch:
    """The main thread while the line runs: signals, probes, and reports of both to the service manager."""

    def __init__(self, app: App, notifier: Notifier, signals: _Signals) -> None:
        self._app = app
        self._notifier = notifier
        self._signals = signals
        self._probe = app.probe
        self._probe_every_s = min(_PROBE_S, (notifier.watchdog_s or _PROBE_S * 4) / 4)
        self._probe_at_s = 0.0
        self._status_at_s = 0.0
        self._heard = 0
        self._complain_after_s = _SLOW_S
        self._reloading: threading.Thread | None = None
        self._log: Any = structlog.get_logger("serve")

    def keep(self) -> None:
        # Images are served at once, so a long fill or a slow model delays no image.
        ready_by_s = time.monotonic() + _READY_WITHIN_S
        is_announced = False
        while not self._signals.stop.wait(_POLL_S if is_announced else _STARTING_POLL_S):
            self._probe_line()
            self._look_after_reload()
            if not is_announced and self._heard and (self._app.operations.is_begun or time.monotonic() > ready_by_s):
                # Modules, rules and the first experts stay: a full garbage collection would go through all of torch's
                # objects, and nothing else runs for a quarter of a second.
                gc.freeze()
                print(f"coserve ready: {self._app.describe()}", flush=True)
                is_announced = True

    def _probe_line(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._probe_at_s:
            self._probe.send()
            self._probe_at_s = now_s + self._probe_every_s
        came_through = self._probe.came_through
        if came_through > self._heard:
            if not self._heard:
                self._notifier.ready(self._app.operations.sentence())
            self._notifier.alive()
            self._heard = came_through
            self._complain_after_s = _SLOW_S
        held = self._probe.held_by()
        if held is not None and held[1] > self._complain_after_s:
            self._log.error("line_stuck", thread=held[0], for_s=round(held[1], 1))
            self._complain_after_s *= 2
        if self._heard and now_s >= self._status_at_s:
            stuck = held is not None and held[1] > _SLOW_S
            self._notifier.status(
                f"stuck: the {held[0]} thread does not answer" if held and stuck else self._app.operations.sentence()
            )
            self._status_at_s = now_s + _STATUS_S

    def _look_after_reload(self) -> None:
        """Run reloads one after another in a thread of their own: they may wait for disks and threads."""
        if self._reloading is not None and not self._reloading.is_alive():
            self._reloading = None
            self._notifier.ready(self._app.operations.sentence())
        if self._reloading is None and self._signals.reload.is_set():
            self._signals.reload.clear()
            self._notifier.reloading("reloading rules and catalog")
            self._reloading = threading.Thread(
                target=self._app.operations.reload_or_say_why, name="reload", daemon=True
            )
            self._reloading.start()


def _refuse_foreign_packages() -> None:
    foreign = foreign_owners()
    if foreign:
        names = "; ".join(f"{name} is also provided by {', '.join(owners)}" for name, owners in foreign.items())
        raise StartError(f"{names}: CoServe needs an environment of its own (make demo makes one)")
