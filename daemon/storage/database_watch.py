"""A thread that looks, once a second, whether the files under a running line are still there, or its server answers."""

import threading
from collections.abc import Callable

import structlog

from daemon.storage.database_place import Place

_EVERY_S = 1.0
_CAUSE = "files"


class DatabaseWatch:
    """What can be put back is; for the rest publishers hear `busy`, and the state is degraded, until a person acted."""

    def __init__(self, home: Place, hold: Callable[[str, str], None], resume: Callable[[str], None]) -> None:
        """`hold(cause, problem)` keeps images out until `resume(cause)`."""
        self._home = home
        self._hold, self._resume = hold, resume
        self._stopping = threading.Event()
        self._problem: str | None = None
        self._log = structlog.get_logger("database")
        self._thread = threading.Thread(target=self._run, name="ground")

    def start(self) -> None:
        self._home.hold()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            try:
                self._look()
            except Exception:  # noqa: BLE001 - the next look may fare better
                self._log.exception("file_watch_failed")

    def _look(self) -> None:
        problem = self._home.look()
        if problem == self._problem:
            return
        self._problem = problem
        if problem is None:
            self._resume(_CAUSE)
            self._log.info("database_found")
        else:
            self._hold(_CAUSE, problem)
            self._log.error("database_lost", problem=problem)
