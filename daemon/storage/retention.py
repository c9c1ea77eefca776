"""The retention thread: watches free space, prunes what is old, and keeps the database in shape while the line runs.

It writes nothing itself: what changes rows is a short task of the writer's thread, with pauses in between.
"""

import sqlite3
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError

from daemon.config.settings import Retention
from daemon.storage.database import upkeep
from daemon.storage.database.connections import StoreError
from daemon.storage.database.store import Store
from daemon.storage.database.upkeep import Checkpoints, Log
from daemon.storage.database.values import Clock
from daemon.storage.disk_space import RESUME_MORE, DiskSpace, Space
from daemon.storage.pruning import Ages, Pruned, Pruner, newest_s
from daemon.storage.writer import Writer
from daemon.units import utc_text

T = TypeVar("T")

#: A disk that is nearly full for so long is said in the log.
_TELL_FULL_S = 5.0
_TICK_S = 0.25
_WRITER_S = 1.0
_LOG_S = 1.0
_IMAGES_S = 5.0
_HOUR_S = 3600.0
_DAY_S = 86400.0
#: After a start the line has other things to do first.
_FIRST_OPTIMIZE_S = 600.0
_VACUUM_PAUSE_S = 0.05


class RetentionThread:
    """`problem` is why no image can be taken; `prune` asks for a round now, from any thread."""

    def __init__(  # noqa: PLR0913  app.py names each part it wires
        self,
        url: str,
        images: Path,
        settings: Retention,
        room: DiskSpace,
        *,
        writer: Writer,
        hold: Callable[[str, str], None],
        resume: Callable[[str], None],
        on_pruned: Callable[[str, int], None],
        clock: Clock | None = None,
    ) -> None:
        """`hold(cause, problem)` keeps images out until `resume(cause)`; `on_pruned` hears what was deleted, how many.

        Raises StoreError where the database cannot be opened.
        """
        self._clock = clock or Clock()
        self._room = room
        self._hold, self._resume, self._on_pruned = hold, resume, on_pruned
        self._writer = writer
        self._checkpoints = Checkpoints(url)
        ages = Ages(self._clock, newest_s(url))
        self._pruner = Pruner(
            *(url, images, settings, room),
            carry_out=self._carry_out,
            rest=self._rest,
            clock=Clock(ages.now_s, self._clock.monotonic_s),
        )
        self._told = Pruned()
        self._pruned_at_s: float | None = None
        self._last_log = Log(0, 0, 0)
        self._disks: Mapping[str, Space] = {}
        self._is_log_held = False
        self._problem: str | None = None
        self._full_since_s = 0.0
        self._is_full_told = False
        self._stopping = threading.Event()
        self._asked = threading.Event()
        self._is_pruning = False
        self._due: dict[Callable[[], None], tuple[float, float]] = {}
        self._log = structlog.get_logger("retention")
        self._thread = threading.Thread(target=self._run, name="retention")

    @property
    def problem(self) -> str | None:
        """Why publishers hear `busy`, while too little is free."""
        return self._problem

    @property
    def disks(self) -> Mapping[str, Space]:
        """What was free at the last look, by what lies there."""
        return self._disks

    @property
    def wal_bytes(self) -> int:
        """The database's write-ahead log, a second ago."""
        return self._last_log.file_bytes

    def start(self) -> None:
        self._try(self._look_at_room)
        self._thread.start()

    def stop(self) -> None:
        """Finish the step at hand and end; before the writer, which carries its tasks out."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._checkpoints.close()
        self._pruner.close()

    def prune(self, *, begin: bool) -> dict[str, Any]:
        """Begin a round (unless one runs), and say what all rounds since the start have pruned."""
        if begin:
            self._asked.set()
        is_pruning = self._is_pruning or self._asked.is_set()
        last_at = None if self._pruned_at_s is None else utc_text(self._pruned_at_s)
        return {"pruning": is_pruning, "last_at": last_at, **asdict(self._pruner.pruned)}

    def _run(self) -> None:
        self._try(self._take_over_checkpoints)
        now_s = self._clock.monotonic_s()
        self._due = {
            self._look_at_log: (now_s + _LOG_S, _LOG_S),
            self._pruner.sweep: (now_s + _IMAGES_S, float("inf")),
            self._prune_images: (now_s, _IMAGES_S),
            self._prune_results: (now_s, _HOUR_S),
            self._vacuum: (now_s + _LOG_S, _LOG_S),
            self._optimize: (now_s + _FIRST_OPTIMIZE_S, _DAY_S),
        }
        while self._rest(_TICK_S):
            if self._asked.is_set():
                self._round_now()
            for task, (at_s, every_s) in list(self._due.items()):
                if at_s <= self._clock.monotonic_s() and not self._stopping.is_set():
                    self._try(task)
                    self._due[task] = (self._clock.monotonic_s() + every_s, every_s)

    def _round_now(self) -> None:
        self._is_pruning = True
        self._asked.clear()
        for task in (self._prune_images, self._prune_results, self._pruner.sweep):
            self._try(task)
        self._is_pruning = False

    def _try(self, task: Callable[[], None]) -> None:
        """A disk or a database that refuses now may not later: upkeep is tried again, and the line goes on."""
        try:
            task()
        except CancelledError:
            self._stopping.set()
        except (OSError, sqlite3.Error, SQLAlchemyError, StoreError) as error:
            reason = str(getattr(error, "orig", error))
            self._log.warning("upkeep_failed", task=getattr(task, "__name__", "?"), error=reason)
        except Exception:  # noqa: BLE001 - the thread lives on
            self._log.exception("upkeep_failed", task=getattr(task, "__name__", "?"))

    def _carry_out(self, task: Callable[[Store], T]) -> T:
        """In the writer's thread; a writer that has ended carries nothing out any more."""
        done = self._writer.run(task)
        while not wait([done], _WRITER_S).done:
            if not self._writer.is_alive:
                raise CancelledError
        return done.result()

    def _rest(self, seconds: float) -> bool:
        """Pause, looking after what cannot wait; False once the thread is to end."""
        if self._stopping.wait(seconds):
            return False
        self._try(self._look_at_room)
        self._try(self._count_pruned)
        at_s, every_s = self._due.get(self._look_at_log, (float("inf"), _LOG_S))
        if at_s <= self._clock.monotonic_s():
            self._due[self._look_at_log] = (self._clock.monotonic_s() + every_s, every_s)
            self._try(self._look_at_log)
        return not self._stopping.is_set()

    # -- room

    def _look_at_room(self) -> None:
        """Hold images up while too little is free; let them in again when a little more than that is."""
        self._disks = self._room.look()
        is_tight = self._room.refused() or self._problem is not None
        problem = self._room.problem(more=RESUME_MORE if is_tight else 1.0)
        if problem is not None:
            if self._problem is None:
                self._full_since_s = self._clock.monotonic_s()
                self._due[self._prune_images] = (0.0, _IMAGES_S)
            self._hold("disk", problem)
            self._tell_full(problem)
        elif self._problem is not None:
            self._resume("disk")
            if self._is_full_told:
                self._log.info("disk_has_room_again")
            self._is_full_told = False
        self._problem = problem

    def _tell_full(self, problem: str) -> None:
        """Once it has lasted: while pruning keeps up, a disk at its floor needs nobody."""
        if not self._is_full_told and self._clock.monotonic_s() - self._full_since_s >= _TELL_FULL_S:
            self._is_full_told = True
            self._log.error("disk_nearly_full", problem=problem)

    # -- pruning

    def _prune_images(self) -> None:
        self._pruner.prune_images()

    def _prune_results(self) -> None:
        self._pruner.prune_results()

    def _count_pruned(self) -> None:
        now, told = self._pruner.pruned, self._told
        if now == told:
            return
        self._on_pruned("images", now.images - told.images)
        self._on_pruned("boards", now.boards - told.boards)
        self._told = Pruned(**asdict(now))
        self._pruned_at_s = self._clock.wall_s()

    # -- the database

    def _take_over_checkpoints(self) -> None:
        self._carry_out(lambda store: upkeep.leave_checkpoints_to(store.engine))

    def _look_at_log(self) -> None:
        """Checkpoint beside the writer; the last pages in its thread, so that the log begins anew."""
        log = self._checkpoints.checkpoint()
        if log != self._last_log and upkeep.is_nearly_done(log):
            self._carry_out(lambda store: upkeep.finish_checkpoint(store.engine))
        self._last_log = log
        is_held = upkeep.is_held(log)
        if is_held and not self._is_log_held:
            self._log.warning("database_log_held", bytes=log.file_bytes, hint="a program reads the database for long")
        self._is_log_held = is_held

    def _vacuum(self) -> None:
        until_s = self._clock.monotonic_s() + _LOG_S
        while self._clock.monotonic_s() < until_s and self._checkpoints.vacuum_is_due():
            self._carry_out(lambda store: upkeep.vacuum_step(store.engine))
            if not self._rest(_VACUUM_PAUSE_S):
                return

    def _optimize(self) -> None:
        self._carry_out(lambda store: upkeep.optimize(store.engine))
