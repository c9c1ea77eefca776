"""The results database as the writer's thread uses it: each method that writes is one transaction."""

import json
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any, Concatenate, ParamSpec, TypeVar

import structlog
from sqlalchemy import Connection, RowMapping, func, insert, select, update
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from daemon.config.settings import Guards
from daemon.line.serving import Serving
from daemon.records import ExpertSwitch, Generation, Image, JournalKey, Message, Refused, Verdict, WriteFailed
from daemon.storage.database import changes, inspections, prune, reviews, rows, schema
from daemon.storage.database.boards import OFF, BoardCache, RepeatedPictures
from daemon.storage.database.connections import StoreError, driver_of, open_for_writing
from daemon.storage.database.generations import finish_generations
from daemon.storage.database.inspections import GoodExamples, VersionOf
from daemon.storage.database.migrate import migrate
from daemon.storage.database.rows import ImageCopy, Recovery, Result, WrittenResults
from daemon.storage.database.transaction import (
    Clock,
    TimeLimit,
    Transaction,
    WriterMemory,
    read_numbers,
    set_numbers,
)
from daemon.storage.decisions import Decision
from daemon.units import monotonic_of, utc_text
from experts.durable import replace_durably
from experts.people import current_user
from routing_rules.routes import Routes, VerdictName

P = ParamSpec("P")
T = TypeVar("T")

#: Images that stay after their verdict unless the configuration says otherwise.
KEEP: tuple[VerdictName, ...] = ("fail", "review", "unknown")
_RECORD_MODE = 0o640
_RECORD_BYTES = 120


class EpochRecord:
    """The record of the results' epoch in the journal's folder, by which a start knows a database that was put back.

    Consumers know a result by its `seq`. A database from a backup counts on from an older `seq` and gives numbers
    again, so it gets a new epoch. The database itself cannot tell that it is older; this record can: it names the epoch
    and the last `seq` that was given out. It is written after each commit and before its results are published, in
    place and without a sync: after a kill it is exact, after a power cut never ahead of the database.

    A copy of the journal's folder would bring an old record along. So a second file, the seal, is never written again,
    and the record names the time of its last change (ctime, in whole seconds, as some disks keep it), which no copy
    has. A wrong guess gives a new epoch too many: consumers read again what they have read.

    Call `why_other` first; `begin` after a new epoch is durable; then `note`.
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._seal = folder / "epoch", folder / "epoch.seal"
        self._fd: int | None = None
        self._epoch, self._sealed_s = "", 0

    def why_other(self, epoch: str | None, last_seq: int) -> str | None:
        try:
            known: dict[str, Any] = json.loads(self._file.read_bytes())
            noted, seq, self._sealed_s = str(known["epoch"]), int(known["seq"]), int(known["sealed_s"])
            sealed_s = int(self._seal.stat().st_ctime)
        except FileNotFoundError:
            return "its journal has no record of its results: the line was restored or moved, or has a new journal"
        except (OSError, ValueError, KeyError, TypeError):
            return f"{self._file}, the record of its results, cannot be read"
        self._epoch = noted
        if sealed_s != self._sealed_s:
            return "its journal is a copy: the line was restored or moved"
        if noted != epoch:
            return f"another database with epoch {epoch or 'unknown'} was put in place of that with epoch {noted}"
        if seq > last_seq:
            return f"it ends at seq {last_seq}, and {seq} was given out: an older copy was put in its place"
        return None

    def begin(self, epoch: str, last_seq: int) -> None:
        """Write both files anew, durably. A disk that refuses makes the next start give a new epoch again."""
        try:
            replace_durably(self._seal, f"{epoch}\n".encode(), _RECORD_MODE)
            self._epoch, self._sealed_s = epoch, int(self._seal.stat().st_ctime)
            replace_durably(self._file, self._line(last_seq), _RECORD_MODE)
        except OSError as error:
            structlog.get_logger("database").warning("epoch_not_recorded", file=str(self._file), error=str(error))

    def note(self, last_seq: int) -> None:
        """Write the last `seq` that was given out: in the writer's thread, before it is published."""
        with suppress(OSError):
            if self._fd is None:
                self._fd = os.open(self._file, os.O_WRONLY | os.O_CLOEXEC)
            os.pwrite(self._fd, self._line(last_seq), 0)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _line(self, seq: int) -> bytes:
        known = {"epoch": self._epoch, "seq": seq, "sealed_s": self._sealed_s}
        return json.dumps(known).encode().ljust(_RECORD_BYTES) + b"\n"


class Store:
    """The results database for the one thread that writes to it. Memory follows a transaction once it is durable."""

    def __init__(  # noqa: PLR0913  app.py names each setting
        self,
        url: str,
        *,
        keep: Collection[VerdictName] = KEEP,
        good_examples: int = 0,
        sample: float = 0.0,
        expert_version: VersionOf = lambda _expert, _version: None,
        clock: Clock | None = None,
        busy_timeout_ms: int = 2000,
        tell: Callable[[str], None] = lambda _: None,
        record: EpochRecord | None = None,
        guards: Guards = OFF,
    ) -> None:
        """Open the database at `url`, make it or change its schema if due; StoreError says what to do otherwise.

        `expert_version(expert, version)` describes weights at their first verdict; `keep` are the verdicts whose images
        stay, with `good_examples` passes of each component and the share `sample` of all; `busy_timeout_ms` is the wait
        for another program's lock; `tell` gets the progress of a long change; `record` knows the results that the line
        gave out, and with it an older or another database gets a new epoch.
        """
        self._keep = frozenset(keep)
        self._expert_version = expert_version
        self._clock = clock or Clock()
        self._boards = BoardCache()
        self._memory = WriterMemory()
        self._pictures = RepeatedPictures(guards)
        self._in_force = ""
        self._record = record
        self._run_id: int | None = None
        #: 12 hex digits that name this history of results.
        self.epoch = ""
        try:
            #: For upkeep between two transactions, in the writer's thread (upkeep.py).
            self.engine = open_for_writing(url, busy_timeout_ms)
        except OSError as error:
            raise StoreError(f"cannot make the database at {url}: {error}") from error
        try:
            with self.engine.connect() as connection:
                self._sql = driver_of(connection)
            migrate(self.engine, tell)
            self._begin(0 if "pass" in keep else good_examples, sample)
        except SQLAlchemyError as error:
            raise StoreError(f"cannot use the database at {self.engine.url.render_as_string()}: {error}") from error
        finally:
            if not self.epoch:
                self.engine.dispose()

    def _begin(self, good_examples: int, sample: float) -> None:
        segment = schema.pending.c.segment
        with self._transaction() as tx:
            for number, images in tx.connection.execute(select(segment, func.count()).group_by(segment)):
                tx.segments[number] = images
            unjudged = select(schema.pending.c.inspection_id).where(schema.pending.c.task == "judge")
            self._memory.waiting.update(tx.connection.execute(unjudged).scalars())
            tx.due_added = _open_time_limits(tx)
            self._examples = GoodExamples(tx.connection, good_examples, sample)
            epoch, is_new = _settle_epoch(tx, self._record)
        self.epoch = epoch
        if self._record is not None and is_new:
            self._record.begin(epoch, tx.numbers.seq)

    @property
    def segments_in_use(self) -> set[int]:
        """Journal segments with bytes that have no verdict or are still to be copied."""
        return set(self._memory.segments)

    def wait_s(self) -> float | None:
        return max(0.0, self._memory.due[0][0] - self._clock.monotonic_s()) if self._memory.due else None

    def close(self) -> None:
        self.engine.dispose()
        if self._record is not None:
            self._record.close()

    def known(self, images: Sequence[Image]) -> dict[tuple[str, str], str]:
        """Return the sha256 of those that are stored, by source and id."""
        table = schema.inspections.c
        known: dict[tuple[str, str], str] = {}
        with self.engine.connect() as connection:
            for image in images:
                is_it = (table.source == image.source) & (table.image_id == image.image_id)
                if sha256 := connection.execute(select(table.image_sha256).where(is_it)).scalar():
                    known[image.source, image.image_id] = sha256
        return known

    def recover(self) -> Recovery:
        with self.engine.connect() as connection:
            waiting = connection.execute(inspections.pending_images("judge")).mappings()
            return Recovery(
                pending=[self._pending_image(row) for row in waiting],
                editions=inspections.editions_in_use(connection),
                last_seq=read_numbers(self._sql).seq,
                last_batch_id=_last_batch_id(connection),
            )

    def _pending_image(self, row: RowMapping) -> Image:
        now = self._clock.monotonic_s(), self._clock.wall_s()
        return rows.pending_image(row, monotonic_of(row["accepted_at"], *now))

    def copies_to_make(self) -> list[tuple[Image, str]]:
        """Return images that stay, and when they got their verdict."""
        with self.engine.connect() as connection:
            waiting = connection.execute(inspections.pending_images("keep")).mappings()
            return [(self._pending_image(row), row["completed_at"]) for row in waiting]

    def accept(
        self, group: Sequence[tuple[Image, JournalKey]], serving: Serving
    ) -> list[Image | Refused | WriteFailed]:
        """Add rows for images whose bytes are durable. The caller leaves out `known` images and repeats."""
        with self._transaction() as tx:
            answers = inspections.accept_images(tx, group, serving, self._pictures)
        self._memory.waiting.update({answer.inspection_id for answer in answers if isinstance(answer, Image)})
        return answers

    def keep_rules(self, routes: Routes) -> None:
        self._in_force = routes.version
        with self._transaction() as tx:
            inspections.keep_rules(tx, routes)

    def write_results(self, results: Sequence[Result] = ()) -> WrittenResults:
        with self._transaction() as tx:
            batch = inspections.ResultsBatch(tx, self._keep, self._examples, self._expert_version, self._run_id)
            batch.judge([result for result in results if isinstance(result, Verdict)])
            batch.close_due()
            batch.note_copies([result for result in results if isinstance(result, ImageCopy)])
            batch.flush()
            batch.withdraw_releases()
            switches = [rows.switch_row(result) for result in results if isinstance(result, ExpertSwitch)]
            tx.add(schema.expert_switches, switches)
            texts = [result for result in results if isinstance(result, Generation)]
            finish_generations(tx, texts, batch.written)
        return batch.written

    def transact(self, change: Callable[Concatenate[Transaction, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call `change`, such as a function of generations.py or prune.py, in one transaction."""
        with self._transaction() as tx:
            return change(tx, *arguments, **named)

    def review(self, decision: Decision, publish: Callable[[list[Message]], None] = lambda _: None) -> reviews.Review:
        """Write a person's decision, or its undoing, and `publish` it once durable. Raises ReviewRefusedError."""
        with self._transaction() as tx:
            review, message = reviews.append(tx, decision)
        if message is not None:
            publish([message])
        return review

    def note_changes(self, notes: changes.ChangeNotes) -> None:
        with self._transaction() as tx:
            run_id = self._run_id
            if notes.version is not None:
                row = {"started_at": tx.at, "version": notes.version, "epoch": self.epoch}
                added = tx.connection.execute(insert(schema.runs).returning(schema.runs.c.run_id), [row])
                run_id = added.scalar_one()
            changes.append(tx, notes)
        self._run_id = run_id

    def end_run(self, who: str) -> None:
        with self._transaction() as tx:
            ended = update(schema.runs).where(schema.runs.c.run_id == self._run_id).values(ended_at=tx.at)
            version = tx.connection.execute(ended.returning(schema.runs.c.version)).scalar()
            if version is not None:
                stop = changes.Change(tx.at, who, "stop", changes.PROGRAM, old=version)
                changes.append(tx, changes.ChangeNotes((stop,)))

    def write_over(self) -> None:
        """Commit without a change of any row, so that the remains of a failed commit can no longer come true."""
        pruned = schema.stream_position.c.pruned
        with self._transaction() as tx:
            for change in (1, -1):  # SQLite would not write the same value again
                tx.connection.execute(update(schema.stream_position).values(pruned=pruned + change))

    def drop_examples(self) -> list[str]:
        if not self._examples.are_too_many:
            return []
        with self._transaction() as tx:
            return self._examples.drop(tx)

    def forget_boards(self, board_ids: Sequence[int], old: prune.AgeLimit) -> prune.PrunedBoards:
        with self._transaction() as tx:
            forgotten = prune.forget_boards(tx, board_ids, old)
        self._boards.forget(tx.touched)
        return forgotten

    def forget_rules(self, versions: Sequence[str], last_board_id: int) -> None:
        """Prune rules that are not in force, and under which no attempt opened until or after `last_board_id`."""
        with self._transaction() as tx:
            prune.forget_rules(tx, [version for version in versions if version != self._in_force], last_board_id)
        self._memory.written_once.clear()

    @contextmanager
    def _transaction(self) -> Iterator[Transaction]:
        """Begin and commit with the driver: SQLAlchemy's way took an eighth of an image's processor time (measured)."""
        sql, memory, tx = self._sql, self._memory, None
        try:
            sql.execute("BEGIN IMMEDIATE")
            before = memory.numbers or read_numbers(sql)
            wall_s, now_s = self._clock.wall_s(), self._clock.monotonic_s()
            tx = Transaction(sql, self.engine, replace(before), wall_s, utc_text(wall_s), now_s, self._boards, memory)
            yield tx
            if tx.numbers != before:
                set_numbers(sql, tx.numbers)
            sql.execute("COMMIT")
        except BaseException as error:
            if sql.in_transaction:
                with suppress(sqlite3.Error):
                    sql.execute("ROLLBACK")
            if tx is not None:
                tx.forget()
            if isinstance(error, sqlite3.Error):
                raise DBAPIError.instance("", None, error, sqlite3.Error) from error
            raise
        else:
            if self._record is not None and tx.numbers.seq != before.seq:
                self._record.note(tx.numbers.seq)
            tx.adopt()
        finally:
            if tx is not None:
                tx.end()


def _settle_epoch(tx: Transaction, record: EpochRecord | None) -> tuple[str, bool]:
    """Return the database's epoch, and True if it is new: at the first start, or after a database was put back."""
    epoch = tx.connection.execute(select(schema.stream_position.c.epoch)).scalar()
    why = None if record is None else record.why_other(epoch, tx.numbers.seq)
    if epoch is not None and why is None:
        return epoch, False
    new = token_hex(6)
    tx.connection.execute(update(schema.stream_position).values(epoch=new))
    if epoch is not None:
        row = changes.Change(tx.at, current_user(), "restore", "database", epoch, new, why)
        changes.append(tx, changes.ChangeNotes((row,)))
        structlog.get_logger("database").warning("new_epoch", epoch=new, before=epoch, why=why)
    return new, True


def _last_batch_id(connection: Connection) -> int:
    """Return the highest batch number: of the newest results, and of all only if those had no batch."""
    images, stages = schema.inspections.c, schema.stages.c
    newest = select(images.inspection_id).where(images.seq.is_not(None)).order_by(images.seq.desc()).limit(1000)
    highest = select(func.max(stages.batch_id))
    of_newest = connection.execute(highest.where(stages.inspection_id.in_(newest))).scalar()
    return of_newest or connection.execute(highest).scalar() or 0


def _open_time_limits(tx: Transaction) -> list[TimeLimit]:
    """Return the time limits of open attempts, downtime included, on today's monotonic clock."""
    boards, recipes = schema.boards.c, schema.recipes.c
    query = (
        select(boards.first_seen_at, recipes.time_limit_s, boards.board_type, boards.serial, boards.attempt)
        .join(
            schema.recipes, (recipes.rules_version == boards.rules_version) & (recipes.board_type == boards.board_type)
        )
        .where(boards.completed_at.is_(None), recipes.time_limit_s.is_not(None))
    )
    return [
        (monotonic_of(first_seen_at, tx.now_s, tx.now_wall_s) + time_limit_s, *board)
        for first_seen_at, time_limit_s, *board in tx.connection.execute(query)
    ]
