"""The writer thread: the only one that writes to the results database (docs/architecture.md).

Arrivals come in groups whose bytes are durable already: their rows in one transaction, then the replies.
Verdicts are written in batches of their own, and published once they are durable.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog
from sqlalchemy.exc import DatabaseError, IntegrityError, OperationalError

from daemon.line.rulebook import Rulebook
from daemon.records import Accepted, Arrival, ExpertSwitch, JournalKey, Outcome, Published
from daemon.storage.database.store import Store
from daemon.storage.database.upkeep import write_log_again
from daemon.storage.database.values import Kept, Known, Recovery
from daemon.storage.disk_space import DiskSpace, NoRoomError
from daemon.storage.image_archiver import ImageArchiver
from daemon.storage.journal import Journal, JournalError
from daemon.storage.journal_thread import Duplicate, Group, JournalThread, Reply, Submitted, WriteFailed
from daemon.storage.kept_images import ImageFolder
from daemon.storage.segments import Segments
from routing_rules.routes import Routes

T = TypeVar("T")

#: Results of one transaction; more wait for the next, so that arrivals are not kept waiting behind them.
_BATCH_RESULTS = 256
_RETRY_FIRST_S = 0.05
_RETRY_MAX_S = 5.0
#: Loads that wait for a database that cannot be written; older ones are forgotten first.
_MAX_SWITCHES = 10_000
#: The same for rules that came into force.
_MAX_RULES = 100


class _Stop:
    """What ends the thread, once everything before it in the queue is written."""


@dataclass(frozen=True, slots=True)
class _Task:
    carry_out: Callable[[Store], Any]
    done: Future[Any]


_Item = Group | Outcome | ExpertSwitch | Routes | list[Kept] | _Task | _Stop


class WriterReports(Protocol):
    """What the writer reports from its thread, after the commit."""

    def accepted(self, images: list[Accepted]) -> None: ...
    def published(self, messages: list[Published]) -> None: ...
    def done(self, images: list[tuple[str, int]]) -> None:
        """Images whose verdict is durable: source and payload bytes of each."""


class Writer:
    """`submit`, `finish` and `switch` from any thread; `start` says who hears its reports."""

    _reports: WriterReports

    def __init__(
        self,
        store: Store,
        journal: Journal,
        rulebook: Rulebook,
        images: Path,
        *,
        room: DiskSpace | None = None,
    ) -> None:
        """Take no image for which there is no `room`."""
        self._store = store
        self._rulebook = rulebook
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._groups: deque[Group] = deque()
        self._outcomes: deque[Outcome] = deque()
        self._switches: deque[ExpertSwitch] = deque(maxlen=_MAX_SWITCHES)
        self._rules: deque[Routes] = deque(maxlen=_MAX_RULES)
        self._kept: deque[Kept] = deque()
        self._tasks: deque[_Task] = deque()
        self._retry_s = 0.0
        self._retry_at_s = 0.0
        self._stopping = False
        self._last_error: str | None = None
        self._failing = False
        folder = ImageFolder(images, journal.read)
        self._archiver = (
            ImageArchiver(folder, self._queue.put, room.may_copy) if room else ImageArchiver(folder, self._queue.put)
        )
        self._journal_thread = JournalThread(journal, room, self._queue.put)
        self._segments = Segments(journal, store)
        self._log = structlog.get_logger("writer")
        self._thread = threading.Thread(target=self._run, name="writer")

    @property
    def last_error(self) -> str | None:
        """What last kept something from being written."""
        return self._last_error

    @property
    def is_failing(self) -> bool:
        """Whether the disk or the database refused what was last to be written."""
        return self._failing

    @property
    def to_copy_bytes(self) -> int:
        """Bytes of images that stay and are still to be copied to `images/`."""
        return self._archiver.waiting_bytes

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._journal_thread.is_alive

    def recover(self) -> Recovery:
        """What the last run left undone, before `start`; journal segments that nothing needs any more go."""
        self._settle_log()
        self._segments.begin()
        for image in self._store.copies_to_make():
            self._archiver.keep(image)
        return self._store.recover()

    def _settle_log(self) -> None:
        """Nothing is built on rows that a power cut would still take: no segment goes, and nobody hears of them."""
        try:
            write_log_again(self._store.engine)
        except Exception as error:  # noqa: BLE001 - a disk that takes nothing: the line starts and says `busy`
            self._log.warning("log_not_written_again", error=_reason(error))

    def start(self, reports: WriterReports) -> None:
        self._reports = reports
        self._thread.start()
        self._journal_thread.start()
        self._archiver.start()

    def stop(self) -> None:
        """Write everything that was handed over before this call, and end. The store and the journal stay open."""
        if self._thread.ident is None:
            return  # a start that failed elsewhere stops what it had not started yet
        self._journal_thread.stop()
        self._queue.put(_Stop())
        self._thread.join()
        self._archiver.stop()

    def submit(self, arrival: Arrival, reply: Reply) -> None:
        """Make `arrival` durable; `reply` is called once, in the writer thread."""
        self._journal_thread.submit(Submitted(arrival, reply))

    def call_journal(self, callback: Callable[[], None]) -> None:
        """Have `callback` called in the journal's thread, between two groups."""
        self._journal_thread.call(callback)

    def finish(self, outcome: Outcome) -> None:
        """Write the end of an image, and publish it."""
        self._queue.put(outcome)

    def switch(self, switch: ExpertSwitch) -> None:
        """Write a load into a pool."""
        self._queue.put(switch)

    def rules_in_force(self, routes: Routes) -> None:
        """Write the rules that boards open with from now on, unless they were in force before."""
        self._queue.put(routes)

    def run(self, carry_out: Callable[[Store], T]) -> Future[T]:
        """Carry out a short piece of upkeep in the writer thread, between two groups; one per turn, in order.

        It holds up intake for as long as it takes. What the thread does not come to before it ends is cancelled.
        """
        done: Future[T] = Future()
        self._queue.put(_Task(carry_out, done))
        return done

    def _run(self) -> None:
        while not (self._stopping and self._queue.empty() and not self._groups):
            try:
                # Boards whose time is up close before an image can still join them.
                self._collect()
                self._write_results()
                self._write_arrivals()
                self._carry_out_task()
            except Exception as error:  # noqa: BLE001 - the thread lives on
                self._log.exception("writer_failed")
                self._note(error)
                time.sleep(_RETRY_FIRST_S)
        self._write_results(last=True)
        for task in self._tasks:
            task.done.cancel()

    def _carry_out_task(self) -> None:
        if not self._tasks:
            return
        task = self._tasks.popleft()
        if not task.done.set_running_or_notify_cancel():
            return
        try:
            task.done.set_result(task.carry_out(self._store))
        except Exception as error:  # noqa: BLE001 - whoever asked gets it
            task.done.set_exception(error)

    # -- collecting

    def _collect(self) -> None:
        """Take what is there; wait for the first item where nothing else is to be done."""
        wait_s = self._idle_s()
        for _ in range(_BATCH_RESULTS):
            try:
                item = self._queue.get_nowait() if wait_s == 0.0 else self._queue.get(timeout=wait_s)
            except queue.Empty:
                return
            self._sort(item)
            wait_s = 0.0

    def _sort(self, item: _Item) -> None:
        match item:
            case Group():
                self._groups.append(item)
            case Outcome():
                self._outcomes.append(item)
            case ExpertSwitch():
                self._switches.append(item)
            case Routes():
                self._rules.append(item)
            case _Task():
                self._tasks.append(item)
            case _Stop():
                self._stopping = True
            case _:
                self._kept.extend(item)

    def _idle_s(self) -> float | None:
        """How long nothing has to be done unless something comes."""
        if self._tasks or self._groups:
            return 0.0
        wait_s = 0.0 if self._has_results else self._store.wait_s()
        return None if wait_s is None else max(wait_s, self._retry_at_s - time.monotonic(), 0.0)

    @property
    def _has_results(self) -> bool:
        return bool(self._outcomes or self._switches or self._kept or self._rules or self._segments.is_in_doubt)

    # -- results

    def _write_results(self, *, last: bool = False) -> None:
        """Write a batch of results and close boards; what cannot be written now is kept and tried again."""
        due = self._store.wait_s() == 0.0
        if not (self._has_results or due) or (time.monotonic() < self._retry_at_s and not last):
            return
        more = True
        while more:
            try:
                self._write_batch()
            except Exception as error:  # noqa: BLE001 - kept and tried again, whatever it is
                self._wait_for_disk(error)
                return
            self._retry_s = self._retry_at_s = 0.0
            more = last and self._has_results

    def _write_batch(self) -> None:
        outcomes = list(islice(self._outcomes, _BATCH_RESULTS))
        switches, kept = list(self._switches), list(self._kept)
        try:
            if self._segments.is_in_doubt:
                self._segments.end_doubt()
                self._failing = False
            self._write_rules()
            self._write(outcomes, switches, kept)
        except Exception as error:
            if _may_pass(error):
                raise
            self._note(error)
            self._write_each(outcomes, switches, kept)

    def _write_rules(self) -> None:
        while self._rules:
            try:
                self._store.keep_rules(self._rules[0])
            except Exception as error:
                if _may_pass(error):
                    raise
                self._log.error("rules_not_written", version=self._rules[0].version, error=_reason(error))
            self._rules.popleft()

    def _write(self, outcomes: list[Outcome], switches: list[ExpertSwitch], kept: list[Kept]) -> None:
        written = self._store.write(outcomes, switches, kept)
        self._failing = False
        for pile, taken in ((self._outcomes, outcomes), (self._switches, switches), (self._kept, kept)):
            for _ in taken:
                pile.popleft()
        if written.published:
            self._call(self._reports.published, written.published)
        if written.done:
            self._call(self._reports.done, written.done)
        for image in written.keep:
            self._archiver.keep(image)
        if written.freed_journal:
            self._segments.drop()

    def _write_each(self, outcomes: list[Outcome], switches: list[ExpertSwitch], kept: list[Kept]) -> None:
        """One result made the whole batch fail: find it, and let it harm itself only."""
        self._write([], [], [])  # a board that cannot be closed is no outcome's fault
        for outcome in outcomes:
            try:
                self._write([outcome], [], [])
            except Exception as error:
                if _may_pass(error):
                    raise
                self._write_unknown(outcome, error)
        for switch in switches:
            try:
                self._write([], [switch], [])
            except Exception as error:
                if _may_pass(error):
                    raise
                self._switches.popleft()
                self._log.error("expert_switch_not_written", loaded=switch.loaded, error=_reason(error))
        self._write([], [], kept)

    def _write_unknown(self, outcome: Outcome, error: Exception) -> None:
        """An outcome that no row can hold becomes a verdict without one: never lost, never a pass."""
        self._log.error("outcome_not_written", inspection_id=outcome.inspection_id, error=_reason(error))
        self._outcomes[0] = Outcome(outcome.inspection_id, "unknown", None, "internal_error", ())
        self._write([self._outcomes[0]], [], [])

    def _wait_for_disk(self, error: Exception) -> None:
        self._note(error)
        self._failing = True
        self._retry_s = min(max(_RETRY_FIRST_S, self._retry_s * 2), _RETRY_MAX_S)
        self._retry_at_s = time.monotonic() + self._retry_s
        self._log.warning("results_wait", outcomes=len(self._outcomes), retry_s=self._retry_s, error=_reason(error))

    # -- arrivals

    def _write_arrivals(self) -> None:
        """Commit the rows of each group and answer it."""
        while self._groups:
            group = self._groups.popleft()
            try:
                self._write_group(group)
            finally:
                self._journal_thread.settled()
            self._segments.answered(group.frontier)

    def _write_group(self, group: Group) -> None:
        if group.error is not None:
            self._refuse(group.images, group.error)
            return
        try:
            self._write_images(group.images, group.keys)
        except Exception as error:  # noqa: BLE001 - the line goes on
            if len(group.images) == 1 or _may_pass(error):
                self._refuse(group.images, error)
                return
            # One image made the whole group fail: the others do not pay for it.
            for submitted, key in zip(group.images, group.keys, strict=True):
                self._write_group(Group([submitted], [key], group.frontier))

    def _refuse(self, images: list[Submitted], error: Exception) -> None:
        """Each publisher keeps its image and sends it again."""
        self._note(error)
        if _may_pass(error) and not isinstance(error, NoRoomError):
            self._failing = True
        for submitted in images:
            self._call(submitted.reply, WriteFailed(_reason(error)))
        self._log.warning("arrivals_failed", images=len(images), error=_reason(error))

    def _write_images(self, images: list[Submitted], keys: list[JournalKey]) -> None:
        """The rows of images that are new, and every reply. The bytes of a repeated image belong to nobody."""
        new: dict[tuple[str, str], tuple[Submitted, JournalKey]] = {}
        repeats: list[Submitted] = []
        known: dict[tuple[str, str], Known] = {}
        for submitted, key in zip(images, keys, strict=True):
            if new.setdefault(submitted.key, (submitted, key))[0] is not submitted:
                repeats.append(submitted)
        try:
            self._accept(new)
        except IntegrityError:
            # Intake has looked before: that one is accepted already is so rare that the database may say it.
            known = self._store.known([submitted.arrival for submitted, _ in new.values()])
            if not known:
                raise
            repeats += [new.pop(key)[0] for key in known]
            self._accept(new)
        for submitted in repeats:
            first = known.get(submitted.key) or new[submitted.key][0].arrival
            self._call(submitted.reply, Duplicate(first.payload_sha256))

    def _accept(self, new: dict[tuple[str, str], tuple[Submitted, JournalKey]]) -> None:
        if not new:
            return
        pairs = [(submitted.arrival, key) for submitted, key in new.values()]
        self._segments.committing()
        accepted = self._store.accept(pairs, self._rulebook.current)
        self._segments.committed()
        self._failing = False
        self._call(self._reports.accepted, accepted)
        for (submitted, _), image in zip(new.values(), accepted, strict=True):
            self._call(submitted.reply, image)

    def _call(self, callback: Callable[[T], None], value: T) -> None:
        """A callback's failure is its own: what was written stays written, and others are called."""
        try:
            callback(value)
        except Exception as error:  # noqa: BLE001
            self._note(error)
            self._log.exception("callback_failed", callback=getattr(callback, "__qualname__", "?"))

    def _note(self, error: Exception) -> None:
        self._last_error = _reason(error)


def _may_pass(error: Exception) -> bool:
    """Whether trying again may help: a lock, a full or failing disk. Not what a row holds."""
    return isinstance(error, OperationalError | OSError | JournalError) or type(error) is DatabaseError


def _reason(error: Exception) -> str:
    """The cause without SQLAlchemy's statement and parameters."""
    if isinstance(error, DatabaseError):
        return str(error.orig)
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
