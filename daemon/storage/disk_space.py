"""Free space for the line's files: while little is left no image is taken, so that what was accepted can be written.

The journal, the database and the images may lie on one disk or on three. Any thread may ask.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from daemon.config.settings import Config
from daemon.storage.database.connections import sqlite_path
from daemon.units import size_text

#: A verdict's rows and their pages in the write-ahead log: an image, a few stages, a few dozen boxes.
_VERDICT_BYTES = 4096
#: On a small disk the reserve is this share of it.
_RESERVE_SHARE = 8
#: What was held up is let in again with this much more than the reserve.
RESUME_MORE = 1.25


@dataclass(frozen=True, slots=True)
class Claims:
    """What is accepted and not yet written: images without verdict, their bytes, and bytes waiting to be copied.

    `arriving_bytes` are let in and not in the journal yet.
    """

    images: int = 0
    bytes: int = 0
    to_copy_bytes: int = 0
    arriving_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Space:
    """One place's disk: its size, what is free for us, and which disk it is."""

    disk: int
    total_bytes: int
    free_bytes: int


class NoRoomError(OSError):
    """An image that is not taken because too little is free: nothing has failed."""


class DiskSpace:
    """`places` are folders by what lies there: `journal`, `images`, and `database` where that is a file.

    One thread looks, again and again; `problem` asks no disk (one that hangs must not hold up intake), but counts what
    was let in since.
    """

    def __init__(self, places: Mapping[str, Path], reserve_bytes: int, claims: Callable[[], Claims] = Claims) -> None:
        self._places = dict(places)
        self._reserve_bytes = reserve_bytes
        self._claims = claims
        self._spaces: dict[str, Space] | None = None
        self._let_in_bytes = 0
        self._refused = False

    def look(self) -> dict[str, Space]:
        """What is free, by place; one that cannot be asked (OSError) is left out: writing there will say why."""
        # Before the disk is asked: what reaches it in between counts twice until the next look, never not at all.
        self._let_in_bytes = self._claims().arriving_bytes
        self._spaces = {name: space for name in self._places if (space := self.space(name)) is not None}
        return self._spaces

    def space(self, place: str) -> Space | None:
        """The disk of one place, as it is now."""
        try:
            return _space(self._places[place])
        except (OSError, KeyError):
            return None

    def problem(self, arriving_bytes: int = 0, *, more: float = 1.0) -> str | None:
        """Why an image of `arriving_bytes` cannot be let in, in one sentence; None where it is.

        With `more` the reserve counts as that much larger: what was held up is let in again with room to spare.
        """
        for places, space, floor in self._floors(arriving_bytes, more):
            if space.free_bytes < floor:
                self._refused |= arriving_bytes > 0
                return (
                    f"the disk of the {' and the '.join(places)} ({self._places[places[0]]}) has"
                    f" {size_text(space.free_bytes)} free, and {size_text(floor)} are kept for what is accepted"
                    " already: free some room, or let old images go (retention in coserve.yaml)"
                )
        self._let_in_bytes += arriving_bytes
        return None

    def refused(self) -> bool:
        """Whether an image was refused since this was last asked."""
        refused, self._refused = self._refused, False
        return refused

    def full(self, arriving_bytes: int) -> str | None:
        """Why images that were let in cannot be written all the same: somebody else has filled the disk."""
        for name, size_bytes in (("journal", arriving_bytes), ("database", 0)):
            space = self.space(name)
            if space is not None and space.free_bytes - size_bytes < self.reserve_bytes(space) // 2:
                free = size_text(space.free_bytes)
                return f"the disk of the {name} ({self._places[name]}) is nearly full: {free} are free"
        return None

    def may_copy(self, size_bytes: int) -> bool:
        """Whether `images/` may take a copy: half of the reserve is left to verdicts, whoever filled the disk."""
        space = self.space("images")
        return space is None or space.free_bytes - size_bytes >= self.reserve_bytes(space) // 2

    def reserve_bytes(self, space: Space) -> int:
        """What stays free on this disk."""
        return min(self._reserve_bytes, space.total_bytes // _RESERVE_SHARE)

    def _floors(self, arriving_bytes: int, more: float) -> Iterator[tuple[list[str], Space, int]]:
        """Each disk with what lies there, and what has to be free on it."""
        claims = self._claims()
        needed = {
            "journal": self._let_in_bytes + arriving_bytes,
            "database": claims.images * _VERDICT_BYTES,
            "images": claims.bytes + claims.to_copy_bytes + arriving_bytes,
        }
        spaces = self.look() if self._spaces is None else self._spaces
        for disk in dict.fromkeys(space.disk for space in spaces.values()):
            here = [name for name, space in spaces.items() if space.disk == disk]
            space = spaces[here[0]]
            yield here, space, int(more * self.reserve_bytes(space)) + sum(needed[name] for name in here)


def places(config: Config) -> dict[str, Path]:
    """Where the line writes, as `DiskSpace` takes it."""
    found = {"journal": config.journal, "images": config.images}
    database = sqlite_path(config.database)
    return found | ({"database": database.parent} if database is not None else {})


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
