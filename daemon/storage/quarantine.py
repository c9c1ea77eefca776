"""The quarantine: bytes of images that could not be judged, for the person who looks for the cause."""

import re
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import structlog

from daemon.host.folders import make_folder
from daemon.records import Image, JournalKey
from daemon.storage.journal import JournalError

_MAX_FILES = 1000
#: Of one source, per second: a flood of bad images neither fills the log nor slows intake down.
_IMAGES_PER_S, _BYTES_PER_S = 100, 32_000_000
#: A source and an id may be 128 characters each, a file's name 255 bytes.
_MAX_NAME_CHARS = 80
#: Nothing else in the folder is counted or deleted.
NAMES = re.compile(r"\d{8}T\d{15}-.+-.+\.(bin|part)")


class Quarantine:
    """One unsynced file per image, named by time, source and id; the newest `max_bytes` stay. Any thread may `keep`."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._log = structlog.get_logger("quarantine")
        self._sizes: dict[Path, int] = {}
        self._last_ns = 0
        self._second_s = 0.0
        self._kept_of: dict[str, list[int]] = {}  # sizes by source, in this second
        self._skipped = 0
        for path in sorted(folder.glob("*")) if folder.is_dir() else ():
            if not NAMES.fullmatch(path.name):
                continue
            if path.suffix == ".part":
                path.unlink(missing_ok=True)
            else:
                self._sizes[path] = path.stat().st_size

    def keep(self, source: str, image_id: str, payload: bytes, reason: str) -> Path | None:
        """Store `payload` in a file and return it; None if it is too large, part of a flood, or cannot be written."""
        if not payload or len(payload) > self._max_bytes:
            return None
        with self._lock:
            if self._is_flood(source, len(payload)):
                self._skipped += 1
                return None
            skipped, self._skipped = self._skipped, 0
            try:
                path = self._write(source, image_id, payload)
                self._drop_oldest()
            except OSError as error:
                self._log.warning("quarantine_failed", folder=str(self._folder), error=str(error))
                return None
        about = {"source": source, "id": image_id, "file": path.name, "reason": reason, "skipped": skipped}
        self._log.warning("image_quarantined", **about)
        return path

    def copy(self, image: Image, reason: str, read: Callable[[JournalKey], bytes]) -> None:
        """Keep an accepted image that decoding found bad; `read` takes its bytes from the journal."""
        try:
            payload = read(image.key)
        except (JournalError, OSError) as error:
            self._log.warning("quarantine_failed", source=image.source, id=image.image_id, error=str(error))
            return
        self.keep(image.source, image.image_id, payload, reason)

    def _is_flood(self, source: str, size_bytes: int) -> bool:
        """Return True if the source has used up its images or bytes of this second; else count this one."""
        if time.monotonic() >= self._second_s + 1.0:
            self._second_s = time.monotonic()
            self._kept_of.clear()
        kept = self._kept_of.setdefault(source, [])
        if len(kept) >= _IMAGES_PER_S or sum(kept) > _BYTES_PER_S:
            return True
        kept.append(size_bytes)
        return False

    def _write(self, source: str, image_id: str, payload: bytes) -> Path:
        make_folder(self._folder)
        self._last_ns = max(time.time_ns(), self._last_ns + 1)  # names sort by time even if the clock steps back
        at = datetime.fromtimestamp(self._last_ns // 10**9, UTC)
        name = f"{at:%Y%m%dT%H%M%S}{self._last_ns % 10**9:09}-{_safe(source)}-{_safe(image_id)}"
        part = self._folder / f"{name}.part"
        path = self._folder / f"{name}.bin"
        try:
            part.write_bytes(payload)
            part.rename(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._sizes[path] = len(payload)
        return path

    def _drop_oldest(self) -> None:
        total = sum(self._sizes.values())
        while total > self._max_bytes or len(self._sizes) > _MAX_FILES:
            oldest = next(iter(self._sizes))
            total -= self._sizes.pop(oldest)
            oldest.unlink(missing_ok=True)


def _safe(text: str) -> str:
    return quote(text, safe="")[:_MAX_NAME_CHARS]
