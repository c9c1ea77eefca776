"""What the page Defects asks of the database: images of boards that closed in a time, with the verdict that counts.

Passes are the most, and nothing is asked about them one by one: they are counted by board and by component, and what
was not passed or was decided by a person comes as a table of its own. That keeps a million images within a second.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, case, func, literal_column, or_, select

from daemon.storage.database.reviews import DAEMON, is_newest
from daemon.storage.database.schema import boards, inspections, reviews

Question = Select[*tuple[Any, ...]]

# Numbers as text: PostgreSQL would not see that a bound one in GROUP BY is the one in SELECT.
_day = func.substr(boards.c.completed_at, literal_column("1"), literal_column("10"))
_newest = (
    select(
        *(reviews.c.inspection_id, reviews.c.review_id, reviews.c.verdict, reviews.c.defect),
        *(reviews.c.reviewer, reviews.c.at, reviews.c.note),
    )
    .where(is_newest(), reviews.c.reviewer != DAEMON)
    .subquery("newest")
)
_is_reviewed = _newest.c.review_id.is_not(None)
#: The verdict that counts: a person's newest, else the line's.
_final = case((_is_reviewed, _newest.c.verdict), else_=inspections.c.verdict)
_final_defect = case((_is_reviewed, _newest.c.defect), else_=inspections.c.defect)


@dataclass(frozen=True, slots=True)
class Span:
    """Boards that closed from `since` to before `until` (UTC text), of a type, a lot, a station; None is all."""

    since: str
    until: str
    board_type: str | None = None
    lot: str | None = None
    station: str | None = None


@dataclass(frozen=True, slots=True)
class Among:
    """Which images of a span are listed. `kind` is `false_call`, `escape` or `reviewed`."""

    final: str | None = None
    component: str | None = None
    defect: str | None = None
    day: str | None = None
    kind: str | None = None


def not_passed(span: Span) -> Question:
    """What is no plain pass, counted by where it is from, what the line said, what a person said, and the defect."""
    columns = (
        *(_day.label("day"), boards.c.lot, boards.c.station, inspections.c.component),
        *(inspections.c.verdict.label("said"), _newest.c.verdict.label("decided"), _final_defect.label("defect")),
    )
    is_plain = (inspections.c.verdict == "pass") & ~_is_reviewed
    is_listed = or_(inspections.c.verdict.is_(None), ~is_plain)
    return _joined(select(*columns, func.count().label("images"))).where(*_within(span), is_listed).group_by(*columns)


def by_board(span: Span) -> Question:
    """All images, counted by their boards' day, lot and station; those not judged yet among them."""
    of_board = select(func.count()).where(inspections.c.board_id == boards.c.board_id).correlate(boards)
    some = (
        select(_day.label("day"), boards.c.lot, boards.c.station, of_board.scalar_subquery().label("images"))
        .where(*_within(span))
        .subquery()
    )
    columns = (some.c.day, some.c.lot, some.c.station)
    query = select(*columns, func.count().label("boards"), func.sum(some.c.images).label("images"))
    return query.group_by(*columns)


def by_component(span: Span) -> Question:
    """All images, counted by component; those not judged yet among them."""
    component = inspections.c.component
    query = select(component, func.count().label("images"))
    return (
        query.select_from(boards)
        .join(inspections, inspections.c.board_id == boards.c.board_id)
        .where(*_within(span))
        .group_by(component)
    )


def images(span: Span, among: Among, before: int | None) -> Question:
    """The images behind a number, newest first, before the one that the page before ended with."""
    query = _joined(
        select(
            *(inspections.c.inspection_id, inspections.c.board_id, boards.c.completed_at, boards.c.board_type),
            *(boards.c.serial, boards.c.attempt, boards.c.lot, boards.c.station, inspections.c.component),
            *(inspections.c.designator, inspections.c.verdict.label("said"), inspections.c.defect.label("said_defect")),
            *(_final.label("final"), _final_defect.label("defect"), _newest.c.reviewer, _newest.c.at, _newest.c.note),
        )
    ).where(*_within(span), inspections.c.status == "done", *_among(among))
    if before is not None:
        query = query.where(inspections.c.inspection_id < before)
    return query.order_by(inspections.c.inspection_id.desc())


def choices() -> dict[str, Question]:
    """By filter, the values that a person may choose. Of all boards that closed: the index on them is read once."""
    columns = {"type": boards.c.board_type, "lot": boards.c.lot, "station": boards.c.station}
    return {
        name: select(column, func.count())
        .where(column.is_not(None), boards.c.completed_at.is_not(None))
        .group_by(column)
        .order_by(func.max(boards.c.board_id).desc())
        for name, column in columns.items()
    }


def _joined(query: Question) -> Question:
    return (
        query.select_from(boards)
        .join(inspections, inspections.c.board_id == boards.c.board_id)
        .join(_newest, _newest.c.inspection_id == inspections.c.inspection_id, isouter=True)
    )


def _within(span: Span) -> list[ColumnElement[bool]]:
    where = [boards.c.completed_at >= span.since, boards.c.completed_at < span.until]
    for column, value in (
        (boards.c.board_type, span.board_type),
        (boards.c.lot, span.lot),
        (boards.c.station, span.station),
    ):
        if value is not None:
            where.append(column == value if value else column.is_(None))
    return where


def _among(among: Among) -> list[ColumnElement[bool]]:
    where: list[ColumnElement[bool]] = []
    for column, value in (
        (_final, among.final),
        (inspections.c.component, among.component),
        (_day, among.day),
    ):
        if value is not None:
            where.append(column == value)
    if among.defect is not None:
        where.append(_final_defect == among.defect if among.defect else _final_defect.is_(None))
    if among.kind == "false_call":
        where += [inspections.c.verdict == "fail", _newest.c.verdict == "pass"]
    elif among.kind == "escape":
        where += [inspections.c.verdict == "pass", _newest.c.verdict == "fail"]
    elif among.kind == "reviewed":
        where.append(_is_reviewed)
    return where
