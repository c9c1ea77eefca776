"""The writer thread: the only one that writes to the results database (docs/architecture.md).

Arrivals come in durable groups: their rows in one transaction, then the replies. Verdicts have batches of their own.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog
from sqlalchemy.exc import DatabaseError, IntegrityError, OperationalError, SQLAlchemyError

from daemon.line.serving import Serving
from daemon.records import (
    Duplicate,
    ExpertSwitch,
    Generation,
    Image,
    JournalKey,
    Message,
    Verdict,
    WriteFailed,
)
from daemon.storage.database.changes import ChangeNotes
from daemon.storage.database.generations import accept_generations
from daemon.storage.database.inspections import end_editions
from daemon.storage.database.reviews import Review
from daemon.storage.database.rows import ImageCopy, Recovery, Result
from daemon.storage.database.store import Store
from daemon.storage.database.upkeep import write_log_again
from daemon.storage.decisions import Decision, not_stored
from daemon.storage.disk_space import DiskSpace, LowSpaceError
from daemon.storage.image_archive import ImageArchiver
from daemon.storage.journal import ImageGroup, Journal, JournalError, JournalThread, Reply, SegmentCleanup
from daemon.wire.control import ControlError
from routing_rules.routes import Routes

T = TypeVar("T")

#: Requests for text of one transaction, so that images do not wait long behind it.
_BATCH_REQUESTS = 64
#: Results of one transaction; more wait for the next, so that arrivals are not kept waiting behind them.
_BATCH_RESULTS = 256
#: Interval of batches of results: each is a transaction and a sync, whose cost many results share.
_RESULTS_EVERY_S = 0.050
#: A decision that takes longer waits for a disk or for another program's lock: control must go on answering.
_DECISION_S = 1.0
_FIRST_RETRY_S = 0.05
_MAX_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class _Task:
    task: Callable[[Store], Any]
    done: Future[Any]


#: Takes the answer to a request for text.
TextReply = Callable[[Generation | Duplicate | WriteFailed], None]
_Request = tuple[Generation, TextReply]
#: None ends the thread, once everything before it in the queue is written.
_Item = ImageGroup | _Request | Result | list[ImageCopy] | list[Verdict] | Routes | ChangeNotes | _Task | None


class WriterReports(Protocol):
    """Receiver of the writer's commits, called in its thread."""

    def accepted(self, images: list[Image]) -> None: ...
    def published(self, messages: list[Message]) -> None: ...
    def done(self, images: list[tuple[str, int]]) -> None:
        """Report durable verdicts: source and payload bytes of each image."""

    def texts_accepted(self, texts: list[Generation]) -> None: ...
    def texts_done(self, texts: list[tuple[str, int]]) -> None:
        """Report durable texts: source and bytes in the backlog of each."""


class Writer:
    """Writer of images, verdicts, loads and tasks, which any thread may hand over."""

    _reports: WriterReports

    def __init__(
        self, store: Store, journal: Journal, serving: Serving, images: Path, *, disk_space: DiskSpace | None = None
    ) -> None:
        self._store = store
        self._serving = serving
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._groups: deque[ImageGroup] = deque()
        self._results: deque[Result] = deque()
        self._requests: deque[_Request] = deque()
        self._changes: deque[Routes | ChangeNotes] = deque()
        self._tasks: deque[_Task] = deque()
        self._retry_s = 0.0
        self._results_at_s = 0.0
        self._stopping = False
        self.last_error: str | None = None
        self.last_error_at_s = 0.0
        #: True if the disk or the database refused the last write.
        self.is_failing = False
        disk_space = disk_space or DiskSpace({}, reserve_bytes=0)
        self._archiver = ImageArchiver(images, journal.read, self._queue.put, disk_space.may_copy)
        self._journal_thread = JournalThread(journal, disk_space, self._queue.put)
        self._cleanup = SegmentCleanup(journal, store)
        self._log = structlog.get_logger("writer")
        self._thread = threading.Thread(target=self._run, name="writer")

    @property
    def to_copy_bytes(self) -> int:
        return self._archiver.waiting_bytes

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._journal_thread.is_alive

    def recover(self) -> Recovery:
        """Return the work that the last run left, before `start`; delete the segments that no row needs any more."""
        try:
            # No segment goes, and no row is published, that a power cut could still undo.
            write_log_again(self._store.engine)
        except Exception as error:  # noqa: BLE001 - on a disk that takes nothing the line starts and says `busy`
            self._log.warning("log_not_written_again", error=_reason(error))
        self._cleanup.begin()
        self._archiver.archive(self._store.copies_to_make())
        return self._store.recover()

    def start(self, reports: WriterReports) -> None:
        self._reports = reports
        self._thread.start()
        self._journal_thread.start()
        self._archiver.start()

    def stop(self) -> None:
        """Write everything that was handed over before this call, and end. The store and the journal stay open."""
        if self._thread.ident is None:
            return  # the start failed before this thread's turn
        self._journal_thread.stop()
        self._queue.put(None)
        self._thread.join()
        self._archiver.stop()

    def store_image(self, image: Image, payload: bytes, connection: bytes, reply: Reply) -> None:
        self._journal_thread.store_image(image, payload, connection, reply)

    def call_journal(self, callback: Callable[[], None]) -> None:
        self._journal_thread.call(callback)

    def store_verdicts(self, verdicts: list[Verdict]) -> None:
        self._queue.put(verdicts)

    def store_generation(self, request: Generation, reply: TextReply) -> None:
        self._queue.put((request, reply))

    def finish_generation(self, ended: Generation) -> None:
        self._queue.put(ended)

    def store_switch(self, switch: ExpertSwitch) -> None:
        self._queue.put(switch)

    def store_rules(self, routes: Routes) -> None:
        """Write the rules that boards open with from now on, unless they were in force before."""
        self._queue.put(routes)

    def end_editions(self, numbers: list[int]) -> None:
        """Note that editions serve no more, not after a restart either."""
        self.run(lambda store: store.transact(end_editions, numbers))

    def store_changes(self, notes: ChangeNotes) -> None:
        """Write what a person or the daemon changed, before all results and images that come later."""
        self._queue.put(notes)

    def run(self, task: Callable[[Store], T]) -> Future[T]:
        """Run a short task between two groups, one a turn; those not begun when the thread ends are cancelled."""
        done: Future[T] = Future()
        self._queue.put(_Task(task, done))
        return done

    def write_decision(self, decision: Decision) -> Review:
        """Return the committed row; ControlError if it is not written, or `no_answer` if that is not known in time."""
        writing = self.run(lambda store: store.review(decision, self.publish))
        try:
            return writing.result(_DECISION_S)
        except CancelledError:
            raise ControlError("not_stored", "the decision is not stored: the daemon stops") from None
        except TimeoutError:
            if writing.cancel():
                reason = "the decision is not stored: the database or the disk is busy: try again"
                raise ControlError("not_stored", reason) from None
            reason = "the disk is slow, and the decision may or may not be stored: try again, it counts once"
            raise ControlError("no_answer", reason) from None
        except (SQLAlchemyError, OSError) as error:
            raise ControlError("not_stored", not_stored(error)) from None

    def publish(self, messages: list[Message]) -> None:
        """Publish messages that a task has just made durable; within that task, so that their order is kept."""
        self._call(self._reports.published, messages)

    def _run(self) -> None:
        while not (self._stopping and self._queue.empty() and not self._groups and not self._requests):
            try:
                # Boards whose time is up close before an image can still join them.
                self._collect()
                self._write_results()
                self._write_arrivals()
                self._write_requests()
                self._run_task()
            except Exception as error:  # noqa: BLE001 - the thread lives on
                self._log.exception("writer_failed")
                self._note(error)
                time.sleep(_FIRST_RETRY_S)
        self._write_results(last=True)
        for task in self._tasks:
            task.done.cancel()

    def _run_task(self) -> None:
        if not self._tasks:
            return
        task = self._tasks.popleft()
        if not task.done.set_running_or_notify_cancel():
            return
        try:
            task.done.set_result(task.task(self._store))
        except Exception as error:  # noqa: BLE001 - its caller gets it
            task.done.set_exception(error)

    # -- collecting

    def _collect(self) -> None:
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
            case ImageGroup():
                self._groups.append(item)
            case tuple():
                self._requests.append(item)
            case Routes() | ChangeNotes():
                self._changes.append(item)
            case _Task():
                self._tasks.append(item)
            case None:
                self._stopping = True
            case list():
                self._results.extend(item)
            case _:
                self._results.append(item)

    def _idle_s(self) -> float | None:
        if self._tasks or self._groups or self._requests:
            return 0.0
        wait_s = 0.0 if self._has_results else self._store.wait_s()
        return None if wait_s is None else max(wait_s, self._results_at_s - time.monotonic(), 0.0)

    @property
    def _has_results(self) -> bool:
        return bool(self._results or self._changes) or self._cleanup.is_in_doubt

    # -- results

    def _write_results(self, *, last: bool = False) -> None:
        """Write a batch of results and close boards; after a failure the batch is kept and tried again later."""
        due = self._store.wait_s() == 0.0
        if not (self._has_results or due) or (time.monotonic() < self._results_at_s and not last):
            return
        more = True
        while more:
            self._results_at_s = time.monotonic() + _RESULTS_EVERY_S
            try:
                self._write_batch()
            except Exception as error:  # noqa: BLE001 - every failure is tried again
                self._wait_for_disk(error)
                return
            self._retry_s = 0.0
            more = last and self._has_results

    def _write_batch(self) -> None:
        results = list(islice(self._results, _BATCH_RESULTS))
        try:
            if self._cleanup.is_in_doubt:
                self._cleanup.end_doubt()
                self.is_failing = False
            self._write_changes()
            self._write(results)
        except Exception as error:
            if _may_pass(error):
                raise
            self._note(error)
            self._write_each(results)

    def _write_changes(self) -> None:
        while self._changes:
            change = self._changes[0]
            try:
                if isinstance(change, Routes):
                    self._store.keep_rules(change)
                else:
                    self._store.note_changes(change)
            except Exception as error:
                if _may_pass(error):
                    raise
                self._log.error("change_not_written", change=repr(change)[:1000], error=_reason(error))
            self._changes.popleft()

    def _write(self, results: Sequence[Result]) -> None:
        written = self._store.write_results(results)
        self.is_failing = False
        for _ in results:
            self._results.popleft()
        if written.published:
            self._call(self._reports.published, written.published)
        if written.done:
            self._call(self._reports.done, written.done)
        if written.done_texts:
            self._call(self._reports.texts_done, written.done_texts)
        self._archiver.archive(written.to_copy)
        if written.freed_journal:
            self._cleanup.drop()

    def _write_each(self, results: Sequence[Result]) -> None:
        """Write results one by one after their batch failed, so that only the one at fault is not written."""
        self._write([])  # a board that cannot be closed is not the fault of a result
        for result in results:
            try:
                self._write([result])
            except Exception as error:
                if _may_pass(error):
                    raise
                self._log.error("result_not_written", result=repr(result)[:1000], error=_reason(error))
                # What the database refuses becomes `unknown`: it is never lost, and never a pass.
                match result:
                    case Verdict():
                        instead = Verdict(result.image, "unknown", reason="internal_error")
                    case Generation():
                        instead = replace(result, text=None, reason="internal_error")
                    case _:
                        self._results.popleft()
                        continue
                self._results[0] = instead
                self._write([instead])

    def _wait_for_disk(self, error: Exception) -> None:
        self._note(error)
        self.is_failing = True
        self._retry_s = min(max(_FIRST_RETRY_S, self._retry_s * 2), _MAX_RETRY_S)
        self._results_at_s = time.monotonic() + self._retry_s
        self._log.warning("results_wait", results=len(self._results), retry_s=self._retry_s, error=_reason(error))

    # -- arrivals

    def _write_arrivals(self) -> None:
        while self._groups:
            group = self._groups.popleft()
            try:
                self._write_group(group)
            finally:
                self._journal_thread.settled()
            self._cleanup.answered(group.frontier)

    def _write_group(self, group: ImageGroup) -> None:
        replies = [reply for _, reply in group.images]
        if group.error is not None:
            self._refuse(replies, group.error)
            return
        try:
            self._write_images(group.images, group.keys)
        except Exception as error:  # noqa: BLE001 - the line goes on
            if len(group.images) == 1 or _may_pass(error):
                self._refuse(replies, error)
                return
            # One image made the whole group fail: the others are written without it.
            for image, key in zip(group.images, group.keys, strict=True):
                self._write_group(ImageGroup([image], [key], group.frontier))

    def _refuse(self, replies: Sequence[Callable[[WriteFailed], None]], error: Exception) -> None:
        """Answer that images or requests are not stored: each publisher keeps its own and sends it again."""
        self._note(error)
        if _may_pass(error) and not isinstance(error, LowSpaceError):
            self.is_failing = True
        for reply in replies:
            self._call(reply, WriteFailed(_reason(error)))
        self._log.warning("arrivals_failed", messages=len(replies), error=_reason(error))

    def _write_images(self, images: list[tuple[Image, Reply]], keys: list[JournalKey]) -> None:
        """Commit the rows of new images and answer all. The bytes of a repeated image stay unused."""
        new: dict[tuple[str, str], tuple[Image, Reply, JournalKey]] = {}
        repeats: list[tuple[Image, Reply]] = []
        known: dict[tuple[str, str], str] = {}
        for (image, reply), key in zip(images, keys, strict=True):
            name = image.source, image.image_id
            if name in new:
                repeats.append((image, reply))
            else:
                new[name] = image, reply, key
        try:
            self._accept(new.values())
        except IntegrityError:
            # Intake has checked before: a repeated image is so rare here that the database may find it.
            known = self._store.known([image for image, _, _ in new.values()])
            if not known:
                raise
            repeats += [new.pop(name)[:2] for name in known]
            self._accept(new.values())
        for image, reply in repeats:
            name = image.source, image.image_id
            self._call(reply, Duplicate(known.get(name) or new[name][0].sha256))

    def _write_requests(self) -> None:
        """Commit requests for text and answer them."""
        group = [self._requests.popleft() for _ in range(min(_BATCH_REQUESTS, len(self._requests)))]
        if not group:
            return
        try:
            answers = self._store.transact(accept_generations, [request for request, _ in group])
        except Exception as error:  # noqa: BLE001 - the line goes on
            self._refuse([reply for _, reply in group], error)
            return
        self.is_failing = False
        self._call(self._reports.texts_accepted, [answer for answer in answers if isinstance(answer, Generation)])
        for (_, reply), answer in zip(group, answers, strict=True):
            self._call(reply, answer)

    def _accept(self, new: Collection[tuple[Image, Reply, JournalKey]]) -> None:
        if not new:
            return
        pairs = [(image, key) for image, _, key in new]
        self._write_changes()
        self._cleanup.is_in_doubt = True
        with self._serving.opening:
            answers = self._store.accept(pairs, self._serving)
        self._cleanup.is_in_doubt = False
        self.is_failing = False
        self._call(self._reports.accepted, [answer for answer in answers if isinstance(answer, Image)])
        for (_, reply, _), answer in zip(new, answers, strict=True):
            self._call(reply, answer)

    def _call(self, callback: Callable[[T], None], value: T) -> None:
        """Run a callback; its failure neither undoes the write nor prevents the other callbacks."""
        try:
            callback(value)
        except Exception as error:  # noqa: BLE001
            self._note(error)
            self._log.exception("callback_failed", callback=getattr(callback, "__qualname__", "?"))

    def _note(self, error: Exception) -> None:
        self.last_error, self.last_error_at_s = _reason(error), time.time()


def _may_pass(error: Exception) -> bool:
    """Return True if a retry may help: a lock, a full or failing disk. Not if a row has a wrong value."""
    return isinstance(error, OperationalError | OSError | JournalError) or type(error) is DatabaseError


def _reason(error: Exception) -> str:
    """Return the cause without SQLAlchemy's statement and parameters."""
    if isinstance(error, DatabaseError):
        return str(error.orig)
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
