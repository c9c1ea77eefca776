"""Free space for the line's files: while little is left no image is taken, so that what was accepted can be written.

The journal, the database and the images may lie on one disk or on three. Any thread may ask.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

#: A verdict's rows and their pages in the write-ahead log: an image, a few stages, a few dozen boxes.
_VERDICT_BYTES = 4096
#: On a small disk the reserve is this share of it.
_RESERVE_SHARE = 8
#: What was held up is let in again with this much more than the reserve.
RESUME_MORE = 1.25
#: With so much to spare nobody asks the disks for a while: no line fills them as fast.
_PLENTY_BYTES = 2**30
_PLENTY_S = 0.1


@dataclass(frozen=True, slots=True)
class Claims:
    """What is accepted and not yet written: images without verdict, their bytes, and bytes waiting to be copied."""

    images: int = 0
    bytes: int = 0
    to_copy_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Space:
    """One place's disk: its size, what is free for us, and which disk it is."""

    disk: int
    total_bytes: int
    free_bytes: int


class NoRoomError(OSError):
    """An image that is not taken because too little is free: nothing has failed."""


class Room:
    """`places` are folders by what lies there: `journal`, `images`, and `database` where that is a file."""

    def __init__(self, places: Mapping[str, Path], reserve_bytes: int, claims: Callable[[], Claims] = Claims) -> None:
        self._places = dict(places)
        self._reserve_bytes = reserve_bytes
        self._claims = claims
        self._plenty_until_s = 0.0
        self._refused = False

    def spaces(self) -> dict[str, Space]:
        """What is free, by place; one that cannot be asked (OSError) is left out: writing there will say why."""
        found: dict[str, Space] = {}
        for name, folder in self._places.items():
            try:
                found[name] = _space(folder)
            except OSError:
                continue
        return found

    def problem(self, arriving_bytes: int = 0, *, more: float = 1.0) -> str | None:
        """Why images of `arriving_bytes` cannot be taken now, in one sentence; None where there is room.

        With `more` the reserve counts as that much larger: what was held up is let in again with room to spare.
        """
        if time.monotonic() < self._plenty_until_s:
            return None
        left_bytes = _PLENTY_BYTES
        for places, space, floor in self._floors(arriving_bytes, more):
            left_bytes = min(left_bytes, space.free_bytes - floor)
            if space.free_bytes < floor:
                self._refused |= arriving_bytes > 0
                return (
                    f"the disk of the {' and the '.join(places)} ({self._places[places[0]]}) has"
                    f" {space.free_bytes / 1e6:,.1f} MB free, and {floor / 1e6:,.1f} MB are kept for what is accepted"
                    " already: free some room, or let old images go (retention in coserve.yaml)"
                )
        if left_bytes >= _PLENTY_BYTES:
            self._plenty_until_s = time.monotonic() + _PLENTY_S
        return None

    def _floors(self, arriving_bytes: int, more: float) -> Iterator[tuple[list[str], Space, int]]:
        """Each disk with what lies there, and what has to stay free on it."""
        claims = self._claims()
        needed = {
            "journal": arriving_bytes,
            "database": claims.images * _VERDICT_BYTES,
            "images": claims.bytes + claims.to_copy_bytes,
        }
        spaces = self.spaces()
        for disk in dict.fromkeys(space.disk for space in spaces.values()):
            here = [name for name, space in spaces.items() if space.disk == disk]
            space = spaces[here[0]]
            yield here, space, int(more * self.reserve_bytes(space)) + sum(needed[name] for name in here)

    def refused(self) -> bool:
        """Whether an image was refused since this was last asked."""
        refused, self._refused = self._refused, False
        return refused

    def full(self, arriving_bytes: int) -> str | None:
        """Why images that were let in cannot be written all the same: somebody else has filled the disk."""
        for name, space in self.spaces().items():
            left_bytes = space.free_bytes - (arriving_bytes if name == "journal" else 0)
            if name != "images" and left_bytes < self.reserve_bytes(space) // 2:
                return (
                    f"the disk of the {name} ({self._places[name]}) is nearly full: {space.free_bytes} bytes are free"
                )
        return None

    def may_copy(self, size_bytes: int) -> bool:
        """Whether `images/` may take a copy: half of the reserve is left to verdicts, whoever filled the disk."""
        space = self.spaces().get("images")
        return space is None or space.free_bytes - size_bytes >= self.reserve_bytes(space) // 2

    def reserve_bytes(self, space: Space) -> int:
        """What stays free on this disk."""
        return min(self._reserve_bytes, space.total_bytes // _RESERVE_SHARE)


def _space(folder: Path) -> Space:
    """The disk that `folder` is on, or will be."""
    while True:
        try:
            found = os.statvfs(folder)
            break
        except FileNotFoundError:
            if folder == folder.parent:
                raise
            folder = folder.parent
    return Space(folder.stat().st_dev, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def segment_bytes(journal: Path, wanted_bytes: int) -> int:
    """Segments of the journal on a small disk: a segment's room comes back only once all its images are final."""
    return min(wanted_bytes, max(2**20, _space(journal).total_bytes // 32))
