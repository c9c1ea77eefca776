"""The results database as the writer thread uses it: each method that writes is one transaction."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from sqlalchemy import Engine, Executable, bindparam, func, select, update
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from daemon.records import (
    Accepted,
    AcceptedText,
    Arrival,
    ExpertSwitch,
    ExpertVersion,
    JournalKey,
    Outcome,
    TextOutcome,
    TextRequest,
)
from daemon.storage.database import generations, prune, reviews, rows
from daemon.storage.database.arrivals import accept, keep_rules
from daemon.storage.database.boards import Boards
from daemon.storage.database.connections import StoreError, open_for_writing
from daemon.storage.database.migrate import migrate
from daemon.storage.database.outcomes import Finishing, keep_task, waiting_for
from daemon.storage.database.prepared import ask_for_each
from daemon.storage.database.schema import (
    boards,
    expert_switches,
    inspections,
    pending,
    recipes,
    rules_versions,
    stages,
    stream_position,
)
from daemon.storage.database.transaction import Transaction, begin, read_numbers
from daemon.storage.database.values import Clock, CopyRequest, Kept, Known, Memory, Recovery, Written
from daemon.units import wall_seconds
from routing_rules.routes import Verdict

if TYPE_CHECKING:
    from routing_rules.routes import Routes

#: Images that stay after their verdict unless the configuration says otherwise.
KEEP: tuple[Verdict, ...] = ("fail", "review", "unknown")


@cache
def _known(count: int) -> Executable:
    table = inspections.c
    ids = [bindparam(f"each_{number}") for number in range(count)]
    return select(table.image_id, table.inspection_id, table.image_sha256).where(
        table.source == bindparam("source"), table.image_id.in_(ids)
    )


def open_store(
    url: str,
    *,
    keep: Collection[Verdict] = KEEP,
    expert_version: Callable[[str, str], ExpertVersion | None] = lambda _expert, _version: None,
    clock: Clock | None = None,
    busy_timeout_ms: int = 2000,
    tell: Callable[[str], None] = lambda _: None,
) -> "Store":
    """Open, and make or migrate where that is due, the database at `url`; StoreError says what to do otherwise.

    `expert_version(expert, version)` describes weights at their first verdict; `keep` are the verdicts whose images
    stay; another program's lock is waited for `busy_timeout_ms`; `tell` hears of a long migration (migrate.py).
    """
    try:
        engine = open_for_writing(url, busy_timeout_ms)
    except OSError as error:
        raise StoreError(f"cannot make the database at {url}: {error}") from error
    except (ImportError, ArgumentError) as error:
        raise StoreError(f"cannot use {url}: {error}; name a file, for example sqlite:///inspection.db") from error
    try:
        migrate(engine, tell)
        return Store(engine, frozenset(keep), expert_version, clock or Clock())
    except SQLAlchemyError as error:
        engine.dispose()
        raise StoreError(f"cannot use the database at {engine.url.render_as_string()}: {error}") from error
    except BaseException:
        engine.dispose()
        raise


class Store:
    """All that is written to the results database, by one thread. Memory follows a transaction once it is durable."""

    def __init__(
        self,
        engine: Engine,
        keep: frozenset[Verdict],
        expert_version: Callable[[str, str], ExpertVersion | None],
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._keep = keep
        self._expert_version = expert_version
        self._clock = clock
        self._boards = Boards()
        self._memory = Memory()
        with self._transaction() as tx:
            in_use = select(pending.c.segment, func.count()).group_by(pending.c.segment)
            for segment, images in tx.connection.execute(in_use):
                tx.segments[segment] = images
            tx.due_added = self._open_limits(tx)

    @property
    def segments_in_use(self) -> set[int]:
        """Journal segments that hold bytes without verdict, or bytes that are still to be copied."""
        return set(self._memory.segments)

    def wait_s(self) -> float | None:
        """How long until the next open attempt reaches its time limit; None where none has one."""
        return max(0.0, self._memory.due[0][0] - self._clock.monotonic_s()) if self._memory.due else None

    def close(self) -> None:
        self._engine.dispose()

    def known(self, arrivals: Sequence[Arrival]) -> dict[tuple[str, str], Known]:
        """Those of `arrivals` that are accepted already, by (source, image id)."""
        by_source: dict[str, list[str]] = {}
        for arrival in arrivals:
            by_source.setdefault(arrival.source, []).append(arrival.image_id)
        with self._engine.connect() as connection:
            # One query a source: SQLite would answer `(source, image_id) IN (...)` by reading the whole index.
            return {
                (source, image_id): Known(inspection_id, sha256)
                for source, ids in by_source.items()
                for image_id, inspection_id, sha256 in ask_for_each(connection, _known, ids, source=source)
            }

    def recover(self) -> Recovery:
        """What the last run left undone, oldest first."""
        with self._engine.connect() as connection:
            waiting = [
                rows.accepted(row, row, row["board_type"])
                for row in map(dict, connection.execute(waiting_for("judge")).mappings())
            ]
            still_open = select(boards.c.rules_version).where(boards.c.verdict.is_(None)).distinct()
            versions = {*connection.execute(still_open).scalars(), *(image.rules_version for image in waiting)}
            texts = connection.execute(select(rules_versions.c.rules_version, rules_versions.c.text))
            return Recovery(
                pending=waiting,
                rules_texts={version: text for version, text in texts if version in versions},
                last_seq=read_numbers(connection).last_seq,
                last_batch_id=connection.execute(select(func.max(stages.c.batch_id))).scalar() or 0,
            )

    def copies_to_make(self) -> list[CopyRequest]:
        """Images that stay and whose copies the last run did not finish."""
        with self._engine.connect() as connection:
            return [keep_task(row) for row in map(dict, connection.execute(waiting_for("keep")).mappings())]

    def accept(self, group: Sequence[tuple[Arrival, JournalKey]], routes: "Routes") -> list[Accepted]:
        """Rows for images whose bytes are durable. The caller has left out what is `known` and repeats in the group."""
        with self._transaction() as tx:
            accepted = accept(tx, group, routes)
        now_s = self._clock.monotonic_s()
        self._memory.accepted_s.update((image.inspection_id, now_s) for image in accepted)
        return [replace(image, accepted_s=now_s) for image in accepted]

    def keep_rules(self, routes: "Routes") -> None:
        """Note the rules that came into force, unless they were before."""
        with self._transaction() as tx:
            keep_rules(tx, routes)

    def write(
        self,
        outcomes: Sequence[Outcome] = (),
        switches: Sequence[ExpertSwitch] = (),
        kept: Sequence[Kept] = (),
    ) -> Written:
        """Verdicts with stages and `seq`, the boards they close, boards whose time is up, loads, finished copies."""
        with self._transaction() as tx:
            finishing = Finishing(tx, self._keep, self._expert_version)
            finishing.judge(outcomes)
            finishing.close_due()
            finishing.note_kept(kept)
            finishing.flush()
            tx.add(expert_switches, [rows.switch_row(switch) for switch in switches])
        return finishing.written

    def accept_texts(self, requests: Sequence[TextRequest]) -> list[AcceptedText | TextRequest]:
        """A row for each request; in place of one whose (source, id) is accepted already, that earlier request."""
        with self._transaction() as tx:
            return generations.accept(tx, requests)

    def finish_texts(self, outcomes: Sequence[TextOutcome]) -> generations.WrittenTexts:
        """Results with their `seq`. One that has a result already, or that nobody knows, stays as it is."""
        with self._transaction() as tx:
            return generations.finish(tx, outcomes)

    def texts_to_make(self) -> list[AcceptedText]:
        """Requests for text that the last run accepted and did not finish, oldest first."""
        with self._engine.connect() as connection:
            return generations.unfinished(connection)

    def review(self, decision: reviews.Decision) -> reviews.Review:
        """A person's decision, or its undoing; ReviewRefusedError where it may not be."""
        with self._transaction() as tx:
            return reviews.append(tx, decision)

    def write_over(self) -> None:
        """A commit that leaves every row as it was: what one that failed has left behind can no longer come true."""
        pruned = stream_position.c.pruned
        with self._transaction() as tx:
            for change in (1, -1):  # SQLite would not write the same value again
                tx.connection.execute(update(stream_position).values(pruned=pruned + change))

    def forget_images(self, ids: Sequence[int]) -> None:
        """The files of `ids` are about to be pruned: no row names them from now on."""
        with self._transaction() as tx:
            prune.forget_images(tx, ids)

    def forget_boards(self, board_ids: Sequence[int], before: str) -> prune.Forgotten:
        """Prune those of these attempts that closed before `before` and that nothing keeps, with all their rows."""
        with self._transaction() as tx:
            forgotten = prune.forget_boards(tx, board_ids, before)
        self._boards.forget(tx.touched)
        return forgotten

    def forget_others(self, before: str, limit: int) -> int:
        """Prune loads and answers of language models from before `before`, at most `limit` of each; how many."""
        with self._transaction() as tx:
            return prune.forget_others(tx, before, limit)

    @property
    def engine(self) -> Engine:
        """For upkeep between two transactions, in the writer's thread (upkeep.py)."""
        return self._engine

    def _transaction(self) -> AbstractContextManager[Transaction]:
        return begin(self._engine, self._boards, self._memory, self._clock)

    def _open_limits(self, tx: Transaction) -> list[tuple[float, str, str, int]]:
        """The time limits of open attempts, downtime included, on today's monotonic clock."""
        query = (
            select(
                *(boards.c.first_seen_at, recipes.c.time_limit_s),
                *(boards.c.board_type, boards.c.serial, boards.c.attempt),
            )
            .join(
                recipes,
                (recipes.c.rules_version == boards.c.rules_version) & (recipes.c.board_type == boards.c.board_type),
            )
            .where(boards.c.verdict.is_(None), recipes.c.time_limit_s.is_not(None))
        )
        return [
            # A wall clock that was set back meanwhile gives nobody more than the whole time.
            (tx.now_s + time_limit_s - max(0.0, tx.now_wall_s - wall_seconds(first_seen_at)), *board)
            for first_seen_at, time_limit_s, *board in tx.connection.execute(query)
        ]
