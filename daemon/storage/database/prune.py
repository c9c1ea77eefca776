"""Pruning of rows: queries for old images and results (by a reader), and the statements that remove them.

Order of pruning: passed images first, the newest good examples late, evidence last; the oldest first within each.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, delete, exists, func, insert, literal, or_, select, update

from daemon.storage.database.connections import among
from daemon.storage.database.inspections import newest_passes
from daemon.storage.database.schema import (
    age_marks,
    boards,
    detections,
    editions,
    expert_switches,
    generations,
    inspections,
    pending,
    recipes,
    reviews,
    rules_versions,
    shadow_answers,
    stages,
    stream_position,
)
from daemon.storage.database.transaction import Transaction

_IS_REVIEWED = exists().where(reviews.c.inspection_id == inspections.c.inspection_id)


class AgeLimit(NamedTuple):
    """Results from before `before` (UTC text) are old, up to and with `seq`."""

    before: str
    seq: int = 2**63 - 1


class KeptImage(NamedTuple):
    """An image that has its verdict and a durable copy; `inspection_id` sorts by acceptance."""

    inspection_id: int
    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PrunedBoards:
    """The effects of one transaction: removed attempts and inspections, and files that no row names any more."""

    boards: int
    inspections: int
    image_paths: list[str]


def note_age(tx: Transaction, running_s: int, wall_s: float, keep_s: float) -> None:
    """Add a mark: the clock and the last `seq` when daemons had run with this database for `running_s` seconds in all.

    Marks older than the newest one from `keep_s` running seconds ago go.
    """
    last_seq = select(func.coalesce(func.max(stream_position.c.last_seq), 0)).scalar_subquery()
    tx.connection.execute(insert(age_marks).values([running_s, wall_s, last_seq]))
    at = age_marks.c.running_s
    day_old = select(func.max(at)).where(at <= running_s - keep_s).scalar_subquery()
    tx.connection.execute(delete(age_marks).where(at < day_old))


def kept_bytes(connection: Connection) -> int:
    query = select(func.coalesce(func.sum(inspections.c.image_bytes), 0)).where(inspections.c.image_path.is_not(None))
    return connection.execute(query).scalar() or 0


def oldest_kept(connection: Connection, limit: int, old: AgeLimit | None, good_examples: int = 0) -> list[KeptImage]:
    """Return the `limit` kept images that go next, in this order; with `old`, only those that are.

    A row has an `image_path` only once its verdict and its copy are durable. Where age does not decide, the newest
    `good_examples` passes of each component go after the others, before evidence: every review needs them.
    """
    newest = newest_passes(connection, good_examples) if good_examples and old is None else {}
    examples = [one for ids in newest.values() for one in ids]
    images: list[KeptImage] = []
    for verdict in ("pass", "unknown"):
        may_go = inspections.c.verdict == verdict, ~_IS_REVIEWED, inspections.c.inspection_id.not_in(examples)
        images += _oldest(connection, limit, old, *may_go)
    images += _oldest(connection, limit, old, inspections.c.inspection_id.in_(examples), ~_IS_REVIEWED)
    if len(images) < limit:
        reviewed = select(reviews.c.inspection_id).distinct()
        of_reviewed = inspections.c.inspection_id.in_(reviewed), inspections.c.verdict.in_(("pass", "unknown"))
        evidence = _oldest(connection, limit, old, *of_reviewed)
        for verdict in ("fail", "review"):
            evidence += _oldest(connection, limit, old, inspections.c.verdict == verdict)
        images += sorted(evidence)
    return images[:limit]


def forget_images(tx: Transaction, ids: Sequence[int]) -> None:
    tx.connection.execute(update(inspections).where(inspections.c.inspection_id.in_(ids)).values(image_path=None))


def old_boards(connection: Connection, old: AgeLimit, after: str, limit: int) -> Sequence[Row[*tuple[Any, ...]]]:
    """Return `board_id` and `completed_at` of closed attempts whose rows may go, and how many `rows` each has."""
    of_board = select(func.count()).where(inspections.c.board_id == boards.c.board_id)
    boxes = of_board.where(detections.c.inspection_id == inspections.c.inspection_id)
    rows = of_board.scalar_subquery() + boxes.scalar_subquery()
    query = (
        select(boards.c.board_id, boards.c.completed_at, rows.label("rows"))
        .where(_may_go(old), boards.c.completed_at >= after)
        .order_by(boards.c.completed_at)
        .limit(limit)
    )
    return connection.execute(query).all()


def forget_boards(tx: Transaction, board_ids: Sequence[int], old: AgeLimit) -> PrunedBoards:
    """Remove the boards in `board_ids` that may still go, with all their rows. Their `seq` is never reused."""
    rows = tx.connection.execute(
        select(boards.c.board_id, boards.c.board_type, boards.c.serial).where(
            boards.c.board_id.in_(board_ids), _may_go(old)
        )
    ).all()
    going = [row.board_id for row in rows]
    tx.touched |= {(row.board_type, row.serial) for row in rows}
    images = tx.connection.execute(
        select(inspections.c.inspection_id, inspections.c.image_path).where(inspections.c.board_id.in_(going))
    ).all()
    ids = [row.inspection_id for row in images]
    for table in (detections, stages, shadow_answers, inspections):
        tx.connection.execute(delete(table).where(among(table.c.inspection_id)), {"ids": json.dumps(ids)})
    tx.connection.execute(delete(boards).where(boards.c.board_id.in_(going)))
    _count_pruned(tx, len(ids) + len(going))
    return PrunedBoards(len(going), len(ids), [row.image_path for row in images if row.image_path])


def forget_others(tx: Transaction, old: AgeLimit, limit: int) -> int:
    table = expert_switches.c
    oldest = select(table.switch_id).order_by(table.switch_id).limit(limit)
    younger = select(func.min(table.switch_id)).where(table.at >= old.before)
    is_old = table.switch_id < func.coalesce(younger.scalar_subquery(), 2**63 - 1)
    switches = tx.connection.execute(delete(expert_switches).where(table.switch_id.in_(oldest), is_old))
    table = generations.c
    is_old = (table.completed_at < old.before) & (table.seq <= old.seq)
    answers = tx.connection.execute(
        delete(generations).where(table.generation_id.in_(select(table.generation_id).where(is_old).limit(limit)))
    )
    _count_pruned(tx, answers.rowcount)
    return switches.rowcount + answers.rowcount


def unused_rules(connection: Connection, old: AgeLimit) -> tuple[list[str], int]:
    last_id = connection.execute(select(func.max(boards.c.board_id))).scalar() or 0
    table = rules_versions.c
    versions = set(connection.execute(select(table.rules_version).where(table.loaded_at < old.before)).scalars())
    if versions:
        versions -= set(connection.execute(select(boards.c.rules_version).distinct()).scalars())
    return sorted(versions), last_id


def forget_rules(tx: Transaction, versions: Sequence[str], last_id: int) -> None:
    younger = select(boards.c.rules_version).where(boards.c.board_id > last_id)
    for table in (recipes, editions, rules_versions):
        of_these = table.c.rules_version.in_(versions), table.c.rules_version.not_in(younger)
        tx.connection.execute(delete(table).where(*of_these))


def strays(connection: Connection, files: Iterable[tuple[int, str]], before: str | None) -> list[str]:
    """Return the `files` (inspection id, path) that an interrupted pruning left.

    No row and no copy under way names them, and their row was pruned or, if results are pruned, has been gone since
    `before`. A file of an image that this database does not know is not ours: it stays.
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
    left: list[str] = []
    for inspection_id, path in by_id.items():
        day, row = path.split("/")[-3], rows.get(inspection_id)
        if row is None:
            was_pruned = before is not None and inspection_id <= last_id and day < before[:10]
        else:
            was_pruned = row.image_path is None and row.task is None and (row.completed_at or "")[:10] == day
        if was_pruned:
            left.append(path)
    return left


def _oldest(connection: Connection, limit: int, old: AgeLimit | None, *where: ColumnElement[bool]) -> list[KeptImage]:
    """Return the oldest kept images: by their time if there is a limit of age, else as they were accepted."""
    table = inspections.c
    columns = (table.inspection_id, table.image_path, table.image_bytes)
    query = select(*columns).where(table.image_path.is_not(None), *where).limit(limit)
    if old is None:
        query = query.order_by(table.inspection_id)
    else:
        is_old = table.completed_at < old.before, table.seq <= old.seq
        query = query.where(*is_old).order_by(table.completed_at)
    return [KeptImage(*row) for row in connection.execute(query)]


def _may_go(old: AgeLimit) -> ColumnElement[bool]:
    table = inspections.c
    stays = (
        exists()
        .where(table.board_id == boards.c.board_id)
        .where(
            or_(
                table.status != literal("done"),
                table.completed_at >= old.before,
                table.seq > old.seq,
                _IS_REVIEWED,
                exists().where(pending.c.inspection_id == table.inspection_id),
            )
        )
    )
    answers = exists().where(generations.c.board_id == boards.c.board_id)
    decided = exists().where(reviews.c.board_id == boards.c.board_id)
    is_old = (boards.c.completed_at < old.before) & (boards.c.seq <= old.seq)
    return boards.c.verdict.is_not(None) & is_old & ~stays & ~answers & ~decided


def _count_pruned(tx: Transaction, rows: int) -> None:
    if rows:
        tx.connection.execute(update(stream_position).values(pruned=stream_position.c.pruned + rows))
