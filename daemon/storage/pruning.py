"""Pruning: images by age, bytes and free space, results by age.

Rows are changed first, then files are deleted: a crash leaves files that no row names, and `sweep` deletes them.
"""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import structlog
from sqlalchemy import Connection

from daemon.config.settings import Retention
from daemon.policy.retain import KeptImage, excess_bytes, images_to_prune
from daemon.storage.database import upkeep
from daemon.storage.database.changes import Change, ChangeNotes
from daemon.storage.database.connections import StoreError, open_for_reading, sqlite_path
from daemon.storage.database.prune import (
    AgeLimit,
    AgeMark,
    OldBoard,
    forget_images,
    forget_others,
    kept_bytes,
    note_age,
    old_boards,
    oldest_kept,
    read_age_marks,
    strays,
    unused_rules,
)
from daemon.storage.database.rows import ImageCopy
from daemon.storage.database.store import Store, open_store
from daemon.storage.database.transaction import Clock
from daemon.storage.disk_space import RESUME_FACTOR, DiskSpace
from daemon.storage.image_archive import images_by_folder, remove_images
from daemon.units import utc_text
from experts.versions import current_user

T = TypeVar("T")

#: One turn of the writer: a few milliseconds.
_IMAGES_PER_TURN = 200
_ROWS_PER_TURN = 4000
_BOARDS_PER_QUERY = 50
#: Between two turns intake and verdicts have the writer and the disk.
_PAUSE_S = 0.05
_PAUSE_SHARE = 0.25
#: A wrong clock has this long to be put right, in time during which the daemon runs.
_DAY_S = 86400.0


class RunTask(Protocol):
    """Runs a short task with the store, in the thread that writes."""

    def __call__(self, task: Callable[[Store], T], /) -> T: ...


#: Returns the limit of what is older than the given seconds; None if nothing is yet.
Ages = Callable[[float], AgeLimit | None]


class RunningAges:
    """Ages by the earliest of all clocks of the last 24 hours in which a daemon ran with this database.

    Nothing that came later than that is old, whatever its time says. So a clock that is wrong for less than that, in
    either direction, at a start or later, makes nothing old.
    """

    def __init__(self, url: str, clock: Clock, run_task: RunTask) -> None:
        self._engine = open_for_reading(url)
        self._clock = clock
        self._run_task = run_task
        marks = self._marks()
        self._start_s = clock.monotonic_s() - (marks[-1].running_s if marks else 0)

    def close(self) -> None:
        self._engine.dispose()

    def note(self) -> None:
        """Store the clock and the newest rows; every few minutes, because a restart loses the time since."""
        running_s, wall_s = int(self._clock.monotonic_s() - self._start_s), self._clock.wall_s()
        self._run_task(lambda store: store.transact(note_age, running_s, wall_s, _DAY_S))

    def __call__(self, age_s: float) -> AgeLimit | None:
        running_s = self._clock.monotonic_s() - self._start_s
        marks = self._marks()
        day_old = [mark for mark in marks if mark.running_s <= running_s - _DAY_S]
        if not day_old:
            return None
        clocks_s = (mark.wall_s + running_s - mark.running_s for mark in marks[len(day_old) - 1 :])
        before = utc_text(max(0.0, min(self._clock.wall_s(), *clocks_s) - age_s))
        return AgeLimit(before, day_old[-1].seq)

    def _marks(self) -> list[AgeMark]:
        with self._engine.connect() as connection:
            return read_age_marks(connection)


@dataclass(slots=True)
class PruneCounts:
    images: int = 0
    image_bytes: int = 0
    boards: int = 0
    inspections: int = 0
    stray_files: int = 0


class Pruner:
    """Prunes as `settings` allow. `rest(seconds)` pauses and returns False to stop. One thread calls."""

    def __init__(
        self,
        url: str,
        images: Path,
        settings: Retention,
        disk_space: DiskSpace,
        *,
        run_task: RunTask,
        rest: Callable[[float], bool],
        ages: Ages,
        on_pruned: Callable[[str, int], None] = lambda _what, _count: None,
    ) -> None:
        """`on_pruned` gets `images` or `boards`, and their number."""
        self._engine = open_for_reading(url)
        self._images = images
        self._settings = settings
        self._disk_space = disk_space
        self._run_task = run_task
        self._rest = rest
        self._ages = ages
        self._on_pruned = on_pruned
        self.counts = PruneCounts()
        self._log = structlog.get_logger("retention")

    def close(self) -> None:
        self._engine.dispose()

    def prune_images(self) -> None:
        """Prune until no image is too old, and images need no more room than they may. Replaced examples go first."""
        replaced = self._run_task(lambda store: store.drop_examples())
        self._count_images(len(replaced) - len(remove_images(self._images, replaced)), 0)
        total_bytes = self._query(kept_bytes) if self._settings.images_bytes is not None else 0
        while images := self._next_images(total_bytes):
            began_s = time.monotonic()
            ids = [image.inspection_id for image in images]
            self._run_task(lambda store, ids=ids: store.transact(forget_images, ids))
            failures = remove_images(self._images, [image.path for image in images])
            removed_bytes = sum(image.size_bytes for image in images if image.path not in failures)
            total_bytes -= removed_bytes
            self._count_images(len(images) - len(failures), removed_bytes)
            if failures:
                left = [ImageCopy(image.inspection_id, image.path) for image in images if image.path in failures]
                self._run_task(lambda store, left=left: store.write(copies=left))
                path, error = next(iter(failures.items()))
                self._log.error("images_not_pruned", files=len(failures), example=path, error=error)
                return
            # A disk that deletes slowly is a disk that others wait for.
            if not self._rest(max(_PAUSE_S, _PAUSE_SHARE * (time.monotonic() - began_s))):
                return

    def prune_results(self) -> None:
        old = self._old(self._settings.results_for)
        if old is None:
            return
        after = ""
        while boards := self._query(
            lambda connection, after=after: old_boards(connection, old, after, _BOARDS_PER_QUERY)
        ):
            for group in _groups(boards):
                if not self._forget(group, old):
                    return
            if len(boards) < _BOARDS_PER_QUERY or after == boards[-1].completed_at:
                break
            after = boards[-1].completed_at
        versions, last_id = self._query(lambda connection: unused_rules(connection, old))
        if versions:
            self._run_task(lambda store: store.forget_rules(versions, last_id))
        while self._run_task(lambda store: store.transact(forget_others, old, _ROWS_PER_TURN)) and self._rest(_PAUSE_S):
            pass

    def sweep(self) -> None:
        old = self._old(self._settings.results_for)
        before = None if old is None else old.before
        for files in images_by_folder(self._images):
            left = self._query(lambda connection, files=files: strays(connection, files, before))
            if left:
                removed = len(left) - len(remove_images(self._images, left))
                self.counts.stray_files += removed
                self._log.info("stray_files_removed", files=removed, example=left[0])
            if not self._rest(_PAUSE_S):
                return

    def _next_images(self, total_bytes: int) -> list[KeptImage]:
        old = self._old(self._settings.images_for)
        if old is not None and (
            images := self._query(lambda connection: oldest_kept(connection, _IMAGES_PER_TURN, old))
        ):
            return images[:_IMAGES_PER_TURN]
        excess = excess_bytes(total_bytes, self._settings.images_bytes, *self._free())
        if not excess:
            return []
        examples = self._settings.good_examples
        oldest = self._query(lambda connection: oldest_kept(connection, _IMAGES_PER_TURN, None, examples))
        return images_to_prune(oldest, excess)[:_IMAGES_PER_TURN]

    def _free(self) -> tuple[int | None, int | None]:
        space = self._disk_space.space("images")
        if space is None or self._settings.free is None:
            return None, None
        min_bytes = int(RESUME_FACTOR * self._disk_space.reserve_bytes(space))
        return space.free_bytes, max(min(self._settings.free, space.total_bytes // 2), min_bytes)

    def _forget(self, boards: list[OldBoard], old: AgeLimit) -> bool:
        ids = [board.board_id for board in boards]
        pruned = self._run_task(lambda store: store.forget_boards(ids, old))
        remove_images(self._images, pruned.image_paths)
        self.counts.boards += pruned.boards
        self.counts.inspections += pruned.inspections
        self._on_pruned("boards", pruned.boards)
        self._count_images(len(pruned.image_paths), 0)
        return self._rest(_PAUSE_S)

    def _count_images(self, images: int, image_bytes: int) -> None:
        self.counts.images += images
        self.counts.image_bytes += image_bytes
        self._on_pruned("images", images)

    def _old(self, age_s: float | None) -> AgeLimit | None:
        return None if age_s is None else self._ages(age_s)

    def _query(self, query: Callable[[Connection], T]) -> T:
        with self._engine.connect() as connection:
            return query(connection)


def prune_alone(url: str, images: Path, settings: Retention, note: str | None = None) -> PruneCounts:
    """Prune a line whose daemon does not run, under the caller's locks, and trust the clock."""
    path = sqlite_path(url)
    if not path.is_file():
        raise StoreError(f"there is no database at {path}: has this line run?")
    with closing(open_store(url)) as store:
        pruner = Pruner(
            *(url, images, settings, DiskSpace({"images": images}, settings.reserve)),
            run_task=lambda task: task(store),
            rest=lambda _seconds: True,
            ages=lambda age_s: AgeLimit(utc_text(max(0.0, time.time() - age_s))),
        )
        with closing(pruner):
            pruner.prune_images()
            pruner.prune_results()
            pruner.sweep()
        row = Change(utc_text(time.time()), current_user(), "prune", "results", note=note)
        store.note_changes(ChangeNotes((row,)))
        upkeep.vacuum(store.engine)
    return pruner.counts


def _groups(boards: list[OldBoard]) -> list[list[OldBoard]]:
    """Group boards by transaction: together few rows, or one board alone."""
    groups: list[list[OldBoard]] = []
    rows = _ROWS_PER_TURN
    for board in boards:
        if rows + board.rows > _ROWS_PER_TURN:
            groups.append([])
            rows = 0
        groups[-1].append(board)
        rows += board.rows
    return groups
