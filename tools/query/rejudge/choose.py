"""Which stored images are judged again: finished ones whose picture is still there, newest first. Read-only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, func, select

from daemon.storage.database.reviews import newest_of_each
from daemon.storage.database.schema import boards, inspections, reviews, stages


@dataclass(frozen=True, slots=True)
class Filter:
    """What a person asked for; None and nothing: everything. `experts`: only images that one of them answered."""

    lot: str | None = None
    since: str | None = None
    component: str | None = None
    verdict: str | None = None
    experts: Sequence[str] = ()
    limit: int = 1000


@dataclass(frozen=True, slots=True)
class Stored:
    """One image with what became of it. `final` is the newest reviewer's verdict where there is a review."""

    inspection_id: int
    board_type: str
    serial: str
    component: str
    designator: str
    verdict: str
    defect: str | None
    rules_version: str
    image_path: str
    image_sha256: str
    reviewer: str | None
    final: str | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """`pruned` and `unjudged`: images of the same time and filter without a picture, and that no expert had judged."""

    images: tuple[Stored, ...]
    pruned: int
    unjudged: int


def choose(connection: Connection, wanted: Filter) -> Chosen:
    """The newest `limit` that match. An image that was `unknown` (no time, no expert) has nothing to compare with."""
    image = inspections.c
    newest = newest_of_each()
    query = (
        select(
            *(image.inspection_id, boards.c.board_type, boards.c.serial, image.component, image.designator),
            *(image.verdict, image.defect, image.rules_version, image.image_path, image.image_sha256),
            *(reviews.c.reviewer, reviews.c.verdict.label("final")),
        )
        .join(boards, boards.c.board_id == image.board_id)
        .outerjoin(newest, newest.c.inspection_id == image.inspection_id)
        .outerjoin(reviews, reviews.c.review_id == newest.c.review_id)
        .where(image.image_path.is_not(None), image.reason.is_(None))
    )
    found = connection.execute(_matching(query, wanted).order_by(image.inspection_id.desc()).limit(wanted.limit))
    images = tuple(Stored(*row) for row in found)
    # Only what is as new as the oldest that was chosen, where there were more than `limit`.
    oldest = images[-1].inspection_id if len(images) == wanted.limit else None

    def count(*conditions: ColumnElement[bool]) -> int:
        query = _matching(select(func.count()).select_from(inspections), wanted).where(*conditions)
        query = query if oldest is None else query.where(image.inspection_id >= oldest)
        return connection.execute(query).scalar() or 0

    pruned = count(image.image_path.is_(None), image.reason.is_(None))
    return Chosen(images, pruned, count(image.reason.is_not(None)))


def _matching(query: Select[*tuple[Any, ...]], wanted: Filter) -> Select[*tuple[Any, ...]]:
    image = inspections.c
    query = query.where(image.status == "done")
    for column, value in (
        (image.lot, wanted.lot),
        (image.component, wanted.component),
        (image.verdict, wanted.verdict),
    ):
        query = query if value is None else query.where(column == value)
    if wanted.since is not None:
        query = query.where(image.completed_at >= wanted.since)
    if wanted.experts:
        answered = select(stages.c.step).where(
            stages.c.inspection_id == image.inspection_id, stages.c.expert.in_(wanted.experts)
        )
        query = query.where(answered.exists())
    return query
