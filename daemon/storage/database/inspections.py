"""Inspections as rows: accepted images with the attempts that open with them, verdicts with the boards they close."""

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import structlog
from sqlalchemy import Connection, Select, delete, exists, select, update

from daemon.config.settings import Guards
from daemon.line.served import Served
from daemon.line.serving import Serving
from daemon.records import (
    ExpertVersion,
    Image,
    JournalKey,
    Refused,
    Stage,
    Verdict,
    WriteFailed,
    attributes_fit,
    attributes_text,
)
from daemon.storage.database import rows
from daemon.storage.database.boards import (
    Attempt,
    BoardAttempts,
    ClosingReason,
    Fate,
    RepeatedPictures,
    folded,
    positions_text,
)
from daemon.storage.database.connections import Prepared, among
from daemon.storage.database.reviews import withdraw_release
from daemon.storage.database.rows import ImageCopy, Row, WrittenResults
from daemon.storage.database.schema import (
    boards,
    detections,
    editions,
    expert_settings,
    expert_versions,
    inspections,
    pending,
    recipes,
    reviews,
    rules_versions,
    stages,
)
from daemon.storage.database.transaction import Transaction
from daemon.units import wall_seconds
from routing_rules.routes import Routes, VerdictName

#: With this many images that changed nothing about their attempt, its serial belongs to no single board.
_MUCH_SURPLUS = 1000
#: Attempts that one transaction closes: after a downtime any number are due, and images wait for a transaction.
_CLOSED_AT_ONCE = 256
_RENEW_S = 60.0
#: Kept passes among which the newest of each component are looked for.
_MAX_PASSES = 10_000
VersionOf = Callable[[str, str], ExpertVersion | None]

#: Serials of scanners that read nothing, in lower case; so are those without a letter or digit, such as `???`.
_SCANNER_DEFAULTS = {"noread", "no read", "no_read", "no-read", "error", "err", "null", "none", "nan", "unknown", "0"}
_RESULT = ("status", "completed_at", "verdict", "defect", "reason", "late", "latency_ms", "seq", "surplus", "run_id")
_LISTS = ("failed", "missing", "review", "unknown")
_BOARD_IN_MESSAGE = ("board_type", "serial", "attempt", "rules_version", "edition")
_CLOSING = ("completed_at", "inspected", "verdict", "reason", "seq", "run_id", *_LISTS)


def accept_images(
    tx: Transaction, group: Sequence[tuple[Image, JournalKey]], serving: Serving, pictures: RepeatedPictures
) -> list[Image | Refused | WriteFailed]:
    """Add rows for images whose bytes are durable; return each as accepted. Attempts may open with them.

    The edition in which its attempt began may refuse an image, as may a closed attempt that its publisher named.
    """
    answers: list[Image | Refused | WriteFailed] = []
    new_boards: list[Row] = []
    new_images: list[Row] = []
    new_pending: list[Row] = []
    described: dict[int, Row] = {}
    for sent, key in group:
        assigned = _assign(tx, sent, serving, pictures.guards, new_boards, described)
        if isinstance(assigned, Refused | WriteFailed):
            answers.append(assigned)
            continue
        board, fate = assigned
        image = replace(
            sent,
            inspection_id=tx.next_inspection_id(),
            board_id=board["board_id"],
            attempt=board["attempt"],
            edition=board["edition"],
            late=fate in {"late", "repeats"},
            repeats=fate == "repeats",
            guard="repeated_picture" if pictures.note(sent) else None,
            key=key,
            accepted_s=tx.now_s,
        )
        answers.append(image)
        new_images.append(rows.inspection_row(image, board["rules_version"], tx.at))
        new_pending.append(rows.pending_row(image))
        tx.segments[key.segment] += 1
    tx.add(boards, new_boards)
    for row in new_boards:
        described.pop(row["board_id"], None)
    tx.change(boards, ("attributes",), list(described.values()))
    tx.add(inspections, new_images)
    tx.add(pending, new_pending)
    return answers


def _assign(
    tx: Transaction, image: Image, serving: Serving, guards: Guards, new_boards: list[Row], described: dict[int, Row]
) -> tuple[Row, Fate] | Refused | WriteFailed:
    board = tx.board(image.board.type, image.board.serial)
    number, fate = board.choose(tx.sql, image, guards, tx.now_wall_s)
    found = board.get(tx.sql, number)
    served: Served | None = serving.current if found is None else serving.served.get(found[1]["edition"])
    if served is not None and (problem := served.routes.refusal(image.board.type, image.component, image.designator)):
        return Refused(*problem)
    if fate == "refused":
        told = f"attempt {number} of {image.board.serial!a} is closed and takes no other picture of this position"
        return Refused("attempt_closed", f"{told}: name another attempt (its newest is {board.newest})")
    if found is None:
        new_boards.append(_open(tx, board, image, serving.current, number))
        if image.board.attempt is None and number == _attempts_told(image.board.serial):
            tx.suspect_serials.append((image.board.serial, number, image.source))
    attempt, row = tx.attempt(image.board.type, image.board.serial, number)
    limit_s = None if attempt.closed or not tx.has_overdue else attempt.recipe.time_limit_s
    if limit_s is not None and wall_seconds(row["first_seen_at"]) + limit_s <= tx.now_wall_s:
        return WriteFailed("the time limit of its board has passed, and the board closes in a moment")
    attempt.count_image(image.component, image.designator)
    if fate == "repeats":
        attempt.settled_at = tx.at
    if image.board.attributes and fate == "in time" and _describe(attempt, row, image):
        described[row["board_id"]] = row
    return row, fate


def _describe(attempt: Attempt, row: Row, image: Image) -> bool:
    """Add new attributes within the bounds to an open attempt: an image is worth more than its labels."""
    known: dict[str, str] = json.loads(row["attributes"] or "{}")
    before, ignored = len(known), list[str]()
    for name, text in image.board.attributes:
        if name in known:
            continue
        if attributes_fit({**known, name: text}):
            known[name] = text
        else:
            ignored.append(name)
    if ignored and not attempt.has_ignored_attributes:
        attempt.has_ignored_attributes = True
        log = structlog.get_logger("database")
        log.warning("attributes_ignored", serial=row["serial"], attempt=row["attempt"], names=ignored)
    if len(known) == before:
        return False
    row["attributes"] = attributes_text(known)
    return True


def _attempts_told(serial: str) -> int:
    """Return the attempt that shows that `serial` belongs to no single board: each number opens once."""
    is_default = not any(map(str.isalnum, serial)) or folded(serial) in _SCANNER_DEFAULTS
    return 20 if is_default else 1000


def _open(tx: Transaction, board: BoardAttempts, image: Image, served: Served, number: int) -> Row:
    routes, recipe = served.routes, served.routes.recipes[image.board.type]
    keep_rules(tx, routes)
    tx.add_once(editions, {"edition": served.number}, lambda: rows.edition_row(served.edition))
    key = {"rules_version": routes.version, "board_type": image.board.type}
    values = {"time_limit_s": recipe.time_limit_s, "positions": positions_text(recipe)}
    tx.add_once(recipes, key, lambda: key | values)
    row: Row = {
        "board_id": tx.next_board_id(),
        "board_type": image.board.type,
        "serial": image.board.serial,
        "attempt": number,
        "lot": image.board.lot,
        "station": image.board.station,
        "first_seen_at": tx.at,
        "expected": recipe.expected,
        "inspected": 0,
        "rules_version": routes.version,
        "edition": served.number,
        **dict.fromkeys(("completed_at", "verdict", "reason", "seq", "run_id", *_LISTS, "attributes")),
    }
    board.add(row, recipe)
    if recipe.time_limit_s is not None:
        tx.due_added.append((tx.now_s + recipe.time_limit_s, image.board.type, image.board.serial, number))
    return row


def keep_rules(tx: Transaction, routes: Routes) -> None:
    row = {"rules_version": routes.version, "sha256": routes.sha256, "loaded_at": tx.at, "text": routes.text}
    tx.add_once(rules_versions, {"rules_version": routes.version}, lambda: row)


def newest_passes(connection: Connection, count: int) -> dict[str, list[int]]:
    table = inspections.c
    query = select(table.component, table.inspection_id).where(table.verdict == "pass", table.image_path.is_not(None))
    newest: defaultdict[str, list[int]] = defaultdict(list)
    for component, inspection_id in connection.execute(query.order_by(table.inspection_id.desc()).limit(_MAX_PASSES)):
        if len(newest[component]) < count:
            newest[component].insert(0, inspection_id)
    return dict(newest)


class GoodExamples:
    """The newest `count` passes of each component, whose pictures are kept to compare with; none if that is 0.

    Chosen at their verdict, in the writer's thread. Copying every pass would cost the line more than they are worth: a
    component's examples are renewed once a minute at most. Only what was kept as an example goes for a newer one:
    passes that an earlier `retention.keep` kept stay as long as the other settings say. Apart from these, the share
    `sample` of all passes is kept to train with, chosen by the bytes of the image, and stays as those do.
    """

    def __init__(self, connection: Connection, count: int, sample: float = 0.0) -> None:
        self._count, self._sample = count, sample
        self._ids: dict[str, list[int]] = newest_passes(connection, count) if count else {}
        self._renewed_s: dict[str, float] = {}

    def _is_sampled(self, sha256: str) -> bool:
        return int(sha256[:12], 16) < self._sample * 16**12

    def choose(self, component: str, inspection_id: int, sha256: str, now_s: float) -> bool:
        """Return True to keep the picture of this pass: sampled, or some are missing, or the newest is a minute old."""
        if self._is_sampled(sha256):
            return True
        ids = self._ids.get(component, [])
        is_due = len(ids) < self._count or now_s - self._renewed_s.get(component, -_RENEW_S) >= _RENEW_S
        if not self._count or not is_due:
            return False
        self._ids[component] = [*ids, inspection_id]
        self._renewed_s[component] = now_s
        return True

    @property
    def are_too_many(self) -> bool:
        return any(len(ids) > self._count for ids in self._ids.values())

    def drop(self, tx: Transaction) -> list[str]:
        """Forget the pictures beyond `count`, and return their paths. One that a person reviewed stays, as evidence."""
        extra = [(one, ids) for ids in self._ids.values() for one in ids[: -self._count]]
        table = inspections.c
        is_waiting = exists().where(pending.c.inspection_id == table.inspection_id)
        is_reviewed = exists().where(reviews.c.inspection_id == table.inspection_id)
        query = select(table.inspection_id, table.image_path, is_waiting, is_reviewed, table.image_sha256)
        query = query.where(table.inspection_id.in_([one for one, _ in extra]))
        rows = {row[0]: row for row in tx.connection.execute(query)}
        paths: dict[int, str] = {}
        for one, ids in extra:
            _, path, waits, reviewed, sha256 = rows.get(one, (one, None, False, False, "f" * 64))
            if waits:
                continue  # its copy is under way: next time
            ids.remove(one)
            if path is not None and not reviewed and not self._is_sampled(sha256):
                paths[one] = path
        tx.connection.execute(update(inspections).where(table.inspection_id.in_(paths)).values(image_path=None))
        return list(paths.values())


class ResultsBatch:
    """The results of one transaction, collected row by row and written table by table."""

    def __init__(
        self,
        tx: Transaction,
        keep: frozenset[VerdictName],
        examples: GoodExamples,
        version_of: VersionOf,
        run_id: int | None = None,
    ) -> None:
        self._tx = tx
        self._run_id = run_id
        self._keep = keep
        self._examples = examples
        self._version_of = version_of
        self._inspections: list[Row] = []
        self._boards: dict[int, tuple[Attempt, Row]] = {}
        self._stages: list[Row] = []
        self._detections: list[Row] = []
        self._to_keep: list[int] = []
        self._to_drop: list[int] = []
        #: By attempt, the first late image that is not `pass`.
        self._late: dict[int, Verdict] = {}
        self.written = WrittenResults()

    def judge(self, verdicts: Sequence[Verdict]) -> None:
        """Finish images, each once: one that is finished already, or unknown, stays as it is."""
        for verdict in verdicts:
            inspection_id = verdict.image.inspection_id
            if inspection_id in self._tx.memory.waiting and inspection_id not in self._tx.finished:
                self._finish(verdict)

    def close_due(self) -> None:
        for board_type, serial, number in self._tx.take_due(_CLOSED_AT_ONCE):
            found = self._tx.board(board_type, serial).get(self._tx.sql, number)
            if found is not None and not found[0].closed:
                self._close(*found, "time_limit")

    def note_copies(self, copies: Iterable[ImageCopy]) -> None:
        """Note durable copies in `images/`: the journal's bytes may go."""
        paths = {copy.inspection_id: copy.image_path for copy in copies}
        if not paths:
            return
        for inspection_id, segment in _COPIED(self._tx.sql, ids=json.dumps(list(paths))):
            self._drop(inspection_id, segment)
        copied = [{"inspection_id": key, "image_path": path} for key, path in paths.items() if path]
        self._tx.change(inspections, ("image_path",), copied)

    def flush(self) -> None:
        tx = self._tx
        tx.change(inspections, _RESULT, self._inspections)
        tx.add(stages, self._stages)
        tx.add(detections, self._detections)
        for attempt, row in self._boards.values():
            row["inspected"] = row["inspected"] if attempt.closed else attempt.inspected
        tx.change(boards, _CLOSING, [row for _, row in self._boards.values()])
        for statement, ids in ((_KEEP, self._to_keep), (_DROP, self._to_drop)):
            if ids:
                statement(tx.sql, ids=json.dumps(ids))

    def withdraw_releases(self) -> None:
        """Take back each person's `pass` of a whole attempt that a late image contradicts; after `flush`."""
        for board_id, late in self._late.items():
            image = late.image
            named = f"image {image.inspection_id} ({image.source} {image.image_id}) at {image.designator}"
            message = withdraw_release(self._tx, board_id, f"{named} came late and is {late.verdict}")
            self.written.published += [message] if message is not None else []

    def _finish(self, verdict: Verdict) -> None:
        tx, image = self._tx, verdict.image
        attempt, board_row = tx.attempt(image.board.type, image.board.serial, image.attempt)
        latency_ms = round((tx.now_s - image.accepted_s) * 1000, 3)
        if verdict.verdict != "unknown" and image.deadline_ms is not None and latency_ms > image.deadline_ms:
            # Judged in time, but durable too late, and so published too late.
            verdict = replace(verdict, verdict="unknown", defect=None, reason="deadline")
        end = verdict.verdict, verdict.defect, verdict.reason
        matters = attempt.judge(image.inspection_id, image.component, image.designator, *end) and not image.repeats
        attempt.surplus += image.repeats
        if not matters and attempt.surplus == _MUCH_SURPLUS:
            tx.suspect_serials.append((image.board.serial, attempt.surplus, image.source))
        row = {name: board_row[name] for name in _BOARD_IN_MESSAGE} | rows.sent_row(image)
        row |= {
            "status": "done",
            "completed_at": tx.at,
            "verdict": verdict.verdict,
            "defect": verdict.defect,
            "reason": verdict.reason,
            # Judged after its board's closing, even if accepted before: the board's verdict does not contain it.
            "late": int(image.late or attempt.closed),
            "latency_ms": latency_ms,
            "seq": tx.next_seq(),
            "surplus": None if matters else 1,
            "run_id": self._run_id,
        }
        stage_rows, box_rows = rows.stage_rows(verdict), rows.detection_rows(verdict)
        self._inspections.append(row)
        self._stages += stage_rows
        self._detections += box_rows
        self.written.published.append(replace(rows.inspection_message(row, stage_rows, box_rows), guard=image.guard))
        self.written.done.append((image.source, image.key.length))
        tx.finished.add(image.inspection_id)
        for stage in verdict.stages:
            self._note_expert(stage)
        is_example = verdict.verdict == "pass" and self._examples.choose(
            image.component, image.inspection_id, image.sha256, tx.now_s
        )
        if is_example or verdict.verdict in self._keep:  # the bytes stay in the journal until they are copied
            self._to_keep.append(image.inspection_id)
            self.written.to_copy.append((image, tx.at))
        else:
            self._drop(image.inspection_id, image.key.segment)
        if attempt.closed and verdict.verdict != "pass":
            self._late.setdefault(attempt.board_id, verdict)
        if not attempt.closed:
            self._boards[attempt.board_id] = (attempt, board_row)
            if attempt.is_complete:
                self._close(attempt, board_row, "complete")

    def _drop(self, inspection_id: int, segment: int) -> None:
        self._to_drop.append(inspection_id)
        self._tx.segments[segment] -= 1
        self.written.freed_journal = True

    def _close(self, attempt: Attempt, row: Row, reason: ClosingReason) -> None:
        closing = attempt.closing(reason)
        attempt.closed, attempt.settled_at = True, self._tx.at
        closing |= {name: json.dumps(closing[name], ensure_ascii=False) for name in _LISTS}
        row |= {"completed_at": self._tx.at, "seq": self._tx.next_seq(), "run_id": self._run_id, **closing}
        self._boards[attempt.board_id] = (attempt, row)
        self.written.published.append(rows.board_message(row))

    def _note_expert(self, stage: Stage) -> None:
        def row() -> Row | None:
            version = self._version_of(stage.expert, stage.expert_version)
            if version is None:
                return None
            classes = json.dumps(version.classes, ensure_ascii=False)
            return asdict(version) | {"classes": classes, "first_used_at": self._tx.at}

        self._tx.add_once(expert_versions, {"expert": stage.expert, "expert_version": stage.expert_version}, row)
        key = {"expert": stage.expert, "expert_settings": stage.expert_settings}
        first_use = {"settings": stage.settings, "first_used_at": self._tx.at}
        self._tx.add_once(expert_settings, key, lambda: {**key, **first_use})


def pending_images(task: str) -> Select[Any]:
    """Select the images whose bytes are in the journal for `task`, with their board and place, the oldest first."""
    return (
        select(
            inspections,
            *(boards.c.board_type, boards.c.serial, boards.c.attempt),
            *(column for column in pending.c if column.name != "inspection_id"),
        )
        # Outer joins hold the planner to this order: it has no statistics of an empty table, and would read every
        # image that was ever stored.
        .outerjoin_from(pending, inspections, pending.c.inspection_id == inspections.c.inspection_id)
        .outerjoin(boards, boards.c.board_id == inspections.c.board_id)
        .where(pending.c.task == task)
        .order_by(pending.c.inspection_id)
    )


def editions_in_use(connection: Connection) -> dict[int, str]:
    """Return number and sha256 of the editions of open attempts and unjudged images, but those that were ended."""
    # Open attempts are those without `completed_at`, which has an index.
    still_open = select(boards.c.edition).where(boards.c.completed_at.is_(None))
    waiting = pending_images("judge").with_only_columns(inspections.c.edition).order_by(None)
    numbers = set(connection.execute(still_open.union(waiting)).scalars())
    known = select(editions.c.edition, editions.c.sha256).where(editions.c.ended_at.is_(None))
    return {number: sha256 for number, sha256 in connection.execute(known) if number in numbers}


def end_editions(tx: Transaction, numbers: Collection[int]) -> None:
    tx.connection.execute(update(editions).where(editions.c.edition.in_(numbers)).values(ended_at=tx.at))


_COPIED = Prepared(select(pending.c.inspection_id, pending.c.segment).where(among(pending.c.inspection_id)))
_KEEP = Prepared(update(pending).where(among(pending.c.inspection_id)).values(task="keep"))
_DROP = Prepared(delete(pending).where(among(pending.c.inspection_id)))
