"""`coserve run`: start the line, one line when it is ready, wait for a signal, stop it in order."""

import signal
import sys
import threading
import time
from pathlib import Path

import structlog

from daemon.app import App
from daemon.errors import ConfigError, StartError
from daemon.guard import foreign_owners
from daemon.line import load_line

_STARTING_POLL_S = 0.02
_SIGNAL_POLL_S = 0.2
_READY_WITHIN_S = 10.0


def serve(config: Path) -> int:
    """Run the daemon of `config` until SIGTERM or SIGINT; 0, or 2 and one line on stderr where it could not start."""
    _log_to_stderr()
    stop, reload = threading.Event(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    signal.signal(signal.SIGHUP, lambda *_: reload.set())
    try:
        _refuse_foreign_packages()
        app = App(load_line(config), config)
        app.start()
    except ConfigError as error:
        more = len(error.problems) - 1
        rest = f" (and {more} more: coserve check {config})" if more else ""
        first = error.problems[0].replace("\n", " ")
        print(f"coserve: cannot start: {first}{rest}", file=sys.stderr)
        return 2
    # Images are served at once, so a fill that takes long holds nobody up.
    ready_by_s = time.monotonic() + _READY_WITHIN_S
    while app.operations.state == "starting" and time.monotonic() < ready_by_s and not stop.wait(_STARTING_POLL_S):
        pass
    if not stop.is_set():
        print(f"coserve ready: {app.describe()}", flush=True)
    while not stop.wait(_SIGNAL_POLL_S):
        if reload.is_set():
            reload.clear()
            app.operations.reload_or_say_why()
    app.stop()
    return 0


def _refuse_foreign_packages() -> None:
    found = foreign_owners()
    if found:
        names = "; ".join(f"{name} is also provided by {', '.join(owners)}" for name, owners in found.items())
        raise StartError(f"{names}: CoServe needs an environment of its own (make demo makes one)")


def _log_to_stderr() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
