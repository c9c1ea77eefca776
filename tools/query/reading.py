"""Read the results: the one module of the tools that asks the database for images, answers, boards and decisions.

`coserve results` reads in batches, each a short read transaction, so that the writer can checkpoint its log in between.
Rows written meanwhile are not in the answer, a review written meanwhile may be. All other functions read one state of
the database. Nothing here writes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Select, Table, and_, func, select, true, tuple_

from daemon.storage.database.boards import has_serial
from daemon.storage.database.reader import by_inspection, read_defect_labels
from daemon.storage.database.reviews import DAEMON, answered_settings
from daemon.storage.database.schema import (
    FINAL_BOARDS,
    boards,
    changes,
    detections,
    drawn_boxes,
    editions,
    expert_settings,
    expert_versions,
    generations,
    inspections,
    pending,
    recipes,
    reviews,
    rules_versions,
    runs,
    stages,
    stream_position,
)
from tools.query.rows import BOARDS, IMAGES, RowFilters, RowKind
from tools.terminal.console import CommandError

BATCH_ROWS = 5000
#: Numbers of the stream that one transaction of a batch looks through: some tenths of a second.
WINDOW = 200_000
#: Up to this many boards, chosen by serial, lot or station, are found by their number; more by going through all rows.
_MAX_BOARDS_BY_NUMBER = 1000
#: In another order than that of `seq` all rows are in memory at once.
MAX_SORTED_ROWS = 100_000
_LISTED = "`coserve results --boards` lists those that closed last"

Row = Mapping[str, Any]
Batch = Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class ResultsQuery:
    """Rows in an order: `newest`, `oldest`, or a column's name, followed by `:desc` for the largest first."""

    rows: RowKind
    columns: tuple[str, ...]
    filters: RowFilters
    order: str = "newest"
    limit: int | None = None

    @property
    def sort_column(self) -> str | None:
        """Return the column to order by, unless it is `seq`."""
        return None if self.order in {"newest", "oldest"} else self.order.partition(":")[0]

    def validate(self) -> None:
        """Raise CommandError for columns that these rows lack, and for an order that needs a limit."""
        self.filters.conditions(self.rows)
        names = [*self.columns, *([self.sort_column] if self.sort_column else [])]
        unknown = [name for name in names if name not in self.rows.columns]
        if unknown or self.order.partition(":")[2] not in {"", "asc", "desc"}:
            problem = f"no column {', '.join(unknown)}" if unknown else f"no order {self.order}"
            raise CommandError(f"{problem}: {self.rows.name} have {', '.join(self.rows.columns)}", status=2)
        if self.sort_column and (self.limit is None or self.limit > MAX_SORTED_ROWS):
            raise CommandError(f"--order {self.order} needs a --limit of at most {MAX_SORTED_ROWS}", status=2)


def read_batches(engine: Engine, query: ResultsQuery) -> Iterator[Batch]:
    """Yield the rows, in the order of `columns`, in batches of at most 5000."""
    query.validate()
    if query.sort_column:
        yield from _sorted_batches(engine, query, query.sort_column)
        return
    rows_left = query.limit
    for window in _windows(engine, query):
        last_key: Sequence[Any] | None = None
        while rows_left is None or rows_left > 0:
            batch_rows = min(BATCH_ROWS, rows_left if rows_left is not None else BATCH_ROWS)
            batch = _read_batch(engine, query, window, last_key, batch_rows)
            if not batch:
                break
            width = len(query.columns)
            yield [row[:width] for row in batch]
            last_key = batch[-1][width:]
            rows_left = None if rows_left is None else rows_left - len(batch)
            if len(batch) < BATCH_ROWS:
                break


def count_rows(engine: Engine, query: ResultsQuery) -> int:
    query.validate()
    total = 0
    conditions = query.filters.conditions(query.rows)
    for window in _windows(engine, query):
        counted = select(func.count()).select_from(query.rows.tables).where(*conditions, window)
        with engine.connect() as connection:
            total += connection.execute(counted).scalar_one()
    return total


def _read_batch(
    engine: Engine, query: ResultsQuery, window: ColumnElement[bool], last_key: Sequence[Any] | None, limit: int
) -> Batch:
    """Return at most `limit` rows behind the row with `last_key`, each with its key behind its columns."""
    rows, newest_first = query.rows, query.order == "newest"
    first, *others = rows.key
    statement = _select(query, *rows.key).where(window).limit(limit)
    statement = statement.order_by(first.desc() if newest_first else first.asc(), *others)
    if last_key is not None:
        statement = statement.where(_is_behind(rows, last_key, newest_first=newest_first))
    with engine.connect() as connection:
        return connection.execute(statement).fetchall()


def _select(query: ResultsQuery, *more: ColumnElement[Any]) -> Select[Any]:
    columns = (*(query.rows.columns[name] for name in query.columns), *more)
    return (
        select(*(column.label(None) for column in columns))
        .select_from(query.rows.tables)
        .where(*query.filters.conditions(query.rows))
    )


def _is_behind(rows: RowKind, last_key: Sequence[Any], *, newest_first: bool) -> ColumnElement[bool]:
    """Condition for rows after `last_key`. Stages of one image come by step in either direction."""
    first, *others = rows.key
    beyond = first < last_key[0] if newest_first else first > last_key[0]
    if not others:
        return beyond
    # The first half alone is what the index over `seq` can use.
    from_here = first <= last_key[0] if newest_first else first >= last_key[0]
    return and_(from_here, beyond | (tuple_(*others) > tuple_(*last_key[1:])))


def _sorted_batches(engine: Engine, query: ResultsQuery, sort_column: str) -> Iterator[Batch]:
    column = query.rows.columns[sort_column]
    order = column.desc() if query.order.endswith(":desc") else column.asc()
    # A column's nulls come last, in either direction and in every database.
    statement = _select(query).order_by(column.is_(None), order, query.rows.columns["seq"].desc()).limit(query.limit)
    with engine.connect() as connection:
        answer = connection.execute(statement).fetchall()
    for start in range(0, len(answer), BATCH_ROWS):
        yield answer[start : start + BATCH_ROWS]


def _windows(engine: Engine, query: ResultsQuery) -> Iterator[ColumnElement[bool]]:
    """Yield conditions, each quick to search, that cover all rows in the order of the query."""
    rows, filters = query.rows, query.filters
    seq = rows.columns["seq"]
    with engine.connect() as connection:
        if rows.windows is not None:
            windows = rows.windows(connection, filters)
            yield from reversed(windows) if query.order == "newest" else windows
            return
        # Two statements: one for both would read all numbers.
        first, last = (connection.execute(select(edge(seq))).scalar() for edge in (func.min, func.max))
        board_ids = _few_board_ids(connection, filters)
    if first is None or last is None:
        return
    first, last = max(first, filters.seq_from or first), min(last, last if filters.seq_to is None else filters.seq_to)
    if board_ids is not None:
        yield (boards if rows is BOARDS else inspections).c.board_id.in_(board_ids) & seq.between(first, last)
        return
    starts = range(first, last + 1, WINDOW)
    for start in reversed(starts) if query.order == "newest" else starts:
        yield seq.between(start, min(start + WINDOW - 1, last))


def _few_board_ids(connection: Connection, filters: RowFilters) -> list[int] | None:
    """Return the boards chosen by serial, lot and station; None without these filters or for many boards."""
    equal = {name: filters.equal[name] for name in ("serial", "lot", "station") if name in filters.equal}
    if not equal:
        return None
    chosen_by = [
        has_serial(*values) if name == "serial" else boards.c[name].in_(values) for name, values in equal.items()
    ]
    query = select(boards.c.board_id).where(*chosen_by).limit(_MAX_BOARDS_BY_NUMBER + 1)
    board_ids = list(connection.execute(query).scalars())
    return board_ids if len(board_ids) <= _MAX_BOARDS_BY_NUMBER else None


# One image: `coserve explain`


#: An inspection's number or `SOURCE/IMAGE_ID`; or a serial, and designator, board type and attempt, if they are named.
InspectionName = tuple[str, str | None, str | None, int | None]


@dataclass(frozen=True, slots=True)
class JudgedImage:
    """A row of `inspections` with its board and its stages, each with its `boxes` as the expert listed them."""

    inspection: Row
    board: Row
    stages: Sequence[Row]


@dataclass(frozen=True, slots=True)
class InspectionRecord(JudgedImage):
    """All rows of one inspection; `rules` may be deleted.

    `settings` are those that experts answered with, by expert and digest. `others` are the numbers of other images of
    the same place; `run` judged it.
    """

    reviews: Sequence[Row]
    rules: Row | None
    versions: Mapping[tuple[str, str], Row]
    settings: Mapping[tuple[str, str | None], str]
    others: Sequence[int]
    run: Row | None


def read_inspection(engine: Engine, name: InspectionName) -> InspectionRecord:
    """Read an inspection in one transaction. Raises CommandError."""
    with engine.connect() as connection:
        number, *others = _find_inspections(connection, name)
        (inspection,) = _rows(connection, inspections, inspections.c.inspection_id == number)
        (board,) = _rows(connection, boards, boards.c.board_id == inspection["board_id"])
        rules = rules_versions.c.rules_version == inspection["rules_version"]
        answers = read_stages(connection, [number])[number]
        versions = {(answer["expert"], answer["expert_version"]) for answer in answers}
        version_key = (expert_versions.c.expert, expert_versions.c.expert_version)
        return InspectionRecord(
            inspection=inspection,
            board=board,
            stages=answers,
            reviews=_rows(connection, reviews, reviews.c.inspection_id == number),
            rules=next(iter(_rows(connection, rules_versions, rules)), None),
            versions={
                (row["expert"], row["expert_version"]): row
                for row in _rows(connection, expert_versions, tuple_(*version_key).in_(sorted(versions)))
            },
            settings=answered_settings(connection),
            others=others,
            run=next(iter(_rows(connection, runs, runs.c.run_id == inspection["run_id"])), None),
        )


def read_stages(connection: Connection, ids: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Return the experts' answers by `inspection_id`, step by step, each with its `boxes`."""
    answers, boxes = by_inspection(connection, stages, ids), by_inspection(connection, detections, ids)
    return {
        number: [
            {**row, "boxes": [dict(box) for box in boxes[number] if box["step"] == row["step"]]}
            for row in answers[number]
        ]
        for number in ids
    }


def _rows(connection: Connection, table: Table, condition: ColumnElement[bool]) -> list[dict[str, Any]]:
    query = select(table).where(condition).order_by(*table.primary_key.columns)
    return [dict(row) for row in connection.execute(query).mappings()]


def _find_inspections(connection: Connection, inspection: InspectionName) -> list[int]:
    """Return the named inspection, and behind it others of the same place, newest first."""
    number, (name, designator, *_) = inspections.c.inspection_id, inspection
    if designator is not None:
        matches = _find_by_place(connection, inspection)
    elif "/" in name:
        # Both may have slashes in them.
        parts = name.split("/")
        pairs = [("/".join(parts[:at]), "/".join(parts[at:])) for at in range(1, len(parts))]
        key = tuple_(inspections.c.source, inspections.c.image_id)
        matches = list(connection.execute(select(number).where(key.in_(pairs))).scalars())
    else:
        is_number = name.isdecimal() and len(name) < 19
        matches = list(connection.execute(select(number).where(number == int(name))).scalars()) if is_number else []
    if matches:
        return matches
    if designator is None and connection.execute(select(boards.c.board_id).where(has_serial(name))).first():
        raise CommandError(
            f"{name} is a board, not an image: name the part too, such as `coserve explain {name} R1`"
            f" (`coserve results --serial {name}` lists its parts)"
        )
    shown = name if designator is None else f"{name} {designator}"
    raise CommandError(
        f"no inspection {shown} in the results: name its inspection_id, SOURCE/IMAGE_ID, or SERIAL DESIGNATOR"
        " (`coserve results --columns inspection_id,serial,designator` lists them)"
    )


def _find_by_place(connection: Connection, inspection: InspectionName) -> list[int]:
    serial, designator, board_type, attempt = inspection
    number, chosen = inspections.c.inspection_id, {boards.c.board_type: board_type, boards.c.attempt: attempt}
    query = (
        select(number, boards.c.board_type)
        .join(boards, boards.c.board_id == inspections.c.board_id)
        .where(has_serial(serial), inspections.c.designator == designator)
        .where(*(column == value for column, value in chosen.items() if value is not None))
        .order_by(boards.c.attempt.desc(), number.desc())
    )
    rows = connection.execute(query).all()
    types = sorted({row.board_type for row in rows})
    if len(types) > 1:
        raise CommandError(f"several board types have the serial {serial}: add --type {' or '.join(types)}")
    return [row.inspection_id for row in rows]


# One board: `coserve report`


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt at a board, its images that failed or were decided upon, and the labels of `defects`.

    `board` has the verdict after review with who gave it, `daemon_verdict`, the numbers of `attempts` and of `pending`
    images; `is_whole` where a person decided about the board itself.
    """

    board: Row
    images: Sequence[Row]
    defects: Mapping[str, str]


def read_attempt(engine: Engine, serial: str, board_type: str | None, attempt: int | None) -> AttemptRecord:
    """Read the attempt, or the newest, in one transaction. Raises CommandError."""
    with engine.connect() as connection:
        attempts = _attempts(connection, serial, board_type)
        matches = [row for row in attempts if attempt in (None, row["attempt"])]
        if not matches:
            raise CommandError(f"no attempt {attempt} at board {serial} in the results: {_LISTED}")
        board = matches[-1]
        on_board = inspections.c.board_id == board["board_id"]
        columns = IMAGES.columns
        findings = (
            select(*(column.label(name) for name, column in columns.items()))
            .select_from(IMAGES.tables)
            .where(IMAGES.is_finished, on_board, (columns["verdict"] != "pass") | (columns["daemon_verdict"] != "pass"))
            .order_by(inspections.c.designator, inspections.c.inspection_id)
        )
        images = [dict(row) for row in connection.execute(findings).mappings()]
        answers = read_stages(connection, [image["inspection_id"] for image in images])
        unfinished = select(func.count()).select_from(inspections).where(on_board, inspections.c.status != "done")
        final = select(*(FINAL_BOARDS.c[name] for name in ("verdict", "decided_by", "decided_at")))
        of_board = connection.execute(final.where(FINAL_BOARDS.c.board_id == board["board_id"])).mappings().first()
        of_whole = select(reviews.c.reviewer, reviews.c.note).where(reviews.c.board_id == board["board_id"])
        whole = connection.execute(of_whole.order_by(reviews.c.review_id.desc())).first()
        is_whole = whole is not None and whole.reviewer != DAEMON
        facts = {
            "daemon_verdict": board["verdict"],
            **(of_board or {"decided_by": None, "decided_at": None}),
            "note": whole.note if whole is not None and is_whole else None,
            "is_whole": is_whole,
            "attempts": len(attempts),
            "pending": connection.execute(unfinished).scalar_one(),
            "missing": json.loads(board["missing"] or "[]"),
        }
        images = [image | {"stages": answers[image["inspection_id"]]} for image in images]
        return AttemptRecord(board | facts, images, read_defect_labels(connection))


def _attempts(connection: Connection, serial: str, board_type: str | None) -> list[dict[str, Any]]:
    """Return all attempts at a board, oldest first. Raises CommandError for none, or several boards."""
    of_type = [boards.c.board_type == board_type] if board_type is not None else []
    attempts = _rows(connection, boards, and_(has_serial(serial), *of_type))
    types = sorted({row["board_type"] for row in attempts})
    if len(types) > 1:
        message = f"serial {serial} is on boards of several types: name one with --type ({', '.join(types)})"
        raise CommandError(message, status=2)
    if not attempts:
        raise CommandError(f"no board with serial {serial} in the results: {_LISTED}")
    return attempts


# Stored pictures: `coserve rejudge`


@dataclass(frozen=True, slots=True)
class StoredImages:
    """Numbers of images with a picture, newest first; `pruned` ones have none, `unjudged` no verdict."""

    ids: Sequence[int]
    pruned: int
    unjudged: int


def find_stored_images(connection: Connection, filters: RowFilters) -> StoredImages:
    """Find all images that match. An `unknown` image has no verdict to compare with."""
    image = inspections.c
    chosen = select(image.inspection_id).select_from(IMAGES.tables).where(*filters.conditions(IMAGES))
    is_judged, has_none = image.verdict.is_distinct_from("unknown"), image.image_path.is_(None)

    def count(*conditions: ColumnElement[bool]) -> int:
        return connection.execute(chosen.where(*conditions).with_only_columns(func.count())).scalar_one()

    ids = connection.execute(chosen.where(is_judged, ~has_none).order_by(image.inspection_id.desc())).scalars().all()
    return StoredImages(ids, count(is_judged, has_none), count(~is_judged))


def read_stored_images(connection: Connection, ids: Sequence[int]) -> list[Row]:
    """Return the images of `ids` whose picture is still there, newest first.

    `verdict` and `defect` are the line's, `final_verdict` is the newest `reviewer`'s if there is one. `answers` say
    what answered then, step by step.
    """
    image, columns = inspections.c, IMAGES.columns
    names = ("inspection_id", "board_type", "serial", "component", "designator", "rules_version")
    query = (
        select(*(columns[name] for name in names), image.image_path, image.image_sha256, image.verdict, image.defect)
        .add_columns(image.reason, reviews.c.reviewer, reviews.c.verdict.label("final_verdict"))
        .select_from(IMAGES.tables)
        .where(image.inspection_id.in_(ids), image.image_path.is_not(None))
        .order_by(image.inspection_id.desc())
    )
    answers, key = by_inspection(connection, stages, ids), ("expert", "expert_version", "expert_settings")
    return [
        {**row, "answers": [tuple(answer[name] for name in key) for answer in answers[row["inspection_id"]]]}
        for row in connection.execute(query).mappings()
    ]


def read_defect(connection: Connection, inspection_id: int) -> str | None:
    """Return the defect that the line itself found on an image that it failed."""
    image = inspections.c
    query = select(image.defect).where(image.inspection_id == inspection_id, image.verdict == "fail")
    return connection.execute(query).scalar()


def is_defect_used(connection: Connection, code: str) -> bool:
    """Return True if the line or a person has given this defect before."""
    return any(
        connection.execute(select(table.c.defect).where(table.c.defect == code).limit(1)).first() is not None
        for table in (reviews, inspections)
    )


def newest_attempt(connection: Connection, serial: str, board_type: str | None = None) -> int:
    """Return its `board_id`. Raises CommandError."""
    return _attempts(connection, serial, board_type)[-1]["board_id"]


def last_attempt(connection: Connection, board_type: str, serial: str) -> int:
    query = select(func.max(boards.c.attempt)).where(boards.c.board_type == board_type, boards.c.serial == serial)
    return connection.execute(query).scalar() or 0


# Boards with all of their rows: `coserve export`


@dataclass(frozen=True, slots=True)
class BoardSelection:
    """Boards by lot, serial and type, and by the time they closed (open boards: by when they were first seen)."""

    lots: Sequence[str] = ()
    serials: Sequence[str] = ()
    board_types: Sequence[str] = ()
    since: str | None = None
    until: str | None = None

    def condition(self) -> ColumnElement[bool]:
        lists = ((boards.c.lot, self.lots), (boards.c.board_type, self.board_types))
        parts = [column.in_(values) for column, values in lists if values]
        parts += [has_serial(*self.serials)] if self.serials else []
        at = func.coalesce(boards.c.completed_at, boards.c.first_seen_at)
        parts += [at >= self.since] if self.since else []
        parts += [at < self.until] if self.until else []
        return and_(true(), *parts)

    def queries(self, is_chosen: ColumnElement[bool] | None = None) -> "dict[str, Select[Any]]":
        """Return a query for each table of a package, rows in the order of their keys, and for `pending` tasks.

        With `is_chosen` its boards are those of that condition.
        """
        is_chosen = self.condition() if is_chosen is None else is_chosen
        board_ids = select(boards.c.board_id).where(is_chosen)
        on_boards = inspections.c.board_id.in_(board_ids)
        image_ids = select(inspections.c.inspection_id).where(on_boards)
        on_images = stages.c.inspection_id.in_(image_ids)
        versions = select(stages.c.expert, stages.c.expert_version).where(on_images)
        settings = select(stages.c.expert, stages.c.expert_settings).where(on_images)
        rules = (
            select(boards.c.rules_version).where(is_chosen).union(select(inspections.c.rules_version).where(on_boards))
        )
        is_decided = reviews.c.inspection_id.in_(image_ids) | reviews.c.board_id.in_(board_ids)
        conditions = {
            boards: is_chosen,
            inspections: on_boards,
            **{table: table.c.inspection_id.in_(image_ids) for table in (stages, detections, pending)},
            reviews: is_decided,
            drawn_boxes: drawn_boxes.c.review_id.in_(select(reviews.c.review_id).where(is_decided)),
            generations: generations.c.board_id.in_(board_ids),
            rules_versions: rules_versions.c.rules_version.in_(rules),
            recipes: recipes.c.rules_version.in_(rules),
            editions: editions.c.edition.in_(select(boards.c.edition).where(is_chosen)),
            expert_versions: tuple_(expert_versions.c.expert, expert_versions.c.expert_version).in_(versions),
            expert_settings: tuple_(expert_settings.c.expert, expert_settings.c.expert_settings).in_(settings),
            **dict.fromkeys((changes, runs), true()),  # all: few, and they tell what was in force when
        }
        queries = {
            table.name: select(table).where(condition).order_by(*table.primary_key.columns)
            for table, condition in conditions.items()
        }
        names = ("inspection_id", "verdict", "defect", "decided_by")
        queries["final_verdicts"] = (
            select(*(IMAGES.columns[name].label(name) for name in names))
            .select_from(IMAGES.tables)
            .where(IMAGES.is_finished, on_boards)
            .order_by(inspections.c.inspection_id)
        )
        return queries


def read_position(connection: Connection) -> tuple[int, str | None]:
    row = connection.execute(select(stream_position.c.last_seq, stream_position.c.epoch)).first()
    return (0, None) if row is None else (row.last_seq, row.epoch)
