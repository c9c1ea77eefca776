"""The thread that fills slots while the model computes."""

import threading
from collections.abc import Callable


class PrefetchThread:
    """Carries out one load after the other, as long as there is one. Its thread starts with the first `wake`.

    `next_load` is called with `work` held and gives a load to carry out without it, or None; then the thread sleeps
    until it is woken. A load reports its own errors and raises none.
    """

    def __init__(self, work: threading.Condition, next_load: Callable[[], Callable[[], None] | None]) -> None:
        self._work = work
        self._next_load = next_load
        self._thread: threading.Thread | None = None
        self._closed = False

    def wake(self) -> None:
        """There may be something to do; called with `work` held."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="moe-loader", daemon=True)
            self._thread.start()
        self._work.notify()

    def close(self) -> None:
        """Wait for the load in flight; no other one begins. Called without `work`."""
        with self._work:
            self._closed = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._work:
                load = None
                while not self._closed and (load := self._next_load()) is None:
                    self._work.wait()
            if load is None:
                return
            load()
