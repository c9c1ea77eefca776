"""Pruning, as rows: which images and results are old, and how they leave the tables.

Questions are asked of a reader's connection, so that the writer waits for short statements by key only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, exists, func, literal, or_, select, update

from daemon.policy.retain import KeptImage
from daemon.storage.database.schema import (
    boards,
    detections,
    expert_switches,
    generations,
    inspections,
    pending,
    reviews,
    stages,
    stream_position,
)
from daemon.storage.database.transaction import Transaction

_IDS_PER_QUERY = 500

_IS_REVIEWED = exists().where(reviews.c.inspection_id == inspections.c.inspection_id)


@dataclass(frozen=True, slots=True)
class OldBoard:
    """A closed attempt whose rows may go: `rows` is how many that are, so that a transaction stays short."""

    board_id: int
    completed_at: str
    rows: int


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What one transaction took: attempts, images' rows, and the files that no row names any more."""

    boards: int
    inspections: int
    image_paths: list[str]


def newest_at(connection: Connection) -> str | None:
    """When the newest image was accepted; None where there is none."""
    query = select(inspections.c.accepted_at).order_by(inspections.c.inspection_id.desc()).limit(1)
    return connection.execute(query).scalar()


def kept_bytes(connection: Connection) -> int:
    """Bytes of all images that are kept, as they came in."""
    query = select(func.coalesce(func.sum(inspections.c.image_bytes), 0)).where(inspections.c.image_path.is_not(None))
    return connection.execute(query).scalar() or 0


def oldest_kept(connection: Connection, limit: int, before: str | None) -> list[KeptImage]:
    """Enough kept images to know the `limit` that go next; only those completed before `before` where that is given.

    A row has an `image_path` only once its verdict and its copy are durable.
    """
    found: list[KeptImage] = []
    for verdict in ("pass", "unknown"):
        found += _kept(connection, _oldest(limit, before, inspections.c.verdict == verdict, ~_IS_REVIEWED))
    if len(found) >= limit:
        return found
    for verdict in ("fail", "review"):
        found += _kept(connection, _oldest(limit, before, inspections.c.verdict == verdict))
    reviewed = select(reviews.c.inspection_id).distinct()
    asked_about = inspections.c.inspection_id.in_(reviewed), inspections.c.verdict.in_(("pass", "unknown"))
    return found + _kept(connection, _oldest(limit, before, *asked_about))


def forget_images(tx: Transaction, ids: Sequence[int]) -> None:
    """The files of `ids` are about to go; from now on no row names them."""
    of_these = inspections.c.inspection_id.in_(ids)
    tx.connection.execute(update(inspections).where(of_these).values(image_path=None))


def old_boards(connection: Connection, before: str, after: str, limit: int) -> list[OldBoard]:
    """The oldest attempts closed before `before` that `may_go`, from those closed at or after `after` on."""
    of_board = select(func.count()).where(inspections.c.board_id == boards.c.board_id)
    boxes = of_board.where(detections.c.inspection_id == inspections.c.inspection_id)
    query = (
        select(boards.c.board_id, boards.c.completed_at, of_board.scalar_subquery() + boxes.scalar_subquery())
        .where(_may_go(before), boards.c.completed_at >= after)
        .order_by(boards.c.completed_at)
        .limit(limit)
    )
    return [OldBoard(*row) for row in connection.execute(query)]


def forget_boards(tx: Transaction, board_ids: Sequence[int], before: str) -> Forgotten:
    """Take those of `board_ids` that still may go, with all their rows. The numbers of their `seq` never come again."""
    found = tx.connection.execute(
        select(boards.c.board_id, boards.c.board_type, boards.c.serial).where(
            boards.c.board_id.in_(board_ids), _may_go(before)
        )
    ).all()
    going = [row.board_id for row in found]
    tx.touched |= {(row.board_type, row.serial) for row in found}
    images = tx.connection.execute(
        select(inspections.c.inspection_id, inspections.c.image_path).where(inspections.c.board_id.in_(going))
    ).all()
    ids = [row.inspection_id for row in images]
    for start in range(0, len(ids), _IDS_PER_QUERY):
        chunk = ids[start : start + _IDS_PER_QUERY]
        for table in (detections, stages, inspections):
            tx.connection.execute(delete(table).where(table.c.inspection_id.in_(chunk)))
    tx.connection.execute(delete(boards).where(boards.c.board_id.in_(going)))
    _count_pruned(tx, len(ids) + len(going))
    return Forgotten(len(going), len(ids), [row.image_path for row in images if row.image_path])


def forget_others(tx: Transaction, before: str, limit: int) -> int:
    """Take at most `limit` loads and as many answers of language models that are older than `before`; how many."""
    oldest = select(expert_switches.c.switch_id).order_by(expert_switches.c.switch_id).limit(limit)
    table = expert_switches.c
    switches = tx.connection.execute(delete(expert_switches).where(table.switch_id.in_(oldest), table.at < before))
    found = generations.c
    old = select(found.generation_id).where(found.completed_at < before, found.seq.is_not(None)).limit(limit)
    answers = tx.connection.execute(delete(generations).where(found.generation_id.in_(old)))
    _count_pruned(tx, answers.rowcount)
    return switches.rowcount + answers.rowcount


def strays(connection: Connection, files: Iterable[tuple[int, str]], before: str | None) -> list[str]:
    """Those of `files` (inspection id, path) that pruning left when it was interrupted.

    No row and no copy under way names them, and their row was pruned or, where results go after a time, is gone for
    that long (`before`). A file of an image that this database does not know is somebody else's: it stays.
    """
    by_id = dict(files)
    table = inspections.c
    query = (
        select(table.inspection_id, table.image_path, table.completed_at, pending.c.task)
        .join(pending, pending.c.inspection_id == table.inspection_id, isouter=True)
        .where(table.inspection_id.in_(list(by_id)))
    )
    rows = {row.inspection_id: row for row in connection.execute(query)}
    last_id = connection.execute(select(stream_position.c.last_inspection_id)).scalar() or 0
    found: list[str] = []
    for inspection_id, path in by_id.items():
        day, row = path.split("/")[-3], rows.get(inspection_id)
        if row is None:
            was_pruned = before is not None and inspection_id <= last_id and day < before[:10]
        else:
            was_pruned = row.image_path is None and row.task is None and (row.completed_at or "")[:10] == day
        if was_pruned:
            found.append(path)
    return found


def _oldest(limit: int, before: str | None, *where: ColumnElement[bool]) -> Any:
    table = inspections.c
    columns = (table.inspection_id, table.image_path, table.image_bytes, table.verdict, table.completed_at)
    query = select(*columns, _IS_REVIEWED.label("is_reviewed"))
    query = query.where(table.image_path.is_not(None), *where)
    if before is not None:
        query = query.where(table.completed_at < before)
    return query.order_by(table.completed_at).limit(limit)


def _kept(connection: Connection, query: Any) -> list[KeptImage]:
    return [
        KeptImage(
            row.inspection_id, row.image_path, row.image_bytes, row.verdict, bool(row.is_reviewed), row.completed_at
        )
        for row in connection.execute(query)
    ]


def _may_go(before: str) -> ColumnElement[bool]:
    """Closed before `before`, and none of its images is younger, waits for something, or has a review."""
    table = inspections.c
    stays = (
        exists()
        .where(table.board_id == boards.c.board_id)
        .where(
            or_(
                table.status != literal("done"),
                table.completed_at >= before,
                _IS_REVIEWED,
                exists().where(pending.c.inspection_id == table.inspection_id),
            )
        )
    )
    answers = exists().where(generations.c.board_id == boards.c.board_id)
    return boards.c.verdict.is_not(None) & (boards.c.completed_at < before) & ~stays & ~answers


def _count_pruned(tx: Transaction, rows: int) -> None:
    if rows:
        tx.connection.execute(update(stream_position).values(pruned=stream_position.c.pruned + rows))
