"""Images that stay after their verdict: copies of the journal's bytes under `images/`, made durable in groups.

Raw pixels become PGM or PPM files: a header of ours, then the bytes that the camera sent.
"""

import ctypes
import errno
import hashlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, takewhile
from pathlib import Path, PurePosixPath

import structlog

from daemon.host.folders import make_folder
from daemon.records import Image, JournalKey, Pixels
from daemon.storage.database.rows import ImageCopy
from daemon.storage.journal import JournalError

FILE_MODE = 0o640
Shape = tuple[int, int, int]
#: An image that stays after its verdict, and when it got that: once it is copied, its bytes in the journal may go.
ToCopy = tuple[Image, str]

_GREY, _COLOUR = (b"P5", ".pgm"), (b"P6", ".ppm")
_SIGNATURES = (
    (b"\xff\xd8\xff", ".jpg"),
    (b"\x89PNG\r\n\x1a\n", ".png"),
    (b"BM", ".bmp"),
    (b"II*\x00", ".tif"),
    (b"MM\x00*", ".tif"),
)
_SUFFIXES = frozenset({*(suffix for _, suffix in _SIGNATURES), _GREY[1], _COLOUR[1], ".bin"})
#: One sync makes a group durable; it collects this long and this many.
_GROUP_S = 1.0
_GROUP_IMAGES = 256
_RETRY_S = 1.0


def raw_header(shape: Shape) -> tuple[bytes, str]:
    """Return the header of raw pixels and the file's suffix. `shape` is (height, width, channels)."""
    height, width, channels = shape
    kind, suffix = _GREY if channels == 1 else _COLOUR
    return b"%s\n%d %d\n255\n" % (kind, width, height), suffix


def as_sent(content: bytes, suffix: str) -> tuple[bytes, Shape | None]:
    """Return the payload of a file with this suffix, and the shape of raw pixels; ValueError for a damaged header."""
    if suffix not in {_GREY[1], _COLOUR[1]}:
        return content, None
    kind, size, _, payload = content.split(b"\n", 3)
    width, height = map(int, size.split())
    return payload, (height, width, 1 if kind == _GREY[0] else 3)


def is_as_sent(content: bytes, suffix: str, sha256: str) -> bool:
    try:
        payload, _ = as_sent(content, suffix)
    except ValueError:
        return False
    return hashlib.sha256(payload).hexdigest() == sha256


def remove_images(folder: Path, image_paths: Sequence[str]) -> tuple[int, dict[str, str]]:
    """Delete copies and emptied folders of `images/`; return the bytes, and `image_path` and reason of failures."""
    failures: dict[str, str] = {}
    removed_bytes = 0
    folders: set[Path] = set()
    for image_path in image_paths:
        parts = PurePosixPath(image_path).parts
        if parts[:1] != (folder.name,) or ".." in parts:
            continue  # a row that was edited by hand
        path = folder.parent / image_path
        try:
            size_bytes = path.stat().st_size
            path.unlink()
            removed_bytes += size_bytes
        except FileNotFoundError:
            pass
        except OSError as error:
            failures[image_path] = error.strerror or str(error)
        folders.add(path.parent)
    for emptied in (*folders, *{path.parent for path in folders}):
        if emptied != folder:
            with suppress(OSError):  # not empty
                emptied.rmdir()
    return removed_bytes, failures


def images_by_folder(folder: Path) -> Iterator[list[tuple[int, str]]]:
    """Yield inspection id and `image_path` of all copies, a sub-folder at a time, without files of others."""
    for part in sorted(folder.glob("????-??-??/*")):
        if not (part.name.isdigit() and part.is_dir()):
            continue
        copies = [path for path in part.iterdir() if path.stem.isdigit() and path.suffix in _SUFFIXES]
        yield [(int(path.stem), path.relative_to(folder.parent).as_posix()) for path in copies]


class ImageArchiver:
    """A thread that copies images from the journal to `folder/DAY/THOUSANDS/ID.jpg`, so that intake never waits for it.

    Copying an image again gives the same file. Copies unfinished at `stop` come again later.
    """

    def __init__(
        self,
        folder: Path,
        read: Callable[[JournalKey], bytes],
        on_copied: Callable[[list[ImageCopy]], None],
        may_copy: Callable[[int], bool] = lambda _bytes: True,
    ) -> None:
        """Images wait in the journal while `may_copy(bytes)` says that the disk has no room for them."""
        self._folder = folder
        self._read = read
        self._on_copied = on_copied
        self._may_copy = may_copy
        self.waiting_bytes = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[ToCopy] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._log = structlog.get_logger("images")
        self._thread = threading.Thread(target=self._run, name="archiver")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def archive(self, images: Sequence[ToCopy]) -> None:
        with self._lock:
            self.waiting_bytes += sum(image.key.length for image, _ in images)
        for each in images:
            self._queue.put(each)

    def _run(self) -> None:
        group: list[ToCopy] = []
        while not self._stopping.wait(_GROUP_S):
            while True:
                while len(group) < _GROUP_IMAGES and not self._queue.empty():
                    group.append(self._queue.get())
                if not group or self._stopping.is_set():
                    break
                fitting = self._that_fit(group)
                copies = self._copy(fitting)
                if not copies:
                    self._stopping.wait(_RETRY_S)
                    break
                self._on_copied(copies)
                with self._lock:
                    self.waiting_bytes -= sum(image.key.length for image, _ in fitting)
                del group[: len(fitting)]

    def _that_fit(self, group: Sequence[ToCopy]) -> Sequence[ToCopy]:
        sizes_bytes = accumulate(image.key.length for image, _ in group)
        return group[: sum(1 for _ in takewhile(self._may_copy, sizes_bytes))]

    def _copy(self, images: Sequence[ToCopy]) -> list[ImageCopy]:
        """Make durable copies together, or none: then it is tried again later."""
        try:
            copies = [ImageCopy(image.inspection_id, self._copy_one(image, at)) for image, at in images]
            if any(copy.image_path for copy in copies):
                _sync_filesystem(self._folder)
        except OSError as error:
            self._log.warning("images_not_copied", images=len(images), error=str(error))
        except Exception:  # noqa: BLE001 - without this thread no segment of the journal would go any more
            self._log.exception("images_not_copied", images=len(images))
        else:
            return copies
        return []

    def _copy_one(self, image: Image, completed_at: str) -> str | None:
        """Return the path of an image's copy, None if the journal lost its bytes."""
        try:
            return self._write(image, completed_at, self._read(image.key))
        except JournalError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno not in {errno.ENOENT, errno.EIO}:
                raise cause from error  # the bytes may be there: no descriptor, memory or permission
            self._log.error("image_lost", inspection_id=image.inspection_id, error=str(error))
            return None

    def _write(self, image: Image, completed_at: str, payload: bytes) -> str:
        header, suffix = _format(payload, image.pixels)
        folder = self._folder / completed_at[:10] / f"{image.inspection_id // 1000:06d}"
        make_folder(folder)
        path = folder / f"{image.inspection_id}{suffix}"
        try:
            with path.open("wb") as file:
                os.fchmod(file.fileno(), FILE_MODE)
                file.write(header)
                file.write(payload)
        except OSError:
            with suppress(OSError):
                path.unlink()  # a part of an image takes room on a disk that has none
            raise
        return path.relative_to(self._folder.parent).as_posix()


def _format(payload: bytes, pixels: Pixels) -> tuple[bytes, str]:
    if pixels.shape is not None:
        return raw_header(pixels.shape)
    return b"", next((suffix for signature, suffix in _SIGNATURES if payload.startswith(signature)), ".bin")


def _sync_filesystem(folder: Path) -> None:
    """Call syncfs(2): it makes a whole group of new files and their names durable, and reports write errors."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if libc.syncfs(fd) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(folder))
    finally:
        os.close(fd)
