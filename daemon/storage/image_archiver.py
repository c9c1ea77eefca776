"""The keeper thread: copies images that stay out of the journal, so that intake never waits for it."""

import queue
import threading
from collections.abc import Callable

import structlog

from daemon.storage.database.values import CopyRequest, Kept
from daemon.storage.kept_images import ImageFolder

#: One sync makes a group durable; it collects this long and this many.
_GROUP_S = 1.0
_GROUP_IMAGES = 256
_RETRY_S = 1.0


class ImageArchiver:
    """Copies what it is given and reports it; what is unfinished at `stop` is given again after the next start."""

    def __init__(
        self,
        folder: ImageFolder,
        on_kept: Callable[[list[Kept]], None],
        may_copy: Callable[[int], bool] = lambda _bytes: True,
    ) -> None:
        """`may_copy(bytes)`: whether the disk has room for a copy now; until it has, images wait in the journal."""
        self._folder = folder
        self._on_kept = on_kept
        self._may_copy = may_copy
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[CopyRequest] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._log = structlog.get_logger("images")
        self._thread = threading.Thread(target=self._run, name="keeper")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the copy at hand and end."""
        self._stopping.set()
        self._thread.join()

    def keep(self, image: CopyRequest) -> None:
        """Any thread."""
        with self._lock:
            self._waiting_bytes += image.key.length
        self._queue.put(image)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that `images/` is still to take."""
        return self._waiting_bytes

    def _run(self) -> None:
        group: list[CopyRequest] = []
        while not self._stopping.wait(_GROUP_S):
            while True:
                while len(group) < _GROUP_IMAGES and not self._queue.empty():
                    group.append(self._queue.get())
                if not group or self._stopping.is_set():
                    break
                if self._try_to_copy(group) == 0:
                    self._stopping.wait(_RETRY_S)
                    break

    def _try_to_copy(self, group: list[CopyRequest]) -> int:
        try:
            return self._copy(group)
        except OSError as error:
            self._log.warning("images_not_copied", images=len(group), error=str(error))
        except Exception:  # noqa: BLE001 - without this thread no segment of the journal would go any more
            self._log.exception("images_not_copied", images=len(group))
        return 0

    def _copy(self, group: list[CopyRequest]) -> int:
        """Copy what there is room for, report it and take it off `group`: how many. The rest waits in the journal."""
        room = self._room(group)
        kept = self._folder.copy(group[:room]) if room else []
        if kept:
            self._on_kept(kept)
            with self._lock:
                self._waiting_bytes -= sum(image.key.length for image in group[: len(kept)])
            del group[: len(kept)]
        return len(kept)

    def _room(self, group: list[CopyRequest]) -> int:
        """How many of `group`, from the first on, the disk has room for."""
        size_bytes = 0
        for number, image in enumerate(group):
            size_bytes += image.key.length
            if not self._may_copy(size_bytes):
                return number
        return len(group)
