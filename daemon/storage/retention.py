"""The retention thread: watches free space, prunes, and has the writer keep the database in shape meanwhile."""

import sqlite3
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError

from daemon.config.settings import Retention
from daemon.storage.database import upkeep
from daemon.storage.database.connections import StoreError
from daemon.storage.database.store import Store
from daemon.storage.database.transaction import Clock
from daemon.storage.database.upkeep import Checkpoints, WriteAheadLog
from daemon.storage.disk_space import RESUME_FACTOR, DiskSpace, FreeSpace
from daemon.storage.pruning import Pruner, RunningAges
from daemon.storage.writer import Writer
from daemon.units import utc_text

T = TypeVar("T")

#: A disk that stays nearly full this long is logged: until then pruning may keep up.
_LOG_FULL_AFTER_S = 5.0
_TICK_S = 0.25
_WRITER_S = 1.0
_CHECKPOINT_S = 1.0
_IMAGES_S = 5.0
_MARK_S = 300.0
_HOUR_S = 3600.0
_DAY_S = 86400.0
#: After a start the line has other things to do first.
_FIRST_OPTIMIZE_S = 600.0
_VACUUM_PAUSE_S = 0.05
_NEVER = float("inf")


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
        self._hold, self._resume, self._on_pruned = hold, resume, on_pruned
        self._writer = writer
        self._checkpoints = Checkpoints(url)
        self._ages = RunningAges(url, self._clock, self._run_task)
        self._pruner = Pruner(
            *(url, images, settings, disk_space),
            run_task=self._run_task,
            rest=self._rest,
            ages=self._ages,
            on_pruned=self._count_pruned,
        )
        self._pruned_at_s: float | None = None
        self._last_log = WriteAheadLog(0, 0, 0)
        self.disks: Mapping[str, FreeSpace] = {}
        self.problem: str | None = None
        self._full_since_s = 0.0
        self._is_full_logged = False
        self._stopping = threading.Event()
        self._requested = threading.Event()
        self._is_pruning = False
        self._prune_images = _PeriodicTask(self._pruner.prune_images, 0.0, _IMAGES_S)
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
        self._pruner.close()
        self._ages.close()

    def prune(self, *, begin: bool) -> dict[str, Any]:
        """Begin a round (unless one runs), and return the totals of all rounds since the start."""
        if begin:
            self._requested.set()
        is_pruning = self._is_pruning or self._requested.is_set()
        last_at = None if self._pruned_at_s is None else utc_text(self._pruned_at_s)
        return {"pruning": is_pruning, "last_at": last_at, **asdict(self._pruner.counts)}

    def _run(self) -> None:
        self._try(self._disable_checkpoints)
        now_s = self._clock.monotonic_s()
        self._tasks = [
            _PeriodicTask(self._watch_space, now_s, 0.0, is_urgent=True),
            _PeriodicTask(self._checkpoint, now_s + _CHECKPOINT_S, _CHECKPOINT_S, is_urgent=True),
            _PeriodicTask(self._pruner.sweep, now_s + _IMAGES_S, _NEVER),
            self._prune_images,
            _PeriodicTask(self._pruner.prune_results, now_s, _HOUR_S),
            _PeriodicTask(self._ages.note, now_s + _MARK_S, _MARK_S),
            _PeriodicTask(self._vacuum, now_s + _CHECKPOINT_S, _CHECKPOINT_S),
            _PeriodicTask(self._optimize, now_s + _FIRST_OPTIMIZE_S, _DAY_S),
        ]
        while self._rest(_TICK_S):
            if self._requested.is_set():
                self._prune_now()
            self._run_due(are_urgent=False)

    def _prune_now(self) -> None:
        self._is_pruning = True
        self._requested.clear()
        for task in (self._pruner.prune_images, self._pruner.prune_results, self._pruner.sweep):
            self._try(task)
        self._is_pruning = False

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
            self._log.warning("upkeep_failed", task=getattr(task, "__name__", "?"), error=reason)
        except Exception:  # noqa: BLE001 - the thread lives on
            self._log.exception("upkeep_failed", task=getattr(task, "__name__", "?"))

    def _run_task(self, task: Callable[[Store], T]) -> T:
        done = self._writer.run(task)
        while not wait([done], _WRITER_S).done:
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
                self._prune_images.at_s = 0.0
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

    def _count_pruned(self, kind: str, count: int) -> None:
        if count:
            self._on_pruned(kind, count)
            self._pruned_at_s = self._clock.wall_s()

    # -- the database

    def _disable_checkpoints(self) -> None:
        self._run_task(lambda store: upkeep.disable_checkpoints(store.engine))

    def _checkpoint(self) -> None:
        """Checkpoint beside the writer; the last pages in its thread, so that the log restarts."""
        log = self._checkpoints.checkpoint()
        if log != self._last_log and log.is_nearly_done:
            self._run_task(lambda store: upkeep.finish_checkpoint(store.engine))
        if log.is_held and not self._last_log.is_held:
            self._log.warning("database_log_held", bytes=log.file_bytes, hint="a program reads the database for long")
        self._last_log = log

    def _vacuum(self) -> None:
        until_s = self._clock.monotonic_s() + _CHECKPOINT_S
        while self._clock.monotonic_s() < until_s and self._checkpoints.vacuum_is_due():
            self._run_task(lambda store: upkeep.vacuum_step(store.engine))
            if not self._rest(_VACUUM_PAUSE_S):
                return

    def _optimize(self) -> None:
        self._run_task(lambda store: upkeep.optimize(store.engine))
