"""Space on the disks of a line's files: a reserve stays free, so that every accepted image can be finished."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from daemon.config.settings import Config
from daemon.host.folders import folder_problem
from daemon.storage.database.connections import StoreError, open_for_reading, sqlite_path
from daemon.storage.database.migrate import check_schema
from daemon.units import size_text

#: A verdict's rows and their pages in the write-ahead log: an image, a few stages, a few dozen boxes.
VERDICT_BYTES = 4096
#: This much stays free on the disks of the line's files.
RESERVE_BYTES = 64 * 2**20
#: On a small disk the reserve is this share of it.
_RESERVE_SHARE = 8
_LEAST_SEGMENT_BYTES, _MOST_SEGMENT_BYTES = 64 * 2**10, 256 * 2**20
#: Intake that was held resumes when this many times the reserve is free.
RESUME_FACTOR = 1.25


@dataclass(frozen=True, slots=True)
class SpaceClaims:
    """The space that accepted images still need; `arriving_bytes` were admitted and are not in the journal yet."""

    images: int = 0
    bytes: int = 0
    to_copy_bytes: int = 0
    arriving_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """The disk of one place: its device number, its size, and the bytes that are free for us."""

    disk: int
    total_bytes: int
    free_bytes: int


class LowSpaceError(OSError):
    """An image was refused because the disk is nearly full; nothing has failed."""


class DiskSpace:
    """The space of `places`: the folders of `journal`, `images` and `database`.

    One thread looks, again and again; any thread may ask. Intake must not wait for a disk that hangs: it admits up to
    `admit_until_bytes`, then asks `problem`, which takes the sizes of the last look and adds what was admitted since.
    """

    def __init__(
        self,
        places: Mapping[str, Path],
        claims: Callable[[], SpaceClaims] = SpaceClaims,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        self._places = dict(places)
        self._reserve_bytes = reserve_bytes
        self._claims = claims
        self._spaces: dict[str, FreeSpace] | None = None
        #: Bytes of all images admitted so far, with `VERDICT_BYTES` each. Only intake writes it.
        self.admitted_bytes = 0
        #: Up to here `admitted_bytes` may grow before `problem` must be asked. Only `look` writes it.
        self.admit_until_bytes = 0
        self._admitted_before = self._arriving_bytes = 0
        self._refused = False

    def look(self) -> dict[str, FreeSpace]:
        """Measure the free space by place. Places that give none (OSError) are left out: writing there says why."""
        # Before the disk is asked: bytes that reach it meanwhile count twice until the next time, rather than never.
        self._admitted_before, self._arriving_bytes = self.admitted_bytes, self._claims().arriving_bytes
        self._spaces = {name: space for name in self._places if (space := self.space(name)) is not None}
        # An image takes its bytes where the journal is, and again where its copy may go.
        left = [
            (space.free_bytes - floor) // max(1, len({"journal", "images"} & set(names)))
            for names, space, floor in self._floors(0, 1.0)
        ]
        self.admit_until_bytes = self._admitted_before + min(left, default=sys.maxsize)
        return self._spaces

    def space(self, place: str) -> FreeSpace | None:
        try:
            return _space(self._places[place])
        except (OSError, KeyError):
            return None

    def problem(self, arriving_bytes: int = 0, *, factor: float = 1.0) -> str | None:
        """Return why an image of that size is refused, None if there is room. `factor` enlarges the reserve."""
        for places, space, floor in self._floors(arriving_bytes, factor):
            if space.free_bytes < floor:
                self._refused |= arriving_bytes > 0
                return (
                    f"the disk of the {' and the '.join(places)} ({self._places[places[0]]}) has"
                    f" {size_text(space.free_bytes)} free, and {size_text(floor)} are kept for what is accepted"
                    " already: free some room, or let old images go (retention in coserve.yaml)"
                )
        return None

    def refused(self) -> bool:
        refused, self._refused = self._refused, False
        return refused

    def shortage(self, arriving_bytes: int) -> str | None:
        """Return why admitted images cannot be written after all: another program has filled the disk."""
        for name, size_bytes in (("journal", arriving_bytes), ("database", 0)):
            space = self.space(name)
            if space is not None and space.free_bytes - size_bytes < self.reserve_bytes(space) // 2:
                free = size_text(space.free_bytes)
                return f"the disk of the {name} ({self._places[name]}) is nearly full: {free} are free"
        return None

    def may_copy(self, size_bytes: int) -> bool:
        """Return True if `images/` may take a copy: half of the reserve is left to verdicts in any case."""
        space = self.space("images")
        return space is None or space.free_bytes - size_bytes >= self.reserve_bytes(space) // 2

    def reserve_bytes(self, space: FreeSpace) -> int:
        return min(self._reserve_bytes, space.total_bytes // _RESERVE_SHARE)

    def _floors(self, arriving_bytes: int, factor: float) -> Iterator[tuple[list[str], FreeSpace, int]]:
        spaces = self.look() if self._spaces is None else self._spaces
        claims = self._claims()
        needed = {
            "journal": self._arriving_bytes + self.admitted_bytes - self._admitted_before + arriving_bytes,
            "database": claims.images * VERDICT_BYTES,
            "images": claims.bytes + claims.to_copy_bytes + arriving_bytes,
        }
        for disk in dict.fromkeys(space.disk for space in spaces.values()):
            names = [name for name, space in spaces.items() if space.disk == disk]
            space = spaces[names[0]]
            yield names, space, int(factor * self.reserve_bytes(space)) + sum(needed[name] for name in names)


def places(config: Config) -> dict[str, Path]:
    return {"journal": config.journal, "images": config.images, "database": sqlite_path(config.database).parent}


def _space(folder: Path) -> FreeSpace:
    while True:
        try:
            state = os.statvfs(folder)
            break
        except FileNotFoundError:
            if folder == folder.parent:
                raise
            folder = folder.parent
    return FreeSpace(folder.stat().st_dev, state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize)


def segment_bytes(journal: Path, backlog_bytes: int) -> int:
    """Return the size of a segment, smaller on a small disk: its room comes back only once all its images are final."""
    of_backlog = min(_MOST_SEGMENT_BYTES, max(_LEAST_SEGMENT_BYTES, backlog_bytes // 32))
    return min(of_backlog, max(2**20, _space(journal).total_bytes // 32))


def storage_problems(config: Config) -> list[str]:
    """Return why a start would fail: an unusable database, folders that cannot be made; each problem names its key."""
    folders = {"journal": config.journal, "images": config.images}
    problems = [f"{key}: {problem}" for key, folder in folders.items() if (problem := folder_problem(folder))]
    if config.record is not None and not config.record.parent.is_dir():
        problems.append(f"record: there is no folder {config.record.parent}: make it")
    try:
        _check_database(config.database)
    except StoreError as error:
        problems.append(f"database: {error}")
    return problems


def _check_database(url: str) -> None:
    path = sqlite_path(url)
    if problem := folder_problem(path.parent):
        raise StoreError(problem)
    if not path.exists():
        return
    engine = open_for_reading(url)
    try:
        check_schema(engine)
    except SQLAlchemyError as error:
        raise StoreError(f"cannot read {engine.url.render_as_string()}: {error}") from None
    finally:
        engine.dispose()
