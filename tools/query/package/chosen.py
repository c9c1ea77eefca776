"""Which boards a package is about, and the rows of theirs: one state of the database, read in one transaction."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, false, func, or_, select

from daemon.errors import MissingExtraError
from daemon.storage.database.schema import (
    boards,
    detections,
    expert_versions,
    generations,
    inspections,
    pending,
    reviews,
    rules_versions,
    stages,
    stream_position,
)
from daemon.storage.database.serials import has_serial
from tools.query.formats import Csv, JsonLines, Parquet, Writer
from tools.query.rows import IMAGES, Kind, kind_of

_ROWS_AT_ONCE = 5000


@dataclass(frozen=True, slots=True)
class Selection:
    """Boards by lot, serial and type, and by when they closed (while they are open: when they were first seen)."""

    lots: Sequence[str] = ()
    serials: Sequence[str] = ()
    board_types: Sequence[str] = ()
    since: str | None = None
    until: str | None = None

    def condition(self) -> ColumnElement[bool]:
        named = ((boards.c.lot, self.lots), (boards.c.board_type, self.board_types))
        parts = [column.in_(values) for column, values in named if values]
        parts += [has_serial(*self.serials)] if self.serials else []
        at = func.coalesce(boards.c.completed_at, boards.c.first_seen_at)
        parts += [at >= self.since] if self.since else []
        parts += [at < self.until] if self.until else []
        return and_(*parts)


@dataclass(slots=True)
class Taken:
    """What the rows of a package hold, counted while they were read."""

    last_seq: int = 0
    rows: dict[str, int] = field(default_factory=dict[str, int])
    is_with_parquet: bool = True
    experts: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    rules: dict[str, str | None] = field(default_factory=dict[str, str | None])
    versions: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    #: Images that have no verdict, or no copy, yet: what is still to be done with them.
    waiting: dict[int, str] = field(default_factory=dict[int, str])
    picture_bytes: int = 0


def take_rows(connection: Connection, selection: Selection, folder: Path) -> Taken:
    """Write all rows of the chosen boards into `folder`; nothing is written where no board is chosen."""
    taken = Taken()
    taken.last_seq = connection.execute(select(stream_position.c.last_seq)).scalar() or 0
    chosen = selection.condition()
    if not connection.execute(select(boards.c.board_id).where(chosen).limit(1)).first():
        return taken
    theirs = inspections.c.board_id.in_(select(boards.c.board_id).where(chosen))
    images = select(inspections.c.inspection_id).where(theirs)

    for row in _table(connection, taken, folder, boards, chosen):
        taken.rules.setdefault(row["rules_version"], None)
    for row in _table(connection, taken, folder, inspections, theirs):
        taken.rules.setdefault(row["rules_version"], None)
        taken.picture_bytes += row["image_bytes"] if row["image_path"] else 0
    for row in _table(connection, taken, folder, stages, stages.c.inspection_id.in_(images)):
        taken.experts.add((row["expert"], row["expert_version"]))
    _drain(_table(connection, taken, folder, detections, detections.c.inspection_id.in_(images)))
    _drain(_table(connection, taken, folder, reviews, reviews.c.inspection_id.in_(images)))
    _drain(
        _table(
            connection, taken, folder, generations, generations.c.board_id.in_(select(boards.c.board_id).where(chosen))
        )
    )
    _drain(_rows(connection, taken, folder, "final_verdicts", _final_verdicts(theirs), {"inspection_id": "int"}))
    for row in _table(connection, taken, folder, rules_versions, rules_versions.c.rules_version.in_(list(taken.rules))):
        taken.rules[row["rules_version"]] = row["text"]
    for row in _table(connection, taken, folder, expert_versions, _these(sorted(taken.experts))):
        taken.versions[row["expert"], row["expert_version"]] = row["sha256"]
    left = select(pending.c.inspection_id, pending.c.task).where(pending.c.inspection_id.in_(images))
    taken.waiting = {row.inspection_id: row.task for row in connection.execute(left)}
    return taken


def _these(pairs: Sequence[tuple[str, str]]) -> ColumnElement[bool]:
    table = expert_versions.c
    return or_(*(and_(table.expert == expert, table.expert_version == version) for expert, version in pairs), false())


def _final_verdicts(theirs: ColumnElement[bool]) -> "Select[Any]":
    """As the view has them, without grouping the reviews of all boards first."""
    names = ("inspection_id", "verdict", "defect", "decided_by")
    return (
        select(*(IMAGES.columns[name].label(name) for name in names))
        .select_from(IMAGES.joined)
        .where(IMAGES.finished, theirs)
        .order_by(inspections.c.inspection_id)
    )


def _table(
    connection: Connection, taken: Taken, folder: Path, table: Table, condition: ColumnElement[bool]
) -> Iterator[dict[str, Any]]:
    kinds: dict[str, Kind] = {column.name: kind_of(column.name, column.type) for column in table.columns}
    query = select(table).where(condition).order_by(*table.primary_key.columns)
    yield from _rows(connection, taken, folder, table.name, query, kinds)


def _rows(
    connection: Connection, taken: Taken, folder: Path, name: str, query: "Select[Any]", kinds: dict[str, Kind]
) -> Iterator[dict[str, Any]]:
    """Write the rows of a question as CSV, as JSON lines, and as Parquet where that can be; and give them on."""
    names = [column.name for column in query.selected_columns]
    taken.rows[name] = 0
    with ExitStack() as stack:
        out = [
            stack.enter_context((folder / f"{name}.{suffix}").open("w", encoding="utf-8", newline=""))
            for suffix in ("csv", "jsonl")
        ]
        writers: list[Writer] = [Csv(out[0], names), JsonLines(out[1], names)]
        try:
            writers.append(Parquet(folder / f"{name}.parquet", names, [kinds.get(one, "text") for one in names]))
        except MissingExtraError:
            taken.is_with_parquet = False
        found = connection.execution_options(yield_per=_ROWS_AT_ONCE).execute(query)
        for part in found.partitions():
            for writer in writers:
                writer.add(part)
            taken.rows[name] += len(part)
            yield from (dict(zip(names, row, strict=True)) for row in part)
        for writer in writers:
            writer.end()


def _drain(rows: Iterator[Any]) -> None:
    for _ in rows:
        pass
