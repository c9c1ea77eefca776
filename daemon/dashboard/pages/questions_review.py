"""Queries of the page Review. Which images wait for a decision is `storage.database.reviews`' business."""

from typing import Any

from sqlalchemy import Select, and_, case, exists, func, literal, select

from daemon.storage.database.reviews import is_newest, stands, waiting
from daemon.storage.database.schema import boards, detections, inspections, pending, reviews, rules_versions, stages

#: How many of the images that wait the filters are made of, and of the newest fails the codes of defects.
FACETS_OF = 1000
CODES_OF = 5000
#: How many good parts of one component are looked at for the one that is most alike.
REFERENCES = 60

Question = Select[*tuple[Any, ...]]


def image(inspection_id: int) -> Question:
    """One image with its board; `is_copied_later` while its picture is on its way to `images/`."""
    table, board = inspections.c, boards.c
    is_waiting = exists().where(pending.c.inspection_id == table.inspection_id, pending.c.task == "keep")
    return (
        select(
            *(table.inspection_id, table.board_id, table.component, table.designator, table.status, table.verdict),
            *(table.defect, table.reason, table.completed_at, table.image_path, is_waiting.label("is_copied_later")),
            *(board.board_type, board.serial, board.attempt, board.lot, board.station),
        )
        .join_from(inspections, boards, table.board_id == board.board_id)
        .where(table.inspection_id == inspection_id)
    )


def past(inspection_id: int) -> Question:
    """All rows of `reviews` about an image, oldest first."""
    return select(reviews).where(reviews.c.inspection_id == inspection_id).order_by(reviews.c.review_id)


def answers(inspection_id: int) -> Question:
    """What each expert of the chain said."""
    table = stages.c
    query = select(table.step, table.expert, table.expert_version, table.label, table.confidence)
    return query.where(table.inspection_id == inspection_id).order_by(table.step)


def boxes(inspection_id: int) -> Question:
    """What the detectors marked, surest first."""
    query = select(detections).where(detections.c.inspection_id == inspection_id)
    return query.order_by(detections.c.confidence.desc(), detections.c.detection_id)


def good_parts(component: str) -> tuple[Question, Question]:
    """Pictures of this component that are good: by a person's word, and by the line's. Newest first."""
    table, board = inspections.c, boards.c
    columns = (table.inspection_id, table.designator, table.image_path, board.board_type)
    is_shown = and_(table.component == component, table.image_path.is_not(None))
    by_person = (
        select(*columns, literal(1).label("is_reviewed"))
        .select_from(reviews)
        .join(inspections, table.inspection_id == reviews.c.inspection_id)
        .join(boards, board.board_id == table.board_id)
        .where(reviews.c.verdict == "pass", is_newest(), is_shown)
        .order_by(reviews.c.review_id.desc())
    )
    is_reviewed = exists().where(reviews.c.inspection_id == table.inspection_id)
    by_line = (
        select(*columns, literal(0).label("is_reviewed"))
        .select_from(inspections)
        .join(boards, board.board_id == table.board_id)
        .where(table.verdict == "pass", is_shown, ~is_reviewed)
        .order_by(table.completed_at.desc())
    )
    return by_person, by_line


def codes_of_people() -> Question:
    """Codes that people gave, in the order in which each was first given: a number that a hand has learnt stays."""
    table = reviews.c
    first = func.min(table.review_id)
    return select(table.defect, func.count()).where(table.defect.is_not(None)).group_by(table.defect).order_by(first)


def codes_of_line() -> Question:
    """Codes of the newest fails whose pictures are kept."""
    table = inspections.c
    newest = (
        select(table.inspection_id, table.defect)
        .where(table.verdict == "fail", table.image_path.is_not(None))
        .order_by(table.completed_at.desc())
        .limit(CODES_OF)
        .subquery()
    )
    code = newest.c.defect
    return select(code, func.count()).where(code.is_not(None)).group_by(code).order_by(code)


def rules() -> Question:
    """The text of the rules that came into force last."""
    return select(rules_versions.c.text).order_by(rules_versions.c.loaded_at.desc())


def done_since(since: str, reviewer: str) -> Question:
    """Decisions that were not undone, of all and of one reviewer."""
    is_own = reviews.c.reviewer == reviewer
    return select(
        func.count().label("by_all"),
        func.coalesce(func.sum(case((is_own, 1), else_=0)), 0).label("by_one"),
    ).where(reviews.c.at >= since, stands())


def newest_of(reviewer: str, since: str) -> Question:
    """A reviewer's decisions that were not undone, newest first."""
    table = reviews.c
    mine = (table.reviewer == reviewer, table.at >= since, stands())
    return select(table.inspection_id, table.review_id).where(*mine).order_by(table.review_id.desc())


def some_waiting() -> Question:
    """Some that wait, as the database comes to them: what the filters are made of. In order it would read them all."""
    return waiting().order_by(None).limit(FACETS_OF)


def experts_of_waiting() -> Question:
    """Which experts saw those, most frequent first."""
    some = some_waiting().subquery()
    expert = stages.c.expert
    query = select(expert, func.count()).join(some, some.c.inspection_id == stages.c.inspection_id)
    return query.group_by(expert).order_by(func.count().desc(), expert)
