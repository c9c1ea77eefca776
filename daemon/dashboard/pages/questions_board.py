"""What the pages Boards and Board ask the database. Every question has a limit, whatever a board holds."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Row, bindparam, text

from daemon.dashboard.site.database import Database
from daemon.storage.database.serials import beginning

#: Boards in one list, and components in one part of a large board.
LIST: Final = 50
PART: Final = 100
#: A board up to this size is shown whole, the worst first; real ones have some hundreds of components.
WHOLE: Final = 400
#: Beyond this many images nobody needs the exact number.
COUNTED: Final = 20_000
#: So many boards are found by their serials.
_FEW: Final = 1000
_ATTEMPTS: Final = 50
_STAGES_EACH: Final = 8
_BOXES_EACH: Final = 50
_REVIEWS_EACH: Final = 10

_WORST_FIRST = ("fail", "unknown", "review", None, "pass")

_BOARD = """
SELECT board_id, board_type, serial, attempt, lot, station, first_seen_at, completed_at, expected, inspected, verdict,
       reason, rules_version, failed, missing
FROM boards
"""
_COUNT = """
SELECT verdict, count(*) AS number
FROM (SELECT verdict FROM inspections WHERE board_id = :board_id LIMIT :limit) AS counted GROUP BY verdict
"""
_IMAGES = """
SELECT inspection_id, board_id, source, image_id, component, designator, accepted_at, completed_at, verdict, defect,
       reason, late, image_path, latency_ms
FROM inspections WHERE board_id = :board_id
"""
_STAGES = """
SELECT inspection_id, step, expert, expert_version, label, confidence, device, batch_size, queued_ms, load_ms, infer_ms
FROM stages WHERE inspection_id IN :ids ORDER BY inspection_id, step
"""
_BOXES = """
SELECT inspection_id, step, label, confidence, x1, y1, x2, y2
FROM detections WHERE inspection_id IN :ids ORDER BY inspection_id, confidence DESC
"""
_REVIEWS = """
SELECT inspection_id, review_id, at, reviewer, verdict, defect, note
FROM reviews WHERE inspection_id IN :ids ORDER BY inspection_id, review_id DESC
"""


@dataclass(frozen=True, slots=True)
class Search:
    """What boards are looked for; an empty field asks for nothing. `before` is the last board of the list before."""

    serial: str = ""
    verdict: str = ""
    board_type: str = ""
    lot: str = ""
    before: int | None = None


@dataclass(frozen=True, slots=True)
class Component:
    """One image of a board, with what was found in it."""

    image: Row[Any]
    stages: Sequence[Row[Any]]
    boxes: Sequence[Row[Any]]
    reviews: Sequence[Row[Any]]

    @property
    def verdict(self) -> str | None:
        """The final one: a person's newest decision, else the daemon's."""
        return self.reviews[0].verdict if self.reviews else self.image.verdict


def find_boards(database: Database, search: Search) -> list[Row[Any]]:
    """At most LIST + 1 boards, the newest first. A serial is looked for by its beginning, in either case."""
    asked = {
        "verdict IS NULL" if search.verdict == "open" else "verdict = :verdict": search.verdict,
        "board_type = :board_type": search.board_type,
        "lot = :lot": search.lot,
        "board_id < :before": search.before,
    }
    where = [condition for condition, value in asked.items() if value]
    places: dict[str, Any] = {name: getattr(search, name) for name in ("verdict", "board_type", "lot", "before")}
    if search.serial:
        by_serial, texts = _by_serial(database, search.serial)
        where.append(by_serial)
        places |= texts
    sql = f"{_BOARD} WHERE {' AND '.join(where) or '1 = 1'} ORDER BY board_id DESC LIMIT {LIST + 1}"
    return database.rows(sql, {name: value for name, value in places.items() if f":{name}" in sql}, limit=LIST + 1)


def _by_serial(database: Database, text: str) -> tuple[str, dict[str, Any]]:
    """The condition for serials that begin with `text`, and its values: by the index where it finds few.

    The newest of many are found sooner on the way through all, the newest first; and the index has no other filter.
    """
    first, behind = beginning(text)
    within = "lower(serial) >= :first" + (" AND lower(serial) < :behind" if behind is not None else "")
    places = {"first": first} | ({"behind": behind} if behind is not None else {})
    found = database.rows(f"SELECT board_id FROM boards WHERE {within} LIMIT {_FEW + 1}", places, limit=_FEW + 1)  # noqa: S608
    if len(found) <= _FEW:
        return within, places
    return "lower(substr(serial, 1, :length)) = :first", {"first": first, "length": len(text)}


def board(database: Database, board_id: int) -> Row[Any] | None:
    found = database.rows(f"{_BOARD} WHERE board_id = :board_id", {"board_id": board_id}, limit=1)
    return found[0] if found else None


def attempts(database: Database, of: Row[Any]) -> list[Row[Any]]:
    """Every attempt at this physical board, the first first."""
    sql = f"{_BOARD} WHERE board_type = :board_type AND serial = :serial ORDER BY attempt"
    places = {"board_type": of.board_type, "serial": of.serial}
    return database.rows(sql, places, limit=_ATTEMPTS)


def counts(database: Database, board_id: int) -> Mapping[str | None, int]:
    """Images by verdict, of COUNTED + 1 at the most."""
    rows = database.rows(_COUNT, {"board_id": board_id, "limit": COUNTED + 1}, limit=10)
    return {row.verdict: row.number for row in rows}


def part_of_board(database: Database, board_id: int, verdict: str, after: int) -> list[Row[Any]]:
    """The images behind the inspection `after`, at most PART + 1, in the order in which they came."""
    also = "AND verdict = :verdict" if verdict else ""
    sql = f"{_IMAGES} {also} AND inspection_id > :after ORDER BY inspection_id LIMIT {PART + 1}"
    places: dict[str, Any] = {"board_id": board_id, "after": after} | ({"verdict": verdict} if verdict else {})
    return database.rows(sql, places, limit=PART + 1)


def whole_board(database: Database, board_id: int, verdict: str) -> list[Row[Any]]:
    """Every image of a board of at most WHOLE, the worst first."""
    rows = database.rows(f"{_IMAGES} ORDER BY inspection_id", {"board_id": board_id}, limit=WHOLE)
    chosen = [row for row in rows if not verdict or row.verdict == verdict]
    return sorted(chosen, key=lambda row: _WORST_FIRST.index(row.verdict))


def one_image(database: Database, inspection_id: int) -> Row[Any] | None:
    sql = _IMAGES.replace("board_id = :board_id", "inspection_id = :inspection_id")
    found = database.rows(sql, {"inspection_id": inspection_id}, limit=1)
    return found[0] if found else None


def image_path(database: Database, inspection_id: int) -> Row[Any] | None:
    """Where an image was kept: a row with `image_path`, None where there is no such inspection."""
    sql = "SELECT image_path, status FROM inspections WHERE inspection_id = :inspection_id"
    found = database.rows(sql, {"inspection_id": inspection_id}, limit=1)
    return found[0] if found else None


def components(database: Database, images: Sequence[Row[Any]]) -> list[Component]:
    """The images with their stages, boxes and reviews; of very many boxes, the surest."""
    ids = [image.inspection_id for image in images]
    stages = _by_image(database, _STAGES, ids, _STAGES_EACH)
    boxes = _by_image(database, _BOXES, ids, _BOXES_EACH)
    reviews = _by_image(database, _REVIEWS, ids, _REVIEWS_EACH)
    return [
        Component(image, stages[image.inspection_id], boxes[image.inspection_id], reviews[image.inspection_id])
        for image in images
    ]


def _by_image(database: Database, sql: str, ids: Iterable[int], each: int) -> Mapping[int, list[Row[Any]]]:
    grouped: defaultdict[int, list[Row[Any]]] = defaultdict(list)
    wanted = list(ids)
    if wanted:
        question = text(sql).bindparams(bindparam("ids", expanding=True))
        for row in database.rows(question, {"ids": wanted}, limit=2 * each * len(wanted)):
            if len(grouped[row.inspection_id]) < each:
                grouped[row.inspection_id].append(row)
    return grouped
