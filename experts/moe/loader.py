"""The thread that fills slots while the model computes."""

import threading
from collections.abc import Callable


class Loader:
    """Carries out one load after the other, as long as there is one. Its thread starts with the first `wake`.

    `next_load` is called with `changed` held and gives a load to carry out without it, or None; then the thread sleeps
    until `changed` is notified. A load reports its own errors and raises none.
    """

    def __init__(self, changed: threading.Condition, next_load: Callable[[], Callable[[], None] | None]) -> None:
        self._changed = changed
        self._next_load = next_load
        self._thread: threading.Thread | None = None
        self._closed = False

    def wake(self) -> None:
        """There may be something to do; called with `changed` held."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="moe-loader", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def close(self) -> None:
        """Wait for the load in flight; no other one begins. Called without `changed`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                load = None
                while not self._closed and (load := self._next_load()) is None:
                    self._changed.wait()
            if load is None:
                return
            load()
