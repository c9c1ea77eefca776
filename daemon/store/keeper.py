"""The keeper thread: copies images that stay out of the journal, so that intake never waits for it."""

import queue
import threading
from collections.abc import Callable

import structlog

from daemon.store.images import ImageFolder
from daemon.store.values import Keep, Kept

#: One sync makes a group durable; it collects this long and this many.
_GROUP_S = 1.0
_GROUP_IMAGES = 256
_RETRY_S = 5.0


class Keeper:
    """Copies what it is given and reports it; what is unfinished at `stop` is given again after the next start."""

    def __init__(self, folder: ImageFolder, on_kept: Callable[[list[Kept]], None]) -> None:
        self._folder = folder
        self._on_kept = on_kept
        self._queue: queue.SimpleQueue[Keep] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._log = structlog.get_logger("images")
        self._thread = threading.Thread(target=self._run, name="keeper")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the copy at hand and end."""
        self._stopping.set()
        self._thread.join()

    def keep(self, image: Keep) -> None:
        """Any thread."""
        self._queue.put(image)

    def _run(self) -> None:
        group: list[Keep] = []
        while not self._stopping.wait(_GROUP_S):
            while True:
                while len(group) < _GROUP_IMAGES and not self._queue.empty():
                    group.append(self._queue.get())
                if not group or self._stopping.is_set():
                    break
                try:
                    kept = self._folder.copy(group)
                except OSError as error:
                    # The journal still has the bytes: they wait there until the disk takes them.
                    self._log.warning("images_not_copied", images=len(group), error=str(error))
                    self._stopping.wait(_RETRY_S)
                    break
                self._on_kept(kept)
                group = []
