"""What is old goes: images by age, bytes and free space, results by age. Rows first, then files.

A crash between the two leaves a file that no row names: `sweep` takes it. The other order would leave rows that name
nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import structlog
from sqlalchemy import Connection

from daemon.config.settings import Retention
from daemon.policy.retain import KeptImage, excess_bytes, images_to_prune
from daemon.storage.database import upkeep
from daemon.storage.database.connections import StoreError, open_for_reading, sqlite_path
from daemon.storage.database.prune import OldBoard, kept_bytes, newest_at, old_boards, oldest_kept, strays
from daemon.storage.database.store import Store, open_store
from daemon.storage.database.values import Clock, Kept
from daemon.storage.disk_space import RESUME_MORE, DiskSpace
from daemon.storage.kept_images import files_by_part, remove
from daemon.units import utc_text, wall_seconds

T = TypeVar("T")

#: One turn of the writer: a few milliseconds.
_IMAGES_AT_ONCE = 200
_ROWS_AT_ONCE = 4000
_BOARDS_AT_ONCE = 50
#: Between two turns intake and verdicts have the writer and the disk.
_PAUSE_S = 0.05
_PAUSE_SHARE = 0.25
#: A clock that stands ahead of all results may be wrong. It has this long to be put right before it is believed.
_BELIEVED_AFTER_S = 86400.0


class CarryOut(Protocol):
    """Does a short task with the store, where nobody else writes."""

    def __call__(self, task: Callable[[Store], T], /) -> T: ...


class Ages:
    """The time from which ages count, `now_s`: a clock that stands ahead at a start, or is set, prunes nothing.

    For a day it is that of the newest image, at most, and what has passed since the start; then the clock's own.
    """

    def __init__(self, clock: Clock, newest_s: float | None) -> None:
        """`newest_s`: when the newest image came that a run before has left, if there is one."""
        self._clock = clock
        self._start_s = clock.monotonic_s()
        self._believed_s = clock.wall_s()
        self._proven_s = self._believed_s if newest_s is None else min(newest_s, self._believed_s)

    def now_s(self) -> float:
        up_s = self._clock.monotonic_s() - self._start_s
        began_s = self._proven_s if up_s < _BELIEVED_AFTER_S else self._believed_s
        return min(began_s + up_s, self._clock.wall_s())


@dataclass(slots=True)
class Pruned:
    """What has gone so far."""

    images: int = 0
    image_bytes: int = 0
    boards: int = 0
    inspections: int = 0
    stray_files: int = 0


class Pruner:
    """Prunes what `settings` allow; `rest(seconds)` pauses and says whether to go on. One thread calls."""

    def __init__(
        self,
        url: str,
        images: Path,
        settings: Retention,
        room: DiskSpace,
        *,
        carry_out: CarryOut,
        rest: Callable[[float], bool],
        clock: Clock,
    ) -> None:
        """`clock.wall_s` is the time from which ages count: one that jumps forward would prune everything (Ages)."""
        self._engine = open_for_reading(url)
        self._images = images
        self._settings = settings
        self._room = room
        self._carry_out = carry_out
        self._rest = rest
        self._clock = clock
        self.pruned = Pruned()
        self._log = structlog.get_logger("retention")

    def close(self) -> None:
        self._engine.dispose()

    def prune_images(self) -> None:
        """Until nothing more is too old, too much or in the way."""
        kept = self._ask(kept_bytes) if self._settings.images_bytes is not None else 0
        while chosen := self._next_images(kept):
            began_s = self._clock.monotonic_s()
            self._carry_out(lambda store, chosen=chosen: store.forget_images([image.inspection_id for image in chosen]))
            left = remove(self._images, [image.path for image in chosen])
            gone = [image for image in chosen if image.path not in left]
            gone_bytes = sum(image.size_bytes for image in gone)
            kept -= gone_bytes
            self.pruned.images += len(gone)
            self.pruned.image_bytes += gone_bytes
            if left:
                self._name_again(chosen, left)
                return
            # A disk that deletes slowly is a disk that others wait for.
            if not self._rest(max(_PAUSE_S, _PAUSE_SHARE * (self._clock.monotonic_s() - began_s))):
                return

    def prune_results(self) -> None:
        """Closed boards with all their rows, loads, answers of language models."""
        before = self._before(self._settings.results_for)
        if before is None:
            return
        after = ""
        while boards := self._ask(
            lambda connection, after=after: old_boards(connection, before, after, _BOARDS_AT_ONCE)
        ):
            for group in _groups(boards):
                if not self._forget(group, before):
                    return
            if len(boards) < _BOARDS_AT_ONCE or after == boards[-1].completed_at:
                break
            after = boards[-1].completed_at
        while self._carry_out(lambda store: store.forget_others(before, _ROWS_AT_ONCE)) and self._rest(_PAUSE_S):
            pass

    def sweep(self) -> None:
        """Delete the files that an interrupted pruning left behind."""
        before = self._before(self._settings.results_for)
        for files in files_by_part(self._images):
            found = self._ask(lambda connection, files=files: strays(connection, files, before))
            if found:
                left = remove(self._images, found)
                self.pruned.stray_files += len(found) - len(left)
                self._log.info("stray_files_removed", files=len(found) - len(left), example=found[0])
            if not self._rest(_PAUSE_S):
                return

    def _next_images(self, kept: int) -> list[KeptImage]:
        """The images of the next turn, those that go first in front; `kept` bytes are there in all."""
        settings = self._settings
        before = self._before(settings.images_for)
        excess = excess_bytes(kept, settings.images_bytes, *self._free())
        if before is None and not excess:
            return []
        among = self._ask(lambda connection: oldest_kept(connection, _IMAGES_AT_ONCE, None if excess else before))
        return images_to_prune(among, before=before, excess=excess)[:_IMAGES_AT_ONCE]

    def _free(self) -> tuple[int | None, int | None]:
        """What is free on the images' disk and what has to be; None where nothing has to."""
        space = self._room.space("images")
        if space is None or self._settings.free is None:
            return None, None
        least = int(RESUME_MORE * self._room.reserve_bytes(space))
        return space.free_bytes, max(min(self._settings.free, space.total_bytes // 2), least)

    def _forget(self, boards: list[OldBoard], before: str) -> bool:
        ids = [board.board_id for board in boards]
        forgotten = self._carry_out(lambda store: store.forget_boards(ids, before))
        remove(self._images, forgotten.image_paths)
        self.pruned.boards += forgotten.boards
        self.pruned.inspections += forgotten.inspections
        self.pruned.images += len(forgotten.image_paths)
        return self._rest(_PAUSE_S)

    def _name_again(self, chosen: list[KeptImage], left: dict[str, str]) -> None:
        """Files that cannot be deleted are still there: so say their rows."""
        again = [Kept(image.inspection_id, image.path) for image in chosen if image.path in left]
        self._carry_out(lambda store: store.write(kept=again))
        path, error = next(iter(left.items()))
        self._log.error("images_not_pruned", files=len(left), example=path, error=error)

    def _before(self, age_s: float | None) -> str | None:
        """The time before which something is older than `age_s`."""
        return None if age_s is None else utc_text(max(0.0, self._clock.wall_s() - age_s))

    def _ask(self, question: Callable[[Connection], T]) -> T:
        with self._engine.connect() as connection:
            return question(connection)


def newest_s(url: str) -> float | None:
    """When the newest image came, for Ages. StoreError where the database cannot be opened."""
    engine = open_for_reading(url)
    try:
        with engine.connect() as connection:
            at = newest_at(connection)
    finally:
        engine.dispose()
    return None if at is None else wall_seconds(at)


def prune_alone(url: str, images: Path, settings: Retention) -> Pruned:
    """Prune a line whose daemon does not run: the caller holds its locks. StoreError where there is no database."""
    path = sqlite_path(url)
    if path is not None and not path.is_file():
        raise StoreError(f"there is no database at {path}: has this line run?")
    store = open_store(url)
    try:
        pruner = Pruner(
            *(url, images, settings, DiskSpace({"images": images}, settings.reserve)),
            carry_out=lambda task: task(store),
            rest=lambda _seconds: True,
            clock=Clock(),
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
    return pruner.pruned


def _groups(boards: list[OldBoard]) -> list[list[OldBoard]]:
    """Boards of one transaction each: together few rows, or one board alone."""
    groups: list[list[OldBoard]] = []
    rows = _ROWS_AT_ONCE
    for board in boards:
        if rows + board.rows > _ROWS_AT_ONCE:
            groups.append([])
            rows = 0
        groups[-1].append(board)
        rows += board.rows
    return groups
