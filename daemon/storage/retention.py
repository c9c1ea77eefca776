"""The retention thread: watches free space and the database's files, prunes, and keeps the database in shape.

Rows are changed first, then files are deleted: a crash leaves files that no row names, and `sweep` deletes them.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, wait
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog
from sqlalchemy import Connection, Engine, Row, select
from sqlalchemy.exc import SQLAlchemyError

from daemon.config.settings import Retention
from daemon.storage.database import prune, upkeep
from daemon.storage.database.changes import Change, ChangeNotes
from daemon.storage.database.connections import StoreError, open_for_reading, sqlite_path
from daemon.storage.database.prune import AgeLimit, KeptImage
from daemon.storage.database.rows import ImageCopy
from daemon.storage.database.schema import age_marks
from daemon.storage.database.store import Store
from daemon.storage.database.transaction import Clock
from daemon.storage.database.upkeep import Checkpoints, WriteAheadLog
from daemon.storage.database_watch import DatabaseFiles
from daemon.storage.disk_space import RESUME_FACTOR, DiskSpace, FreeSpace
from daemon.storage.image_archive import images_by_folder, remove_images
from daemon.storage.writer import Writer
from daemon.units import utc_text
from experts.people import current_user

T = TypeVar("T")

#: One turn of the writer: a few milliseconds.
_IMAGES_PER_TURN = 200
_ROWS_PER_TURN = 4000
_BOARDS_PER_QUERY = 50
#: Between two turns intake and verdicts have the writer and the disk.
_PAUSE_S = 0.05
_PAUSE_SHARE = 0.25
#: A disk that stays nearly full this long is logged: until then pruning may keep up.
_LOG_FULL_AFTER_S = 5.0
_TICK_S = 0.25
_WRITER_S = 1.0
_CHECKPOINT_S = 1.0
_FILES_S = 1.0
_IMAGES_S = 5.0
_MARK_S = 300.0
_HOUR_S = 3600.0
#: A wrong clock has this long to be put right, in time during which the daemon runs.
_DAY_S = 86400.0
#: After a start the line has other things to do first.
_FIRST_OPTIMIZE_S = 600.0
_VACUUM_PAUSE_S = 0.05
_NEVER = float("inf")


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

    def __init__(self, engine: Engine, clock: Clock, run_task: RunTask) -> None:
        self._engine = engine
        self._clock = clock
        self._run_task = run_task
        marks = self._marks()
        self._start_s = clock.monotonic_s() - (marks[-1].running_s if marks else 0)

    def note(self) -> None:
        """Store the clock and the newest rows; every few minutes, because a restart loses the time since."""
        running_s, wall_s = int(self._clock.monotonic_s() - self._start_s), self._clock.wall_s()
        self._run_task(lambda store: store.transact(prune.note_age, running_s, wall_s, _DAY_S))

    def __call__(self, age_s: float) -> AgeLimit | None:
        running_s = self._clock.monotonic_s() - self._start_s
        marks = self._marks()
        day_old = [mark for mark in marks if mark.running_s <= running_s - _DAY_S]
        if not day_old:
            return None
        clocks_s = (mark.wall_s + running_s - mark.running_s for mark in marks[len(day_old) - 1 :])
        before = utc_text(max(0.0, min(self._clock.wall_s(), *clocks_s) - age_s))
        return AgeLimit(before, day_old[-1].seq)

    def _marks(self) -> Sequence[Row[*tuple[Any, ...]]]:
        with self._engine.connect() as connection:
            return connection.execute(select(age_marks).order_by(age_marks.c.running_s)).all()


@dataclass(slots=True)
class PruneCounts:
    images: int = 0
    image_bytes: int = 0
    boards: int = 0
    inspections: int = 0
    stray_files: int = 0


@dataclass(eq=False)
class Pruner:
    """Prunes as `settings` allow. `rest(seconds)` pauses and returns False to stop. One thread calls.

    `on_pruned` gets `images` or `boards`, and their number.
    """

    engine: Engine
    images: Path
    settings: Retention
    disk_space: DiskSpace
    run_task: RunTask
    rest: Callable[[float], bool]
    ages: Ages
    on_pruned: Callable[[str, int], None] = lambda _what, _count: None
    counts: PruneCounts = field(default_factory=PruneCounts)
    _log: Any = field(default_factory=lambda: structlog.get_logger("retention"))

    def prune_images(self) -> None:
        """Prune until no image is too old, and images need no more room than they may. Replaced examples go first."""
        replaced = self.run_task(lambda store: store.drop_examples())
        self._remove_images(replaced)
        total_bytes = self._query(prune.kept_bytes) if self.settings.images_bytes is not None else 0
        while images := self._next_images(total_bytes):
            began_s = time.monotonic()
            ids = [image.inspection_id for image in images]
            self.run_task(lambda store, ids=ids: store.transact(prune.forget_images, ids))
            failures = self._remove_images([image.path for image in images])
            total_bytes -= sum(image.size_bytes for image in images if image.path not in failures)
            if failures:
                left = [ImageCopy(image.inspection_id, image.path) for image in images if image.path in failures]
                self.run_task(lambda store, left=left: store.write_results(left))
                path, error = next(iter(failures.items()))
                self._log.error("images_not_pruned", files=len(failures), example=path, error=error)
                return
            # A disk that deletes slowly is a disk that others wait for.
            if not self.rest(max(_PAUSE_S, _PAUSE_SHARE * (time.monotonic() - began_s))):
                return

    def prune_results(self) -> None:
        old = self._old(self.settings.results_for)
        if old is None:
            return
        after = ""
        while boards := self._query(
            lambda connection, after=after: prune.old_boards(connection, old, after, _BOARDS_PER_QUERY)
        ):
            for group in _groups(boards):
                if not self._forget(group, old):
                    return
            if len(boards) < _BOARDS_PER_QUERY or after == boards[-1].completed_at:
                break
            after = boards[-1].completed_at
        versions, last_id = self._query(lambda connection: prune.unused_rules(connection, old))
        if versions:
            self.run_task(lambda store: store.forget_rules(versions, last_id))
        while self.run_task(lambda store: store.transact(prune.forget_others, old, _ROWS_PER_TURN)) and self.rest(
            _PAUSE_S
        ):
            pass

    def sweep(self) -> None:
        old = self._old(self.settings.results_for)
        before = None if old is None else old.before
        for files in images_by_folder(self.images):
            left = self._query(lambda connection, files=files: prune.strays(connection, files, before))
            if left:
                removed = len(left) - len(remove_images(self.images, left)[1])
                self.counts.stray_files += removed
                self._log.info("stray_files_removed", files=removed, example=left[0])
            if not self.rest(_PAUSE_S):
                return

    def _next_images(self, total_bytes: int) -> list[KeptImage]:
        old = self._old(self.settings.images_for)
        if old is not None and (
            images := self._query(lambda connection: prune.oldest_kept(connection, _IMAGES_PER_TURN, old))
        ):
            return images
        excess, pruned = self._excess_bytes(total_bytes), list[KeptImage]()
        if excess:
            examples = self.settings.good_examples
            for image in self._query(
                lambda connection: prune.oldest_kept(connection, _IMAGES_PER_TURN, None, examples)
            ):
                if excess <= 0:
                    break
                pruned.append(image)
                excess -= image.size_bytes
        return pruned

    def _excess_bytes(self, kept_bytes: int) -> int:
        """Return the bytes to prune: beyond what images may have, or for the floor of free space."""
        most, floor, space = self.settings.images_bytes, self.settings.free, self.disk_space.space("images")
        excess = 0 if most is None else max(0, kept_bytes - most)
        if space is None or floor is None:
            return excess
        least = int(RESUME_FACTOR * self.disk_space.reserve_bytes(space))
        return max(excess, max(min(floor, space.total_bytes // 2), least) - space.free_bytes)

    def _forget(self, boards: Sequence[Row[*tuple[Any, ...]]], old: AgeLimit) -> bool:
        ids = [board.board_id for board in boards]
        pruned = self.run_task(lambda store: store.forget_boards(ids, old))
        self._remove_images(pruned.image_paths)
        self.counts.boards += pruned.boards
        self.counts.inspections += pruned.inspections
        self.on_pruned("boards", pruned.boards)
        return self.rest(_PAUSE_S)

    def _remove_images(self, paths: Sequence[str]) -> dict[str, str]:
        """Delete and count copies; return those that cannot be deleted, and why."""
        removed_bytes, failures = remove_images(self.images, paths)
        self.counts.images += len(paths) - len(failures)
        self.counts.image_bytes += removed_bytes
        self.on_pruned("images", len(paths) - len(failures))
        return failures

    def _old(self, age_s: float | None) -> AgeLimit | None:
        return None if age_s is None else self.ages(age_s)

    def _query(self, query: Callable[[Connection], T]) -> T:
        with self.engine.connect() as connection:
            return query(connection)


@dataclass(slots=True)
class _PeriodicTask:
    """A task every `interval_s`, next at `at_s`. An urgent one runs also while another pauses."""

    task: Callable[[], None]
    at_s: float
    interval_s: float
    is_urgent: bool = False


class RetentionThread:
    """`problem` is why no image can be taken; `prune` starts a round now, from any thread."""

    def __init__(  # noqa: PLR0913  app.py names each part it wires
        self,
        url: str,
        images: Path,
        settings: Retention,
        disk_space: DiskSpace,
        database_files: DatabaseFiles,
        *,
        writer: Writer,
        hold: Callable[[str, str], None],
        resume: Callable[[str], None],
        on_pruned: Callable[[str, int], None],
        clock: Clock | None = None,
    ) -> None:
        """`hold(cause, problem)` keeps images out until `resume(cause)`; `on_pruned` gets a kind and a number."""
        self._clock = clock or Clock()
        self._disk_space = disk_space
        self._database_files = database_files
        self._hold, self._resume, self._on_pruned = hold, resume, on_pruned
        self._writer = writer
        self._checkpoints = Checkpoints(url)
        self._engine = open_for_reading(url)
        self._ages = RunningAges(self._engine, self._clock, self._run_task)
        self._pruner = Pruner(
            *(self._engine, images, settings, disk_space),
            run_task=self._run_task,
            rest=self._rest,
            ages=self._ages,
            on_pruned=self._count_pruned,
        )
        self._pruned_at_s: float | None = None
        self._last_log = WriteAheadLog(0, 0, 0)
        self.disks: Mapping[str, FreeSpace] = {}
        self.problem: str | None = None
        self._lost_file: str | None = None
        self._full_since_s = 0.0
        self._is_full_logged = False
        self._stopping = threading.Event()
        now_s = self._clock.monotonic_s()
        self._round = (
            _PeriodicTask(self._pruner.prune_images, now_s, _IMAGES_S),
            _PeriodicTask(self._pruner.prune_results, now_s, _HOUR_S),
            _PeriodicTask(self._pruner.sweep, now_s + _IMAGES_S, _NEVER),
        )
        self._tasks: list[_PeriodicTask] = []
        self._log = structlog.get_logger("retention")
        self._thread = threading.Thread(target=self._run, name="retention")

    @property
    def wal_bytes(self) -> int:
        return self._last_log.file_bytes

    def start(self) -> None:
        self._try(self._watch_space)
        self._thread.start()

    def stop(self) -> None:
        """Finish the step at hand and end; before the writer, which runs its tasks."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._checkpoints.close()
        self._engine.dispose()

    def prune(self, *, begin: bool) -> dict[str, Any]:
        """Begin a round (unless one runs), and return the totals of all rounds since the start."""
        for task in self._round if begin else ():
            task.at_s = 0.0  # until it has run
        is_pruning = any(task.at_s == 0.0 for task in self._round)
        last_at = None if self._pruned_at_s is None else utc_text(self._pruned_at_s)
        return {"pruning": is_pruning, "last_at": last_at, **asdict(self._pruner.counts)}

    def _run(self) -> None:
        self._try(partial(self._run_upkeep, upkeep.NO_CHECKPOINTS))
        now_s = self._clock.monotonic_s()
        self._tasks = [
            _PeriodicTask(self._watch_space, now_s, 0.0, is_urgent=True),
            _PeriodicTask(self._watch_files, now_s, _FILES_S, is_urgent=True),
            _PeriodicTask(self._checkpoint, now_s + _CHECKPOINT_S, _CHECKPOINT_S, is_urgent=True),
            *self._round,
            _PeriodicTask(self._ages.note, now_s + _MARK_S, _MARK_S),
            _PeriodicTask(self._vacuum, now_s + _CHECKPOINT_S, _CHECKPOINT_S),
            _PeriodicTask(partial(self._run_upkeep, upkeep.OPTIMIZE), now_s + _FIRST_OPTIMIZE_S, _DAY_S),
        ]
        while self._rest(_TICK_S):
            self._run_due(are_urgent=False)

    def _run_due(self, *, are_urgent: bool) -> None:
        for task in self._tasks:
            is_due = task.at_s <= self._clock.monotonic_s() and not self._stopping.is_set()
            if task.is_urgent == are_urgent and is_due:
                self._try(task.task)
                task.at_s = self._clock.monotonic_s() + task.interval_s

    def _try(self, task: Callable[[], None]) -> None:
        """Run a task. If a disk or a database refuses it, it is retried later, and the line continues."""
        try:
            task()
        except CancelledError:
            self._stopping.set()
        except (OSError, sqlite3.Error, SQLAlchemyError, StoreError) as error:
            reason = str(getattr(error, "orig", error))
            self._log.warning("upkeep_failed", task=getattr(task, "__name__", "upkeep"), error=reason)
        except Exception:  # noqa: BLE001 - the thread lives on
            self._log.exception("upkeep_failed", task=getattr(task, "__name__", "upkeep"))

    def _run_task(self, task: Callable[[Store], T]) -> T:
        done = self._writer.run(task)
        while not wait([done], _WRITER_S).done:
            self._try(self._watch_files)  # the writer may wait for a file that is gone
            if not self._writer.is_alive:
                raise CancelledError
        return done.result()

    def _rest(self, seconds: float) -> bool:
        """Pause, and run urgent tasks; False once the thread is to end."""
        if self._stopping.wait(seconds):
            return False
        self._run_due(are_urgent=True)
        return not self._stopping.is_set()

    # -- space

    def _watch_space(self) -> None:
        """Hold intake while too little space is free; resume it when a little more than that is free."""
        self.disks = self._disk_space.look()
        is_tight = self._disk_space.refused() or self.problem is not None
        problem = self._disk_space.problem(factor=RESUME_FACTOR if is_tight else 1.0)
        if problem is not None:
            if self.problem is None:
                self._full_since_s = self._clock.monotonic_s()
                self._round[0].at_s = 0.0
            self._hold("disk", problem)
            self._log_full(problem)
        elif self.problem is not None:
            self._resume("disk")
            if self._is_full_logged:
                self._log.info("disk_has_room_again")
            self._is_full_logged = False
        self.problem = problem

    def _log_full(self, problem: str) -> None:
        """Log a lasting shortage once; while pruning keeps up with a full disk, no action is needed."""
        if not self._is_full_logged and self._clock.monotonic_s() - self._full_since_s >= _LOG_FULL_AFTER_S:
            self._is_full_logged = True
            self._log.error("disk_nearly_full", problem=problem)

    def _watch_files(self) -> None:
        """Hold intake while a file of the database is gone (database_watch.py)."""
        problem = self._database_files.problem()
        if problem == self._lost_file:
            return
        if problem is None:
            self._resume("files")
            self._log.info("database_usable_again")
        else:
            self._hold("files", problem)
            self._log.error("database_unusable", problem=problem)
        self._lost_file = problem

    def _count_pruned(self, kind: str, count: int) -> None:
        if count:
            self._on_pruned(kind, count)
            self._pruned_at_s = self._clock.wall_s()

    # -- the database

    def _run_upkeep(self, statements: str) -> None:
        self._run_task(lambda store: upkeep.run(store.engine, statements))

    def _checkpoint(self) -> None:
        """Checkpoint beside the writer; the last pages in its thread, so that the log restarts."""
        log = self._checkpoints.checkpoint()
        if log != self._last_log and log.is_nearly_done:
            self._run_upkeep(upkeep.FINISH_CHECKPOINT)
        if log.is_held and not self._last_log.is_held:
            self._log.warning("database_log_held", bytes=log.file_bytes, hint="a program reads the database for long")
        self._last_log = log

    def _vacuum(self) -> None:
        until_s = self._clock.monotonic_s() + _CHECKPOINT_S
        while self._clock.monotonic_s() < until_s and self._checkpoints.vacuum_is_due():
            self._run_upkeep(upkeep.VACUUM_STEP)
            if not self._rest(_VACUUM_PAUSE_S):
                return


def prune_alone(url: str, images: Path, settings: Retention, note: str | None = None) -> PruneCounts:
    """Prune a line whose daemon does not run, under the caller's locks, and trust the clock."""
    path = sqlite_path(url)
    if not path.is_file():
        raise StoreError(f"there is no database at {path}: has this line run?")
    engine = open_for_reading(url)
    with closing(Store(url)) as store:
        pruner = Pruner(
            *(engine, images, settings, DiskSpace({"images": images})),
            run_task=lambda task: task(store),
            rest=lambda _seconds: True,
            ages=lambda age_s: AgeLimit(utc_text(max(0.0, time.time() - age_s))),
        )
        try:
            pruner.prune_images()
            pruner.prune_results()
            pruner.sweep()
        finally:
            engine.dispose()
        row = Change(utc_text(time.time()), current_user(), "prune", "results", note=note)
        store.note_changes(ChangeNotes((row,)))
        upkeep.run(store.engine, upkeep.VACUUM)
    return pruner.counts


def _groups(boards: Sequence[Row[*tuple[Any, ...]]]) -> list[list[Row[*tuple[Any, ...]]]]:
    """Group boards by transaction: together few rows, or one board alone."""
    groups: list[list[Row[*tuple[Any, ...]]]] = []
    rows = _ROWS_PER_TURN
    for board in boards:
        if rows + board.rows > _ROWS_PER_TURN:
            groups.append([])
            rows = 0
        groups[-1].append(board)
        rows += board.rows
    return groups
