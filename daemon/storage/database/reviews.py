"""Decisions of people about images and whole attempts: rows of `reviews`, appended and never changed.

The newest row of an image or attempt counts, by `review_id`, which no clock spoils. A decision names the row that its
reviewer saw last, so that none is overruled unseen. Undoing appends the decision before the undone one again, or the
line's own verdict, by `daemon`; the note says what was undone and by whom. A late image that is not `pass` withdraws a
person's `pass` of the whole attempt: a row by `daemon`, whose note names the image.

The second half counts the outcomes of each expert version's answers, for `coserve experts` and the dashboard.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    Subquery,
    and_,
    case,
    exists,
    func,
    insert,
    literal,
    null,
    select,
    update,
)

from daemon.records import Message
from daemon.storage.database.rows import review_message
from daemon.storage.database.schema import (
    FINAL_BOARDS,
    boards,
    drawn_boxes,
    expert_settings,
    expert_versions,
    inspections,
    reviews,
    runs,
    stages,
)
from daemon.storage.database.transaction import Transaction
from daemon.storage.decisions import DAEMON, UNDECIDED, UNDO, Decision
from daemon.wire.control import ControlError
from experts.drift import BINS, EDGES, RECENT_ANSWERS
from experts.spec import digest_of

#: Verdicts of the line that wait for a person's decision.
WAITING = ("review", "fail", "unknown")
#: Recent confidences are taken from the newest images only; of a rare expert fewer answers are among them.
RECENT_IMAGES = 100_000
#: Changes against reviewers: corrections that would no longer be needed, and new ones that would.
EFFECTS = {
    "false_calls_gone": "false calls that would go",
    "escapes_caught": "escapes that would be caught",
    "new_false_calls": "reviewers' passes that would fail",
    "new_escapes": "reviewers' fails that would pass",
}
#: What gave an answer: expert, version, settings.
VersionKey = tuple[str, str, str | None]
_VERSION_KEY = (stages.c.expert, stages.c.expert_version, stages.c.expert_settings)

_OF_BOARD = (boards.c.board_type, boards.c.serial, boards.c.attempt, boards.c.lot, boards.c.station)


@dataclass(frozen=True, slots=True)
class Review:
    """A row of `reviews` about an image or the whole attempt `board_id`: a decision, or the undoing of one."""

    review_id: int
    inspection_id: int | None
    at: str
    reviewer: str
    verdict: str
    defect: str | None
    note: str | None
    board_id: int | None = None
    undo_of: int | None = None
    seq: int | None = None
    board_verdict: str | None = None
    #: The run's epoch in which the image or attempt was finished: with its id it names one, for all time.
    epoch: str | None = None

    @property
    def writer(self) -> str:
        """The person who wrote this row; for an undo not `reviewer`, whose earlier decision stands again."""
        match = UNDO.fullmatch(self.note or "")
        return match[2] if match else self.reviewer

    @property
    def is_open(self) -> bool:
        """True if the image or attempt waits for a decision again after this row."""
        return self.verdict == "review" or (self.note or "").startswith(UNDECIDED)

    @property
    def is_withdrawal(self) -> bool:
        """True if the line itself withdrew a release: earlier decisions no longer count."""
        return self.undo_of is not None and self.reviewer == DAEMON and not (self.note or "").startswith(UNDECIDED)

    def __str__(self) -> str:
        what = f"decided {self.answer}"
        if self.is_withdrawal:
            what = f"withdrew review {self.undo_of} ({self.note})"
        elif self.undo_of is not None:
            waits = "so the image waits" if self.board_id is None else "so its images count again"
            after = waits if self.is_open else f"back to {self.answer}"
            what = f"undid review {self.undo_of}, {after}"
        return f"{self.writer} {what} at {self.at} (review {self.review_id})"

    @property
    def answer(self) -> str:
        return f"{self.verdict} {self.defect}" if self.defect else self.verdict


@dataclass(frozen=True, slots=True)
class WaitingFilter:
    """A choice of waiting images; None matches all."""

    board_type: str | None = None
    lot: str | None = None
    station: str | None = None
    component: str | None = None
    verdict: str | None = None
    defect: str | None = None
    expert: str | None = None


class ReviewRefusedError(ControlError):
    """A decision that was not written."""


def append(tx: Transaction, wanted: Decision) -> tuple[Review, Message | None]:
    """Write the decision and return its row with its message, or the row of an attempt whose answer was lost."""
    subject = _subject(tx.connection, wanted)
    past = history(tx.connection, wanted.inspection_id, wanted.board_id)
    newest = past[-1] if past else None
    if newest is not None and _is_repeated(tx.connection, wanted, past):
        return newest, None
    if wanted.newest != (newest.review_id if newest else None):
        seen = newest or f"{wanted.subject} has no review {wanted.newest}"
        what = f"{wanted.subject} again" if newest else "it again"
        raise ReviewRefusedError("conflict", f"{seen}: look at {what}, then decide")
    if wanted.verdict is None:
        row = _undoing(past, wanted, subject["verdict"], subject["defect"])
    else:
        row = {name: getattr(wanted, name) for name in ("reviewer", "verdict", "defect", "note")}
    review, message = _add_row(tx, wanted, subject, row)
    names = drawn_boxes.c.keys()[1:]
    if boxes := [dict(zip(names, (review.review_id, *box), strict=True)) for box in wanted.boxes]:
        tx.connection.execute(insert(drawn_boxes), boxes)
    return review, message


def withdraw_release(tx: Transaction, board_id: int, note: str) -> Message | None:
    """Take back a person's `pass` of a whole attempt, because of the late image in `note`; None if none stands."""
    past = history(tx.connection, None, board_id)
    if not past or past[-1].reviewer == DAEMON or past[-1].verdict != "pass":
        return None
    row = {"reviewer": DAEMON, "verdict": "review", "note": note, "undo_of": decisions(past)[-1].review_id}
    wanted = Decision(None, DAEMON, past[-1].review_id, "review", board_id=board_id)
    return _add_row(tx, wanted, _subject(tx.connection, wanted), row)[1]


def _add_row(tx: Transaction, wanted: Decision, subject: dict[str, Any], row: dict[str, Any]) -> tuple[Review, Message]:
    row = {"inspection_id": wanted.inspection_id, "board_id": wanted.board_id, "defect": None, **row}
    row |= {"at": tx.at, "epoch": subject["epoch"], "seq": tx.next_seq()}
    row["review_id"] = tx.connection.execute(insert(reviews).returning(reviews.c.review_id), [row]).scalar_one()
    final = select(FINAL_BOARDS.c.verdict).where(FINAL_BOARDS.c.board_id == subject["of_board"])
    row["board_verdict"] = tx.connection.execute(final).scalar()
    changed = update(reviews).where(reviews.c.review_id == row["review_id"])
    tx.connection.execute(changed.values(board_verdict=row["board_verdict"]))
    return Review(**row), review_message({**subject, "undo_of": None, **row})


def messages_after(connection: Connection, seq: int, limit: int) -> list[Message]:
    on_board = boards.c.board_id == func.coalesce(reviews.c.board_id, inspections.c.board_id)
    query = (
        select(reviews, inspections.c.component, inspections.c.designator, *_OF_BOARD)
        .outerjoin(inspections, inspections.c.inspection_id == reviews.c.inspection_id)
        .join(boards, on_board)
        .where(reviews.c.seq > seq)
        .order_by(reviews.c.seq)
        .limit(limit)
    )
    return [review_message(row) for row in connection.execute(query).mappings()]


def history(connection: Connection, inspection_id: int | None, board_id: int | None = None) -> list[Review]:
    is_subject = reviews.c.inspection_id == inspection_id if board_id is None else reviews.c.board_id == board_id
    query = select(reviews).where(is_subject).order_by(reviews.c.review_id)
    return [Review(**row) for row in connection.execute(query).mappings()]


def _subject(connection: Connection, wanted: Decision) -> dict[str, Any]:
    """Return the line's verdict and defect of an image or attempt, with its board. Raises ReviewRefusedError."""
    image = inspections.c
    if wanted.board_id is None:
        query = (
            select(image.component, image.designator, image.verdict, image.defect, runs.c.epoch)
            .join_from(inspections, boards, image.board_id == boards.c.board_id)
            .outerjoin(runs, runs.c.run_id == image.run_id)
            .where(image.inspection_id == wanted.inspection_id)
        )
    else:
        nothing = (null().label(name) for name in ("component", "designator", "defect"))
        query = select(boards.c.verdict, runs.c.epoch, *nothing).where(boards.c.board_id == wanted.board_id)
        query = query.outerjoin_from(boards, runs, runs.c.run_id == boards.c.run_id)
    query = query.add_columns(boards.c.board_id.label("of_board"), *_OF_BOARD)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        code = "unknown_inspection" if wanted.board_id is None else "unknown_board"
        raise ReviewRefusedError(code, f"there is no {wanted.subject}: it never existed, or was pruned")
    if row["verdict"] is None:
        reason = f"{wanted.subject} has no verdict of the line yet: decide when it has"
        raise ReviewRefusedError("not_finished", reason)
    return dict(row)


def decisions(past: list[Review]) -> list[Review]:
    """Return the rows of one subject that decide and were not undone, oldest first: the last one stands."""
    withdrawn = max((at for at, review in enumerate(past, 1) if review.is_withdrawal), default=0)
    past, undone = past[withdrawn:], {review.undo_of for review in past}
    return [review for review in past if review.undo_of is None and review.review_id not in undone]


def is_newest(row: Any = reviews, of: str = "inspection_id") -> ColumnElement[bool]:
    """Return the condition that a row of `reviews` is its image's or attempt's newest: for few, or in their order."""
    later = reviews.alias("later")
    return ~exists().where(later.c[of] == row.c[of], later.c.review_id > row.c.review_id)


def stands() -> ColumnElement[bool]:
    undo = reviews.alias("undo")
    same = (undo.c.inspection_id == reviews.c.inspection_id) | (undo.c.board_id == reviews.c.board_id)
    return reviews.c.undo_of.is_(None) & ~exists().where(same, undo.c.undo_of == reviews.c.review_id)


def counting_boxes(ids: Sequence[int]) -> Select[*tuple[Any, ...]]:
    """Select the drawn boxes that count for these images: those of each image's newest decision that stands.

    Rows have the columns of `drawn_boxes`, and `inspection_id`, `reviewer` and `at` of the decision. An image without
    rows was not marked; with a person's `pass`, it has no defect to mark.
    """
    newest = select(func.max(reviews.c.review_id).label("review_id"))
    newest = newest.where(reviews.c.inspection_id.in_(ids), stands()).group_by(reviews.c.inspection_id).subquery()
    return (
        select(drawn_boxes, reviews.c.inspection_id, reviews.c.reviewer, reviews.c.at)
        .join_from(drawn_boxes, reviews, reviews.c.review_id == drawn_boxes.c.review_id)
        .join(newest, newest.c.review_id == reviews.c.review_id)
        .order_by(reviews.c.inspection_id, drawn_boxes.c.box_id)
    )


def withdrawn_releases(limit: int) -> Select[*tuple[Any, ...]]:
    """Select the late images that withdrew a release and that no person has decided on since, oldest first."""
    image, later = inspections.c, reviews.alias("later")
    late = (image.late == 1, image.verdict != "pass", image.seq < reviews.c.seq)
    newest = select(func.max(image.inspection_id)).where(image.board_id == reviews.c.board_id, *late)
    is_seen = (later.c.board_id == reviews.c.board_id) | (later.c.inspection_id == image.inspection_id)
    return (
        select(image.inspection_id, image.component, image.designator, image.verdict, image.defect, *_OF_BOARD)
        .add_columns(reviews.c.at, reviews.c.note)
        .join_from(reviews, boards, boards.c.board_id == reviews.c.board_id)
        .join(inspections, image.inspection_id == newest.correlate(reviews).scalar_subquery())
        .where(reviews.c.reviewer == DAEMON, reviews.c.verdict == "review", reviews.c.undo_of.is_not(None))
        .where(~reviews.c.note.startswith(UNDECIDED), ~exists().where(is_seen, later.c.review_id > reviews.c.review_id))
        .order_by(reviews.c.review_id)
        .limit(limit)
    )


def newest_of_each() -> Subquery:
    query = select(reviews.c.inspection_id, func.max(reviews.c.review_id).label("review_id"))
    return query.group_by(reviews.c.inspection_id).subquery("newest")


def waiting(which: WaitingFilter | None = None, *, newest_first: bool = False) -> Select[*tuple[Any, ...]]:
    table, board = inspections.c, boards.c
    query = (
        select(
            *(table.inspection_id, table.board_id, table.component, table.designator, table.verdict, table.defect),
            *(table.reason, table.completed_at, table.image_path),
            *(board.board_type, board.serial, board.attempt, board.lot, board.station),
        )
        .join_from(boards, inspections, table.board_id == board.board_id)
        .where(*_where(which or WaitingFilter()))
    )
    order = (board.board_id.desc(), table.inspection_id) if newest_first else (board.board_id, table.inspection_id)
    return query.order_by(*order)


def count_of(query: Select[*tuple[Any, ...]], max_rows: int) -> Select[*tuple[Any, ...]]:
    return select(func.count()).select_from(query.order_by(None).limit(max_rows).subquery())


def _where(which: WaitingFilter) -> list[ColumnElement[bool]]:
    table, board = inspections.c, boards.c
    undecided = table.verdict.in_(WAITING) & ~_is_decided() & ~_is_board_decided()
    where: list[ColumnElement[bool]] = [table.status == "done", undecided | table.inspection_id.in_(_asked_again())]
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
    newest = reviews.alias("newest")
    undecided = newest.c.note.is_not(None) & newest.c.note.like(f"{UNDECIDED}%")
    is_decision = newest.c.verdict != "review", ~undecided, is_newest(newest)
    return exists().where(newest.c.inspection_id == inspections.c.inspection_id, *is_decision)


def _is_board_decided() -> ColumnElement[bool]:
    whole = reviews.alias("whole")
    is_decision = whole.c.reviewer != DAEMON, whole.c.verdict != "review", is_newest(whole, "board_id")
    return exists().where(whole.c.board_id == boards.c.board_id, *is_decision)


def _asked_again() -> Select[*tuple[Any, ...]]:
    """Select the images that a person wants reviewed again, with any verdict."""
    newest = reviews.alias("asked")
    is_image = newest.c.inspection_id.is_not(None)
    return select(newest.c.inspection_id).where(is_image, newest.c.verdict == "review", is_newest(newest))


def _is_repeated(connection: Connection, wanted: Decision, past: list[Review]) -> bool:
    """Return True if the newest row is the wanted one, written right after the one that its reviewer saw."""
    newest, before = past[-1], past[-2].review_id if len(past) > 1 else None
    if newest.writer != wanted.reviewer or before != wanted.newest:
        return False
    if wanted.verdict is None:
        return newest.undo_of is not None
    query = select(drawn_boxes).where(drawn_boxes.c.review_id == newest.review_id).order_by(drawn_boxes.c.box_id)
    decision = (newest.verdict, newest.defect, newest.note, *(tuple(box)[2:] for box in connection.execute(query)))
    return decision == (wanted.verdict, wanted.defect, wanted.note, *wanted.boxes)


def _undoing(past: list[Review], wanted: Decision, verdict: str, defect: str | None) -> dict[str, Any]:
    standing = decisions(past)
    if not standing:
        raise ReviewRefusedError("no_decision", f"{wanted.subject} has no decision: there is nothing to undo")
    note = f"undo of review {standing[-1].review_id} by {wanted.reviewer}"
    if len(standing) == 1:
        row: dict[str, Any] = {"reviewer": DAEMON, "verdict": verdict, "defect": defect, "note": UNDECIDED + note}
    else:
        row = {name: getattr(standing[-2], name) for name in ("reviewer", "verdict", "defect")} | {"note": note}
    return row | {"undo_of": standing[-1].review_id}


@dataclass(frozen=True, slots=True)
class ExpertCalls:
    """One version of one expert with one digest of settings, first used together at `first_used_at`.

    Of the `verdicts` that it took part in `reviewed` have a person's decision. `false_calls`: it failed the image and
    the newest review passes it. `escapes`: the image passed and the newest review fails it, for each expert of the
    chain.
    """

    expert: str
    expert_version: str
    expert_settings: str | None
    first_used_at: str | None
    verdicts: int
    reviewed: int
    false_calls: int
    escapes: int


def calls_statement(expert: str | None = None, after: int | None = None) -> Select[*tuple[Any, ...]]:
    """Select `ExpertCalls` of images after inspection `after`, without which it takes seconds for a million."""
    conditions = [stages.c.expert == expert] if expert is not None else []
    conditions += [stages.c.inspection_id > after] if after is not None else []
    counted = select(*_VERSION_KEY, func.count().label("verdicts")).where(*conditions)
    used, reviewed = counted.group_by(*_VERSION_KEY).subquery("used"), _reviewed(conditions)
    versions, settings = expert_versions.c, expert_settings.c
    at, of_version = func.coalesce(settings.first_used_at, versions.first_used_at), versions.first_used_at
    first_used_at = case((of_version > at, of_version), else_=at).label("first_used_at")
    same = and_(*(reviewed.c[each.name].is_not_distinct_from(used.c[each.name]) for each in _VERSION_KEY))
    return (
        select(
            *(used.c.expert, used.c.expert_version, used.c.expert_settings, first_used_at, used.c.verdicts),
            *(func.coalesce(reviewed.c[name], 0).label(name) for name in ("reviewed", "false_calls", "escapes")),
        )
        .select_from(used)
        .outerjoin(reviewed, same)
        .outerjoin(
            expert_versions, and_(versions.expert == used.c.expert, versions.expert_version == used.c.expert_version)
        )
        .outerjoin(
            expert_settings, and_(settings.expert == used.c.expert, settings.expert_settings == used.c.expert_settings)
        )
        .order_by(used.c.expert, first_used_at, used.c.expert_version, used.c.expert_settings)
    )


def _reviewed(conditions: Sequence[ColumnElement[bool]]) -> Subquery:
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
            *_VERSION_KEY,
            func.count().label("reviewed"),
            func.sum(case((is_false_call, 1), else_=0)).label("false_calls"),
            func.sum(case((is_escape, 1), else_=0)).label("escapes"),
        )
        .select_from(newest)
        .join(reviews, reviews.c.review_id == newest.c.review_id)
        .join(inspections, inspections.c.inspection_id == newest.c.inspection_id)
        .join(stages, stages.c.inspection_id == newest.c.inspection_id)
        .where(reviews.c.reviewer != DAEMON, *conditions)
        .group_by(*_VERSION_KEY)
        .subquery("reviewed")
    )


def calls_by_version(connection: Connection, expert: str | None = None) -> list[ExpertCalls]:
    return [ExpertCalls(*row) for row in connection.execute(calls_statement(expert))]


def answered_settings(connection: Connection) -> dict[tuple[str, str | None], str]:
    """Return the settings that experts answered with, by expert and digest, without changed texts."""
    table = expert_settings.c
    rows = connection.execute(select(table.expert, table.expert_settings, table.settings))
    return {(expert, digest): settings for expert, digest, settings in rows if digest_of(settings) == digest}


def effect_of(old: str, final: str | None, new: str) -> str | None:
    """Return the key of EFFECTS of an image that people gave the verdict `final`, if its `old` one became `new`."""
    if final == "pass" and old == "fail" and new == "pass":
        return "false_calls_gone"
    if final == "fail" and old == "pass" and new in ("fail", "review"):
        return "escapes_caught"
    if final == "pass" and old != "fail" and new == "fail":
        return "new_false_calls"
    if final == "fail" and old != "pass" and new == "pass":
        return "new_escapes"
    return None


def confidences_statement(expert: str | None = None) -> Select[*tuple[Any, ...]]:
    """Count each version's newest answers by label and bin; a repeated picture adds no evidence."""
    confidence = stages.c.confidence
    # A CASE instead of arithmetic: databases differ in how they round a division.
    bins = case(*((confidence < edge, number) for number, edge in enumerate(EDGES)), else_=BINS - 1)
    after = select(func.coalesce(func.max(stages.c.inspection_id), 0) - RECENT_IMAGES).scalar_subquery()
    place = func.row_number().over(partition_by=_VERSION_KEY, order_by=stages.c.inspection_id.desc())
    answered = select(stages.c.inspection_id, *_VERSION_KEY, stages.c.label, bins.label("bin"), place.label("place"))
    answered = answered.where(stages.c.inspection_id > after, confidence.is_not(None), stages.c.label.is_not(None))
    if expert is not None:
        answered = answered.where(stages.c.expert == expert)
    recent = answered.subquery("recent")
    key = (*(recent.c[each.name] for each in _VERSION_KEY), recent.c.label, recent.c.bin)
    # Only the newest answers are joined with their pictures.
    counted = select(*key, func.count(inspections.c.image_sha256.distinct())).select_from(recent)
    counted = counted.join(inspections, inspections.c.inspection_id == recent.c.inspection_id)
    return counted.where(recent.c.place <= literal(RECENT_ANSWERS)).group_by(*key).order_by(*key)


def recent_confidences(connection: Connection, expert: str | None = None) -> dict[VersionKey, dict[str, list[int]]]:
    return by_version(connection.execute(confidences_statement(expert)))


def by_version(rows: Iterable[Row[Any]]) -> dict[VersionKey, dict[str, list[int]]]:
    """Group rows of `confidences_statement`: 20 counts by answered label, for each version with its settings."""
    counts: dict[VersionKey, dict[str, list[int]]] = {}
    for row in rows:
        expert, version, settings, label, number, count = tuple(row)
        counts.setdefault((expert, version, settings), {}).setdefault(label, [0] * BINS)[number] = count
    return counts
