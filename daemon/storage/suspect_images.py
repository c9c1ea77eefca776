"""Decoding an image in a process of its own, with limits: what an image gets that the daemon died with.

The child, `python -m daemon.storage.suspect_images`, reads the payload from its standard input. It imports no torch
and opens nothing.
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from daemon.records import Accepted, JournalKey, Pixels
from daemon.storage.decode_marks import Suspect
from daemon.storage.journal import JournalError

#: A decoder's memory beyond what the child itself maps: 64 million pixels take 200 MB, and three times that on the way.
_MEMORY_BYTES = 4 * 2**30
#: Deaths of the daemon with one image in a decoder that condemn it whatever a child says.
_MOST_DEATHS = 3
_AT_ONCE = 4
#: What the child says of an image that its decoder refused in good order: the ordinary way will refuse it as well.
_REFUSED = 3


def examine(
    suspects: Sequence[Suspect], images: Sequence[Accepted], read: Callable[[JournalKey], bytes], limit_s: float
) -> list[tuple[Accepted, str]]:
    """Of `images`, those that must not enter a decoder of the daemon again, each with why."""
    by_key = {image.key: image for image in images}
    chosen = [(by_key[suspect.key], suspect.deaths) for suspect in suspects if suspect.key in by_key]
    log = structlog.get_logger("marks")

    def look(image: Accepted, deaths: int) -> tuple[Accepted, str] | None:
        if deaths >= _MOST_DEATHS:
            reason: str | None = f"the daemon died {deaths} times while it was decoded"
        else:
            try:
                reason = decode_apart(read(image.key), image.pixels, limit_s)
            except (JournalError, OSError) as error:
                log.warning("suspect_not_read", source=image.source, id=image.image_id, error=str(error))
                return None
        log.warning("suspect_decoded", source=image.source, id=image.image_id, deaths=deaths, reason=reason)
        return None if reason is None else (image, reason)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="probe") as pool:
        found = pool.map(lambda one: look(*one), chosen)
        return [one for one in found if one is not None]


def decode_apart(payload: bytes, pixels: Pixels, limit_s: float) -> str | None:
    """Decode `payload` in a child; None where that ended in good order, else how it ended."""
    shape = ",".join(map(str, pixels.shape or ()))
    try:
        done = subprocess.run(  # noqa: S603 - our own module, no shell
            [sys.executable, "-m", "daemon.storage.suspect_images", pixels.encoding, shape, str(limit_s)],
            input=payload,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"its decoder did not end within {limit_s:g} s"
    if done.returncode in (0, _REFUSED):
        return None
    if done.returncode < 0:
        return f"its decoder was ended by {_name_of(-done.returncode)}"
    return "its decoder failed, or took more memory than it may"


def _name_of(number: int) -> str:
    """Real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main(encoding: str, shape: str, limit_s: str) -> int:
    """The child's part."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = int(float(limit_s)) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    payload = sys.stdin.buffer.read()
    from experts.errors import ImageError  # noqa: PLC0415 - after the limits of time
    from experts.vision.decode import decode  # noqa: PLC0415

    with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - not a file
        mapped = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    most_bytes = mapped + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    sizes = tuple(map(int, shape.split(","))) if shape else ()
    try:
        decode(payload, "raw" if encoding == "raw" else "image", (sizes[0], sizes[1], sizes[2]) if sizes else None)
    except ImageError:
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
