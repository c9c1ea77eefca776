"""Pruning: images by age, bytes and free space, results by age. Rows are changed first, then files are deleted.

A crash between the two leaves a file that no row names, and `sweep` deletes it. The other order would leave rows that
name nothing.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import structlog
from sqlalchemy import Connection

from daemon.config.settings import Retention
from daemon.host.folders import make_folder
from daemon.policy.retain import KeptImage, excess_bytes, images_to_prune
from daemon.storage.database import upkeep
from daemon.storage.database.connections import FILE_MODE, StoreError, open_for_reading, sqlite_path
from daemon.storage.database.prune import Cutoff, OldBoard, kept_bytes, old_boards, oldest_kept, strays
from daemon.storage.database.rows import ImageCopy
from daemon.storage.database.store import Store, open_store
from daemon.storage.database.transaction import Clock
from daemon.storage.disk_space import RESUME_FACTOR, DiskSpace
from daemon.storage.image_archive import images_by_folder, remove_images
from daemon.units import utc_text
from experts.durable import replace_durably

T = TypeVar("T")

#: One turn of the writer: a few milliseconds.
_IMAGES_PER_TURN = 200
_ROWS_PER_TURN = 4000
_BOARDS_PER_QUERY = 50
#: Between two turns intake and verdicts have the writer and the disk.
_PAUSE_S = 0.05
_PAUSE_SHARE = 0.25
#: A wrong clock has this long to be corrected before it is trusted.
_TRUSTED_AFTER_S = 86400.0
#: The state of AgeClock, in the folder of the images.
AGES_FILE = ".retention.json"
_PROPOSED_EVERY_S = 3600.0
_SAVED_EVERY_S = 300.0


class RunTask(Protocol):
    """Runs a short task with the store, in the thread that writes."""

    def __call__(self, task: Callable[[Store], T], /) -> T: ...


class AgeClock:
    """The time and the `seq` that ages count from: both as they were a day of running time ago, or more.

    Each hour the clock's time and the last `seq` are proposed. A proposal is in force after the daemon has run for a
    day; a clock that is put right in this day lowers it. Proposals and the running time are kept in `file`.
    """

    def __init__(self, clock: Clock, file: Path, last_seq: Callable[[], int]) -> None:
        self._clock, self._file, self._last_seq = clock, file, last_seq
        #: Running time, wall clock, `seq`; oldest first.
        self._proposals: list[tuple[float, float, int]] = []
        self._saved_ran_s = 0.0
        try:
            kept = json.loads(file.read_bytes())
            self._proposals = [(float(ran_s), float(wall_s), int(seq)) for ran_s, wall_s, seq in kept["proposals"]]
            self._saved_ran_s = float(kept["ran_s"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._proposals = []
            structlog.get_logger("retention").warning("ages_begin_anew", file=str(file), error=str(error))
        self._ran_before_s = self._saved_ran_s - clock.monotonic_s()

    def cutoff(self, age_s: float) -> Cutoff | None:
        """Return the cutoff of results older than `age_s`; None while nothing may be pruned by age."""
        if (past := self.look()) is None:
            return None
        return Cutoff(utc_text(max(0.0, min(past[1], self._clock.wall_s()) - age_s)), past[2])

    def look(self) -> tuple[float, float, int] | None:
        """Compare the clock with the proposals; return the one in force. To be called every minute or so."""
        ran_s, now_s = self._ran_before_s + self._clock.monotonic_s(), self._clock.wall_s()
        past = [proposal for proposal in self._proposals if ran_s - proposal[0] >= _TRUSTED_AFTER_S]
        open_ = self._proposals[len(past) :]
        if not past or now_s >= past[-1][1]:  # an earlier time shows that the clock is behind, or was ahead for long
            open_ = [(at_s, min(wall_s, now_s), seq) for at_s, wall_s, seq in open_]
        proposals = past[-1:] + open_
        if not proposals or ran_s - proposals[-1][0] >= _PROPOSED_EVERY_S:
            proposals.append((ran_s, now_s, self._last_seq()))
        if proposals != self._proposals or ran_s - self._saved_ran_s >= _SAVED_EVERY_S:
            self._proposals = proposals
            self._save(ran_s)
        return past[-1] if past else None

    def _save(self, ran_s: float) -> None:
        """Replace the file. A disk that is full must not end pruning: a restart then waits for longer."""
        self._saved_ran_s = ran_s
        with suppress(OSError):
            make_folder(self._file.parent)
            text = json.dumps({"ran_s": ran_s, "proposals": self._proposals})
            replace_durably(self._file, text.encode(), FILE_MODE)


@dataclass(slots=True)
class PruneCounts:
    """The totals of a run."""

    images: int = 0
    image_bytes: int = 0
    boards: int = 0
    inspections: int = 0
    stray_files: int = 0


class Pruner:
    """Prunes as `settings` allow. `rest(seconds)` pauses and returns False to stop. One thread calls."""

    def __init__(  # noqa: PLR0913  retention.py names each part it wires
        self,
        url: str,
        images: Path,
        settings: Retention,
        disk_space: DiskSpace,
        *,
        run_task: RunTask,
        rest: Callable[[float], bool],
        clock: Clock,
        cutoff: Callable[[float], Cutoff | None],
        on_pruned: Callable[[str, int], None] = lambda _what, _count: None,
    ) -> None:
        """`cutoff` returns the end of an age (AgeClock); `on_pruned` gets `images` or `boards`, and their number."""
        self._engine = open_for_reading(url)
        self._images = images
        self._settings = settings
        self._disk_space = disk_space
        self._run_task = run_task
        self._rest = rest
        self._clock = clock
        self._cutoff = cutoff
        self._on_pruned = on_pruned
        self.counts = PruneCounts()
        self._log = structlog.get_logger("retention")

    def close(self) -> None:
        self._engine.dispose()

    def prune_images(self) -> None:
        """Prune until no image is too old, and images need no more room than they may."""
        total_bytes = self._query(kept_bytes) if self._settings.images_bytes is not None else 0
        while images := self._next_images(total_bytes):
            began_s = self._clock.monotonic_s()
            self._run_task(lambda store, images=images: store.forget_images([image.inspection_id for image in images]))
            failures = remove_images(self._images, [image.path for image in images])
            removed_bytes = sum(image.size_bytes for image in images if image.path not in failures)
            total_bytes -= removed_bytes
            self._count_images(len(images) - len(failures), removed_bytes)
            if failures:
                self._restore_paths(images, failures)
                return
            # A disk that deletes slowly is a disk that others wait for.
            if not self._rest(max(_PAUSE_S, _PAUSE_SHARE * (self._clock.monotonic_s() - began_s))):
                return

    def prune_results(self) -> None:
        """Prune closed boards with all their rows, loads, and answers of language models."""
        cutoff = self._before(self._settings.results_for)
        if cutoff is None:
            return
        after = ""
        while boards := self._query(
            lambda connection, after=after: old_boards(connection, cutoff, after, _BOARDS_PER_QUERY)
        ):
            for group in _groups(boards):
                if not self._forget(group, cutoff):
                    return
            if len(boards) < _BOARDS_PER_QUERY or after == boards[-1].completed_at:
                break
            after = boards[-1].completed_at
        while self._run_task(lambda store: store.forget_others(cutoff, _ROWS_PER_TURN)) and self._rest(_PAUSE_S):
            pass

    def sweep(self) -> None:
        """Delete the files that an interrupted pruning left behind."""
        cutoff = self._before(self._settings.results_for)
        before = None if cutoff is None else cutoff.before
        for files in images_by_folder(self._images):
            left = self._query(lambda connection, files=files: strays(connection, files, before))
            if left:
                removed = len(left) - len(remove_images(self._images, left))
                self.counts.stray_files += removed
                self._log.info("stray_files_removed", files=removed, example=left[0])
            if not self._rest(_PAUSE_S):
                return

    def _next_images(self, total_bytes: int) -> list[KeptImage]:
        """Return the images of the next turn in their order; `total_bytes` are there in all."""
        settings = self._settings
        cutoff = self._before(settings.images_for)
        if cutoff and (old := self._query(lambda connection: oldest_kept(connection, _IMAGES_PER_TURN, cutoff))):
            return old[:_IMAGES_PER_TURN]
        excess = excess_bytes(total_bytes, settings.images_bytes, *self._free())
        if not excess:
            return []
        oldest = self._query(lambda connection: oldest_kept(connection, _IMAGES_PER_TURN, None))
        return images_to_prune(oldest, excess)[:_IMAGES_PER_TURN]

    def _free(self) -> tuple[int | None, int | None]:
        """Return the free bytes of the images' disk, and the bytes that have to be free; None if none have to."""
        space = self._disk_space.space("images")
        if space is None or self._settings.free is None:
            return None, None
        min_bytes = int(RESUME_FACTOR * self._disk_space.reserve_bytes(space))
        return space.free_bytes, max(min(self._settings.free, space.total_bytes // 2), min_bytes)

    def _forget(self, boards: list[OldBoard], cutoff: Cutoff) -> bool:
        ids = [board.board_id for board in boards]
        pruned = self._run_task(lambda store: store.forget_boards(ids, cutoff))
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

    def _restore_paths(self, images: list[KeptImage], failures: dict[str, str]) -> None:
        """Name files again that could not be deleted."""
        copies = [ImageCopy(image.inspection_id, image.path) for image in images if image.path in failures]
        self._run_task(lambda store: store.write(copies=copies))
        path, error = next(iter(failures.items()))
        self._log.error("images_not_pruned", files=len(failures), example=path, error=error)

    def _before(self, age_s: float | None) -> Cutoff | None:
        return None if age_s is None else self._cutoff(age_s)

    def _query(self, query: Callable[[Connection], T]) -> T:
        with self._engine.connect() as connection:
            return query(connection)


def trusting(clock: Clock) -> Callable[[float], Cutoff]:
    """Return cutoffs by the clock's present time."""
    return lambda age_s: Cutoff(utc_text(max(0.0, clock.wall_s() - age_s)))


def prune_alone(url: str, images: Path, settings: Retention) -> PruneCounts:
    """Prune a line whose daemon does not run: the caller holds its locks. StoreError if there is no database."""
    path = sqlite_path(url)
    if path is not None and not path.is_file():
        raise StoreError(f"there is no database at {path}: has this line run?")
    store = open_store(url)
    try:
        pruner = Pruner(
            *(url, images, settings, DiskSpace({"images": images}, settings.reserve)),
            run_task=lambda task: task(store),
            rest=lambda _seconds: True,
            clock=Clock(),
            cutoff=trusting(Clock()),
        )
        try:
            pruner.prune_images()
            pruner.prune_results()
            pruner.sweep()
        finally:
            pruner.close()
        upkeep.vacuum(store.engine)
    finally:
        store.close()
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
