"""Images that were in a decoder when the daemon died: marked while they are decoded, decoded apart at the next start.

Each executor marks its image in shared memory, without a system call; a clean stop clears the marks. An image that a
start still finds marked is first decoded in a process of its own, with limits: an image that kills its decoder costs
one restart, never a loop of them. The child reads the payload from standard input and imports no torch.
"""

import mmap
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import structlog

from daemon.host.children import signal_name
from daemon.records import Image, JournalKey, Pixels
from daemon.storage.journal import FILE_MODE, JournalError

_MAGIC = b"CSMARKS1"
_RECORD = struct.Struct("<QQQQ")  # segment, offset and length of the key, then how often the daemon died with it
_EMPTY = bytes(_RECORD.size)
#: Records of images being decoded, then as many of images that the daemon died with before.
_MAX_MARKS = 128
_PAST = _MAX_MARKS * _RECORD.size
_BYTES = mmap.PAGESIZE * -(-(2 * _PAST + len(_MAGIC)) // mmap.PAGESIZE)
#: A decoder's memory beyond the child's own: at most 15 bytes a pixel in all formats, and addresses that libraries
#: reserve without using them.
_MEMORY_BYTES, _PIXEL_BYTES = 2**30, 48
#: An image that was in a decoder at this many deaths of the daemon is refused, even if the child decodes it.
MAX_DEATHS = 3
_CHILDREN = 4
#: The child's status for an image that its decoder refused in good order: the ordinary way will refuse it as well.
_REFUSED = 3

#: Images that were in a decoder when the daemon died, each with how often.
Suspects = Mapping[JournalKey, int]


class DecodeMarks:
    """The marks in `path`. If the file cannot be made the line runs without marks, and says so."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log = structlog.get_logger("marks")
        self._taken = 0
        try:
            self._memory: mmap.mmap | None = _map(path)
        except OSError as error:
            self._memory = None
            self._log.error("marks_unavailable", file=str(path), error=str(error))
        self.suspects = self._read()
        self._write_past(self.suspects)

    def place(self) -> Callable[[JournalKey | None], None]:
        """Return the function with which one executor marks the image in its decoder; None clears the mark."""
        memory, start = self._memory, self._taken * _RECORD.size
        self._taken += 1
        if memory is None or self._taken > _MAX_MARKS:
            return lambda _key: None

        def mark(key: JournalKey | None) -> None:
            if memory.closed:
                return  # a thread that hung has come back after the stop
            memory[start : start + _RECORD.size] = (
                _EMPTY if key is None else _RECORD.pack(key.segment, key.offset, key.length, 1)
            )

        return mark

    def keep(self, keys: Collection[JournalKey]) -> Suspects:
        """Forget all suspects but those in `keys` (images that still wait for a verdict), and return these."""
        suspects = {key: deaths for key, deaths in self.suspects.items() if key in keys}
        self._write_past(suspects)
        return suspects

    def close(self, *, clean: bool) -> None:
        """Close the file; `clean` clears it, since every decoder has ended in good order."""
        if self._memory is None:
            return
        if clean:
            self._memory[:_PAST] = bytes(_PAST)
            self._write_past({})
        self._memory.close()

    def _read(self) -> Suspects:
        if self._memory is None:
            return {}
        records = list(_RECORD.iter_unpack(self._memory[: 2 * _PAST]))
        deaths = {JournalKey(*record[:3]): record[3] for record in records[_MAX_MARKS:] if record[3]}
        for segment, offset, length, is_marked in records[:_MAX_MARKS]:
            if is_marked:
                key = JournalKey(segment, offset, length)
                deaths[key] = deaths.get(key, 0) + 1
        return deaths

    def _write_past(self, suspects: Suspects) -> None:
        if self._memory is None:
            return
        first = islice(suspects.items(), _MAX_MARKS)
        past = [_RECORD.pack(key.segment, key.offset, key.length, deaths) for key, deaths in first]
        self._memory[: 2 * _PAST] = bytes(_PAST) + b"".join(past).ljust(_PAST, b"\0")


def _map(path: Path) -> mmap.mmap:
    """Map the file, all its bytes on the disk: a write into a hole of a full disk would end the process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        if os.fstat(fd).st_size != _BYTES or os.pread(fd, len(_MAGIC), _BYTES - len(_MAGIC)) != _MAGIC:
            os.ftruncate(fd, 0)
            os.posix_fallocate(fd, 0, _BYTES)
            os.pwrite(fd, _MAGIC, _BYTES - len(_MAGIC))
        return mmap.mmap(fd, _BYTES)
    finally:
        os.close(fd)


def examine(
    suspects: Suspects, images: Sequence[Image], read: Callable[[JournalKey], bytes], limit_s: float, max_pixels: int
) -> list[tuple[Image, str]]:
    """Return the `images` that the daemon must not decode again, each with the reason."""
    by_key = {image.key: image for image in images}
    marked = [(by_key[key], deaths) for key, deaths in suspects.items() if key in by_key]
    log = structlog.get_logger("marks")

    def try_decoding(image: Image, deaths: int) -> tuple[Image, str] | None:
        if deaths >= MAX_DEATHS:
            reason: str | None = f"the daemon died {deaths} times while it was decoded"
        else:
            try:
                reason = decode_apart(read(image.key), image.pixels, limit_s, max_pixels)
            except (JournalError, OSError) as error:
                log.warning("suspect_not_read", source=image.source, id=image.image_id, error=str(error))
                return None
        log.warning("suspect_decoded", source=image.source, id=image.image_id, deaths=deaths, reason=reason)
        return None if reason is None else (image, reason)

    with ThreadPoolExecutor(_CHILDREN, thread_name_prefix="suspects") as pool:
        verdicts = pool.map(lambda pair: try_decoding(*pair), marked)
        return [verdict for verdict in verdicts if verdict is not None]


def decode_apart(payload: bytes, pixels: Pixels, limit_s: float, max_pixels: int) -> str | None:
    settings = [",".join(map(str, pixels.shape or ())), str(limit_s), str(max_pixels)]
    try:
        child = subprocess.run(  # noqa: S603 - our own module, no shell
            [sys.executable, "-m", "daemon.storage.suspect_images", pixels.encoding, *settings],
            input=payload,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"its decoder did not end within {limit_s:g} s"
    if child.returncode in (0, _REFUSED):
        return None
    if child.returncode < 0:
        return f"its decoder was ended by {signal_name(-child.returncode)}"
    return "its decoder failed, or took more memory than it may"


def main(encoding: str, shape: str, limit_s: str, max_pixels: str) -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = int(float(limit_s)) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    payload = sys.stdin.buffer.read()
    from experts.errors import ImageError  # noqa: PLC0415 - after the limits of time
    from experts.vision.preprocess import decode  # noqa: PLC0415

    with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - not a file
        mapped_bytes = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    max_bytes = mapped_bytes + _MEMORY_BYTES + int(max_pixels) * _PIXEL_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    height, width, channels = map(int, shape.split(",")) if shape else (0, 0, 0)
    try:
        decode(payload, "raw" if encoding == "raw" else "image", (height, width, channels), int(max_pixels))
    except ImageError:
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
