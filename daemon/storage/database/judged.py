"""What became of each expert version's answers: how many it gave, what reviewers made of them, how sure it was.

Questions for whoever lives with experts: `coserve experts`, the dashboard. Each is a statement of its own, so that a
caller with a limit of its own on time and rows can run it its way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, Subquery, and_, case, func, literal, select

from daemon.storage.database.reviews import DAEMON, newest_of_each
from daemon.storage.database.schema import expert_versions, inspections, reviews, stages
from experts.drift import BINS, EDGES, RECENT_ANSWERS

#: Images that a look at recent confidences goes back over at most; of an expert that is rarer, fewer answers are found.
RECENT_IMAGES = 100_000


@dataclass(frozen=True, slots=True)
class Calls:
    """One version of one expert. `verdicts`: images that it answered on their way to a verdict.

    Of those, `reviewed` have a person's decision; `false_calls`: it failed the image and the newest review passes it;
    `escapes`: the image passed and the newest review fails it (counted at every expert of the chain, since each of
    them let it through).
    """

    expert: str
    expert_version: str
    first_used_at: str | None
    verdicts: int
    reviewed: int
    false_calls: int
    escapes: int


def calls_statement(expert: str | None = None, after: int | None = None) -> Select[*tuple[Any, ...]]:
    """The columns of `Calls`, by expert and then by first use; of images after inspection `after` where given.

    It reads every stage: without `after` it takes seconds for a million images.
    """
    here = [stages.c.expert == expert] if expert is not None else []
    here += [stages.c.inspection_id > after] if after is not None else []
    used, reviewed, versions = _used(here), _reviewed(here), expert_versions.c
    return (
        select(
            *(used.c.expert, used.c.expert_version, versions.first_used_at, used.c.verdicts),
            *(func.coalesce(reviewed.c[name], 0).label(name) for name in ("reviewed", "false_calls", "escapes")),
        )
        .select_from(used)
        .outerjoin(
            reviewed, and_(reviewed.c.expert == used.c.expert, reviewed.c.expert_version == used.c.expert_version)
        )
        .outerjoin(
            expert_versions,
            and_(versions.expert == used.c.expert, versions.expert_version == used.c.expert_version),
        )
        .order_by(used.c.expert, versions.first_used_at, used.c.expert_version)
    )


def _used(here: Sequence[ColumnElement[bool]]) -> Subquery:
    """How many images each version answered."""
    version = (stages.c.expert, stages.c.expert_version)
    return select(*version, func.count().label("verdicts")).where(*here).group_by(*version).subquery("used")


def _reviewed(here: Sequence[ColumnElement[bool]]) -> Subquery:
    """What the newest reviews say of the images that each version answered."""
    version = (stages.c.expert, stages.c.expert_version)
    newest, later = newest_of_each(), stages.alias("later")
    is_last = ~(
        select(later.c.step)
        .where(later.c.inspection_id == stages.c.inspection_id, later.c.step > stages.c.step)
        .exists()
    )
    is_false_call = and_(inspections.c.verdict == "fail", reviews.c.verdict == "pass", is_last)
    is_escape = and_(inspections.c.verdict == "pass", reviews.c.verdict == "fail")
    return (
        select(
            *version,
            func.count().label("reviewed"),
            func.sum(case((is_false_call, 1), else_=0)).label("false_calls"),
            func.sum(case((is_escape, 1), else_=0)).label("escapes"),
        )
        .select_from(newest)
        .join(reviews, reviews.c.review_id == newest.c.review_id)
        .join(inspections, inspections.c.inspection_id == newest.c.inspection_id)
        .join(stages, stages.c.inspection_id == newest.c.inspection_id)
        .where(reviews.c.reviewer != DAEMON, *here)
        .group_by(*version)
        .subquery("reviewed")
    )


def calls_by_version(connection: Connection, expert: str | None = None, after: int | None = None) -> list[Calls]:
    """What each version of each expert did, or of `expert`."""
    return [Calls(*row) for row in connection.execute(calls_statement(expert, after))]


def confidences_statement(expert: str | None = None, answers: int = RECENT_ANSWERS) -> Select[*tuple[Any, ...]]:
    """(expert, expert_version, label, bin, count) of each version's newest `answers`, in the newest `RECENT_IMAGES`.

    A picture that came more than once counts once: a version answers it the same each time, which is no more evidence.
    """
    confidence = stages.c.confidence
    # Steps of a CASE and no arithmetic: databases round a division each in their own way.
    bins = case(*((confidence < edge, number) for number, edge in enumerate(EDGES)), else_=BINS - 1)
    after = select(func.coalesce(func.max(stages.c.inspection_id), 0) - RECENT_IMAGES).scalar_subquery()
    place = func.row_number().over(
        partition_by=(stages.c.expert, stages.c.expert_version), order_by=stages.c.inspection_id.desc()
    )
    kept = (stages.c.inspection_id, stages.c.expert, stages.c.expert_version, stages.c.label)
    found = select(*kept, bins.label("bin"), place.label("place"))
    found = found.where(stages.c.inspection_id > after, confidence.is_not(None), stages.c.label.is_not(None))
    if expert is not None:
        found = found.where(stages.c.expert == expert)
    recent = found.subquery("recent")
    key = (recent.c.expert, recent.c.expert_version, recent.c.label, recent.c.bin)
    # The pictures of the newest answers alone are looked up.
    counted = select(*key, func.count(inspections.c.image_sha256.distinct())).select_from(recent)
    counted = counted.join(inspections, inspections.c.inspection_id == recent.c.inspection_id)
    return counted.where(recent.c.place <= literal(answers)).group_by(*key).order_by(*key)


def recent_confidences(
    connection: Connection, expert: str | None = None, answers: int = RECENT_ANSWERS
) -> dict[tuple[str, str], dict[str, list[int]]]:
    """How sure each (expert, expert_version) was lately: 20 counts by answered label (`experts.drift.compare`)."""
    return by_version(connection.execute(confidences_statement(expert, answers)))


def by_version(rows: Iterable[Row[Any]]) -> dict[tuple[str, str], dict[str, list[int]]]:
    """Rows of `confidences_statement` as 20 counts by answered label, of each (expert, expert_version)."""
    found: dict[tuple[str, str], dict[str, list[int]]] = {}
    for row in rows:
        expert, version, label, number, count = tuple(row)
        found.setdefault((expert, version), {}).setdefault(label, [0] * BINS)[number] = count
    return found
