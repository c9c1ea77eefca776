"""Everything that the database knows of one inspection, read in one transaction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, select

from daemon.storage.database.schema import (
    boards,
    detections,
    expert_versions,
    inspections,
    reviews,
    rules_versions,
    stages,
)
from daemon.storage.database.serials import has_serial

Row = Mapping[str, Any]
#: Farther away the camera may have been another.
_NEAR = 20_000


@dataclass(frozen=True, slots=True)
class Record:
    """Rows of one inspection. `boxes` are those of each stage, as its expert listed them; `rules` may be gone.

    `others` are further images of the same place of the board, by number.
    """

    inspection: Row
    board: Row
    stages: Sequence[Row]
    boxes: Mapping[int, Sequence[Row]]
    reviews: Sequence[Row]
    rules: Row | None
    versions: Mapping[tuple[str, str], Row]
    others: Sequence[int]


class UnknownInspectionError(Exception):
    """There is no such inspection; the text says how else to ask."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An inspection by its number, by `SOURCE/IMAGE_ID`, or by serial and designator."""

    name: str
    designator: str | None = None
    board_type: str | None = None
    attempt: int | None = None


def read_record(engine: Engine, wanted: Wanted) -> Record:
    """Raises UnknownInspectionError."""
    with engine.connect() as connection:
        found = _find(connection, wanted)
        inspection = _one(connection, select(inspections).where(inspections.c.inspection_id == found[0]))
        assert inspection is not None
        number = inspection["inspection_id"]
        board = _one(connection, select(boards).where(boards.c.board_id == inspection["board_id"]))
        assert board is not None
        answers = _all(connection, select(stages).where(stages.c.inspection_id == number).order_by(stages.c.step))
        boxes: dict[int, list[Row]] = {answer["step"]: [] for answer in answers}
        query = select(detections).where(detections.c.inspection_id == number).order_by(detections.c.detection_id)
        for box in _all(connection, query):
            boxes[box["step"]].append(box)
        return Record(
            inspection=inspection,
            board=board,
            stages=answers,
            boxes=boxes,
            reviews=_all(
                connection, select(reviews).where(reviews.c.inspection_id == number).order_by(reviews.c.review_id)
            ),
            rules=_one(
                connection, select(rules_versions).where(rules_versions.c.rules_version == inspection["rules_version"])
            ),
            versions=_versions(connection, answers),
            others=found[1:],
        )


def _find(connection: Connection, wanted: Wanted) -> list[int]:
    """The inspection that is meant, and behind it others of the same place, newest first."""
    number, name = inspections.c.inspection_id, wanted.name
    if wanted.designator is not None:
        query = (
            select(number, boards.c.board_type)
            .join(boards, boards.c.board_id == inspections.c.board_id)
            .where(has_serial(name), inspections.c.designator == wanted.designator)
            .order_by(boards.c.attempt.desc(), number.desc())
        )
        if wanted.board_type is not None:
            query = query.where(boards.c.board_type == wanted.board_type)
        if wanted.attempt is not None:
            query = query.where(boards.c.attempt == wanted.attempt)
        rows = connection.execute(query).all()
        types = sorted({row.board_type for row in rows})
        if len(types) > 1:
            raise UnknownInspectionError(f"several board types have the serial {name}: add --type {' or '.join(types)}")
        found = [row.inspection_id for row in rows]
    elif "/" in name:
        # Both may have slashes in them.
        parts = name.split("/")
        pairs = [("/".join(parts[:at]), "/".join(parts[at:])) for at in range(1, len(parts))]
        found = [
            row
            for source, image_id in pairs
            for row in connection.execute(
                select(number).where(inspections.c.source == source, inspections.c.image_id == image_id)
            ).scalars()
        ]
    else:
        is_number = name.isdecimal() and len(name) < 19
        found = list(connection.execute(select(number).where(number == int(name))).scalars()) if is_number else []
    if not found and wanted.designator is None and _is_serial(connection, name):
        raise UnknownInspectionError(
            f"{name} is a board, not an image: name the part too, such as `coserve explain {name} R1`"
            f" (`coserve results --serial {name}` lists its parts)"
        )
    if not found:
        shown = name if wanted.designator is None else f"{name} {wanted.designator}"
        raise UnknownInspectionError(
            f"no inspection {shown} in the results: name its inspection_id, SOURCE/IMAGE_ID, or SERIAL DESIGNATOR"
            " (`coserve results --columns inspection_id,serial,designator` lists them)"
        )
    return found


def _is_serial(connection: Connection, name: str) -> bool:
    return connection.execute(select(boards.c.board_id).where(has_serial(name)).limit(1)).scalar() is not None


def _versions(connection: Connection, answers: Sequence[Row]) -> dict[tuple[str, str], Row]:
    found: dict[tuple[str, str], Row] = {}
    for expert, version in {(answer["expert"], answer["expert_version"]) for answer in answers}:
        row = _one(
            connection,
            select(expert_versions).where(
                expert_versions.c.expert == expert, expert_versions.c.expert_version == version
            ),
        )
        if row is not None:
            found[expert, version] = row
    return found


def similar_pictures(engine: Engine, inspection: Row) -> list[str]:
    """Kept pictures of the same camera and component from about that time, newest first; for one that is not kept."""
    number = inspection["inspection_id"]
    near = (
        select(inspections.c.image_path)
        .where(
            inspections.c.inspection_id.between(number - _NEAR, number + _NEAR),
            inspections.c.source == inspection["source"],
            inspections.c.component == inspection["component"],
            inspections.c.image_path.is_not(None),
        )
        .order_by(inspections.c.inspection_id.desc())
        .limit(3)
    )
    with engine.connect() as connection:
        return list(connection.execute(near).scalars())


def _one(connection: Connection, query: Any) -> Row | None:
    row = connection.execute(query).mappings().one_or_none()
    return None if row is None else dict(row)


def _all(connection: Connection, query: Any) -> list[Row]:
    return [dict(row) for row in connection.execute(query).mappings()]
