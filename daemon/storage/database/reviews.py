"""What people decide about images: rows of `reviews`, appended and never changed. The newest row of an image counts.

Whoever decides says which row they saw last, so that nobody overrules a decision unseen. Undoing appends a row as well:
the decision before the one that is undone with the name of whoever made it, or the line's own verdict, by `daemon`,
where there was none. Its note says what was undone and by whom, since the table has no other place for it.
"""

import re
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Subquery,
    Text,
    and_,
    cast,
    exists,
    false,
    func,
    insert,
    or_,
    select,
)

from daemon.storage.database.schema import boards, inspections, reviews, stages
from daemon.storage.database.transaction import Transaction

#: What an image may be waiting with for a person's decision.
WAITING = ("review", "fail", "unknown")

#: Whose decision the line's own verdict is, as in the view `final_verdicts`.
DAEMON = "daemon"

_UNDO = re.compile(r"(?:undecided again: )?undo of review ([0-9]{1,19}) by (.+)")
_UNDECIDED = "undecided again: "


@dataclass(frozen=True, slots=True)
class Review:
    """A row of `reviews`."""

    review_id: int
    inspection_id: int
    at: str
    reviewer: str
    verdict: str
    defect: str | None
    note: str | None

    @property
    def undoes(self) -> int | None:
        """The decision that this row undoes; None where it is a decision itself."""
        found = _UNDO.fullmatch(self.note or "")
        return int(found[1]) if found else None

    @property
    def writer(self) -> str:
        """Who wrote this row: whoever undid something, though the decision that stands then is another's."""
        found = _UNDO.fullmatch(self.note or "")
        return found[2] if found else self.reviewer

    @property
    def is_open(self) -> bool:
        """Whether the image waits for a decision again after this row."""
        return self.verdict == "review" or (self.note or "").startswith(_UNDECIDED)

    def __str__(self) -> str:
        """As a person hears of it."""
        what = f"decided {self.answer}"
        if self.undoes is not None:
            after = "so the image waits" if self.is_open else f"back to {self.answer}"
            what = f"undid review {self.undoes}, {after}"
        return f"{self.writer} {what} at {self.at} (review {self.review_id})"

    @property
    def answer(self) -> str:
        """Verdict and defect."""
        return f"{self.verdict} {self.defect}" if self.defect else self.verdict


@dataclass(frozen=True, slots=True)
class Decision:
    """What a reviewer wants written. `newest` is the last row they saw, None for none; `verdict` None undoes it."""

    inspection_id: int
    reviewer: str
    newest: int | None
    verdict: str | None
    defect: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """Which of the waiting images are meant; None is all."""

    board_type: str | None = None
    lot: str | None = None
    station: str | None = None
    component: str | None = None
    verdict: str | None = None
    defect: str | None = None
    expert: str | None = None


class ReviewRefusedError(Exception):
    """Nothing was written: `code` as the control socket answers it, `reason` for the reviewer."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def is_undo(note: str | None) -> bool:
    """Whether `note` reads as those that undoing writes: nobody else may write such a one."""
    return bool(note and _UNDO.fullmatch(note)) or bool(note and note.startswith(_UNDECIDED))


def append(tx: Transaction, wanted: Decision) -> Review:
    """Write the decision, or find it written already by an attempt whose answer was lost; ReviewRefusedError."""
    table = inspections.c
    image = tx.connection.execute(
        select(table.status, table.verdict, table.defect).where(table.inspection_id == wanted.inspection_id)
    ).one_or_none()
    if image is None:
        raise ReviewRefusedError("unknown_inspection", f"there is no image {wanted.inspection_id}")
    if image.status != "done":
        reason = f"image {wanted.inspection_id} has no verdict of the line yet: decide when it has"
        raise ReviewRefusedError("not_finished", reason)
    past = history(tx.connection, wanted.inspection_id)
    newest = past[-1] if past else None
    if newest is not None and _is_repeated(wanted, newest, past[-2].review_id if len(past) > 1 else None):
        return newest
    if wanted.newest != (newest.review_id if newest else None):
        raise ReviewRefusedError("conflict", _conflict(wanted, newest))
    row: dict[str, Any] = {"inspection_id": wanted.inspection_id, "at": tx.at}
    if wanted.verdict is None:
        row |= _undoing(past, wanted.reviewer, image.verdict, image.defect)
    else:
        fields = ("reviewer", "verdict", "defect", "note")
        row |= {name: getattr(wanted, name) for name in fields}
    review_id = tx.connection.execute(insert(reviews).returning(reviews.c.review_id), [row]).scalar_one()
    return Review(review_id=review_id, **row)


def history(connection: Connection, inspection_id: int) -> list[Review]:
    """All rows of an image, oldest first."""
    query = select(reviews).where(reviews.c.inspection_id == inspection_id).order_by(reviews.c.review_id)
    return [Review(**row) for row in connection.execute(query).mappings()]


def decisions(past: list[Review]) -> list[Review]:
    """Those of an image's rows that decide and were not undone, oldest first: the last one stands."""
    undone = {review.undoes for review in past}
    return [review for review in past if review.undoes is None and review.review_id not in undone]


def is_newest(row: Any = reviews) -> ColumnElement[bool]:
    """Whether a row of `reviews` (or of an alias of it) is its image's newest: for few images, or in their order."""
    later = reviews.alias("later")
    return ~exists().where(later.c.inspection_id == row.c.inspection_id, later.c.review_id > row.c.review_id)


def stands(row: Any = reviews) -> ColumnElement[bool]:
    """Whether a row of `reviews` decides and was not undone."""
    undo = reviews.alias("undo")
    which = "undo of review " + cast(row.c.review_id, Text) + " by %"
    undone = exists().where(
        undo.c.inspection_id == row.c.inspection_id,
        undo.c.review_id > row.c.review_id,
        or_(undo.c.note.like(which), undo.c.note.like(_UNDECIDED + which)),
    )
    is_undo_row = or_(row.c.note.like("undo of review % by %"), row.c.note.like(f"{_UNDECIDED}%"))
    return ~func.coalesce(is_undo_row, false()) & ~undone


def newest_of_each() -> Subquery:
    """(inspection_id, review_id) of every image that has reviews: for a look at all of them, read once."""
    query = select(reviews.c.inspection_id, func.max(reviews.c.review_id).label("review_id"))
    return query.group_by(reviews.c.inspection_id).subquery("newest")


def waiting(which: Waiting | None = None, *, newest_first: bool = False) -> "Select[*tuple[Any, ...]]":
    """Finished images that wait for a person, board after board: the rows of `inspections` with their boards'."""
    table, board = inspections.c, boards.c
    query = (
        select(
            *(table.inspection_id, table.board_id, table.component, table.designator, table.verdict, table.defect),
            *(table.reason, table.completed_at, table.image_path),
            *(board.board_type, board.serial, board.attempt, board.lot, board.station),
        )
        .join_from(boards, inspections, table.board_id == board.board_id)
        .where(*_where(which or Waiting()))
    )
    order = (board.board_id.desc(), table.inspection_id) if newest_first else (board.board_id, table.inspection_id)
    return query.order_by(*order)


def count_of(query: "Select[*tuple[Any, ...]]", most: int) -> "Select[*tuple[Any, ...]]":
    """How many rows `query` has, counted no further than `most`."""
    return select(func.count()).select_from(query.order_by(None).limit(most).subquery())


def _where(which: Waiting) -> list[ColumnElement[bool]]:
    table, board = inspections.c, boards.c
    judged = table.verdict.in_(WAITING) & ~_is_decided()
    where: list[ColumnElement[bool]] = [table.status == "done", judged | table.inspection_id.in_(_asked_again())]
    for column, value in (
        *((board.board_type, which.board_type), (board.lot, which.lot), (board.station, which.station)),
        *((table.component, which.component), (table.verdict, which.verdict), (table.defect, which.defect)),
    ):
        if value is not None:
            where.append(column == value)
    if which.expert is not None:
        answered = and_(stages.c.inspection_id == table.inspection_id, stages.c.expert == which.expert)
        where.append(exists().where(answered))
    return where


def _is_decided() -> ColumnElement[bool]:
    """Whether the newest row of an image of `inspections` is a decision."""
    newest = reviews.alias("newest")
    undecided = newest.c.note.is_not(None) & newest.c.note.like(f"{_UNDECIDED}%")
    return exists().where(
        newest.c.inspection_id == inspections.c.inspection_id,
        newest.c.verdict != "review",
        ~undecided,
        is_newest(newest),
    )


def _asked_again() -> "Select[*tuple[Any, ...]]":
    """Images that somebody wants looked at again, whatever the line said of them."""
    newest = reviews.alias("asked")
    return select(newest.c.inspection_id).where(newest.c.verdict == "review", is_newest(newest))


def _is_repeated(wanted: Decision, newest: Review, before: int | None) -> bool:
    """Whether `newest` is what `wanted` asks for, written right after what its reviewer saw."""
    if newest.writer != wanted.reviewer or before != wanted.newest:
        return False
    if wanted.verdict is None:
        return newest.undoes is not None
    return (newest.verdict, newest.defect, newest.note) == (wanted.verdict, wanted.defect, wanted.note)


def _conflict(wanted: Decision, newest: Review | None) -> str:
    if newest is None:
        return f"image {wanted.inspection_id} has no review {wanted.newest}: look at it again, then decide"
    return f"{newest}: look at image {wanted.inspection_id} again, then decide"


def _undoing(past: list[Review], by: str, verdict: str, defect: str | None) -> dict[str, Any]:
    """The row that takes back the decision that stands."""
    standing = decisions(past)
    if not standing:
        raise ReviewRefusedError("no_decision", "nobody has decided about this image: there is nothing to undo")
    note = f"undo of review {standing[-1].review_id} by {by}"
    if len(standing) == 1:
        return {"reviewer": DAEMON, "verdict": verdict, "defect": defect, "note": _UNDECIDED + note}
    before = standing[-2]
    return {"reviewer": before.reviewer, "verdict": before.verdict, "defect": before.defect, "note": note}
