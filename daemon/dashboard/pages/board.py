"""The pages Boards (a list and a search) and Board (one attempt), and the pictures. Every question has a limit."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
from fastapi import APIRouter, Depends, Form, Path, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from sqlalchemy import Row
from starlette.exceptions import HTTPException

from daemon.dashboard.pages.review import REFUSED, REVIEW_TIMEOUT_S, ReviewerCookie, SeenReview, name_of
from daemon.dashboard.site.database import Database
from daemon.dashboard.site.pictures import WIDTHS, NoPicture, PictureSize, StoredPicture
from daemon.dashboard.site.site import Filters, SearchText, Site, Verdict
from daemon.storage.database.boards import serial_range
from daemon.storage.decisions import Decision
from daemon.wire.control import ControlError
from daemon.wire.messages import MAX_INTEGER

#: Boards in one list, and components in one part of a large board.
_LIST_BOARDS = 50
_PART_IMAGES = 100
#: A board of at most this many images is shown whole, the worst first; real ones have some hundreds of components.
_MAX_WHOLE_IMAGES = 400
#: Images of larger boards are not counted exactly.
_MAX_COUNTED_IMAGES = 20_000
#: A serial that matches more boards than this is searched without its index.
_MAX_INDEXED_BOARDS = 1000
_MAX_ATTEMPTS = 50
_MAX_STAGES = 8
_MAX_BOXES = 50
_MAX_REVIEWS = 10
#: Findings shown with picture and stages; the others are one click away.
_MAX_FINDINGS = 24
#: Each picture being unpacked takes memory and a core; other pages go on in threads of their own.
_UNPACKED_AT_ONCE = 1

_WORST_FIRST = ("fail", "unknown", "review", None, "pass")

BOARDS = """
SELECT boards.board_id, boards.board_type, boards.serial, boards.attempt, boards.lot, boards.station, first_seen_at,
       completed_at, expected, inspected, boards.verdict, reason, rules_version, failed, unknown, review, missing,
       attributes
FROM boards
"""
#: The final verdict of closed attempts, and who decided it. Filtered by `board_id`: the view is slow for all boards.
#: `decision` says what a person decided about one image, where the board's verdict is another.
_FINAL = """
SELECT board_id, verdict, decided_by, decided_at, (
    SELECT reviews.verdict || ' for ' || designator FROM inspections JOIN reviews USING (inspection_id)
    WHERE inspections.board_id = final_boards.board_id AND reviewer = decided_by AND at = decided_at
      AND reviews.verdict <> final_boards.verdict
) AS decision FROM final_boards WHERE board_id IN :ids
"""
_COUNT = """
SELECT verdict, count(*) AS number
FROM (SELECT verdict FROM inspections WHERE board_id = :board_id LIMIT :limit) AS counted GROUP BY verdict
"""
_IMAGES = """
SELECT inspection_id, board_id, source, image_id, component, designator, accepted_at, completed_at, verdict, defect,
       reason, late, image_path, latency_ms, rules_version
FROM inspections
"""
_STAGES = """
SELECT inspection_id, step, expert, expert_version, label, confidence, device, batch_size, queued_ms, load_ms, infer_ms
FROM stages WHERE inspection_id IN :ids ORDER BY inspection_id, step
"""
_BOXES = """
SELECT inspection_id, step, label, confidence, x1, y1, x2, y2
FROM detections WHERE inspection_id IN :ids ORDER BY inspection_id, confidence DESC
"""
_DECISIONS = """
SELECT review_id, at, reviewer, verdict, defect, note FROM reviews WHERE board_id = :board_id ORDER BY review_id DESC
"""
_REVIEWS = """
SELECT inspection_id, review_id, at, reviewer, verdict, defect, note
FROM reviews WHERE inspection_id IN :ids ORDER BY inspection_id, review_id DESC
"""

IdInPath = Annotated[int, Path(ge=0, le=MAX_INTEGER)]
IdInQuery = Annotated[int, Query(ge=0, le=MAX_INTEGER)]


@dataclass(frozen=True, slots=True)
class BoardSearch(Filters):
    """The filters in the address; an empty one matches every board. `before` is the last board of the previous list."""

    serial: SearchText = ""
    #: After review.
    verdict: Literal["", "pass", "fail", "review", "unknown", "open"] = ""
    board_type: SearchText = ""
    lot: SearchText = ""
    before: IdInQuery = 0


#: One `image` of a board with the experts' `stages`, `boxes` and `reviews`.
InspectedComponent = Mapping[str, Any]


def router(site: Site) -> APIRouter:
    routes = APIRouter()
    _add_pictures(routes, site)

    @routes.get("/boards")
    def boards(request: Request, search: Annotated[BoardSearch, Depends()]) -> Response:
        matches = find_boards(site.database, search)
        is_one_board = len({(board.board_type, board.serial) for board in matches}) == 1
        if is_one_board and not search.before and matches[0].serial == search.serial:  # a scanned serial
            return RedirectResponse(f"/boards/{matches[0].board_id}", 303)
        more = matches[_LIST_BOARDS - 1].board_id if len(matches) > _LIST_BOARDS else None
        rows = listed(site.database, matches[:_LIST_BOARDS])
        return site.page(request, "boards.html", search=search, rows=rows, more=more)

    @routes.get("/boards/{board_id}")
    def board(
        request: Request,
        board_id: IdInPath,
        verdict: Verdict = "",
        after: IdInQuery = 0,
        inspection: IdInQuery = 0,
        cookie: ReviewerCookie = "",
    ) -> HTMLResponse:
        return _board_page(site, request, board_id, verdict, after, inspection, reviewer=name_of(cookie))

    @routes.post("/boards/{board_id}")
    def decide(
        request: Request,
        board_id: IdInPath,
        verdict: Annotated[str, Form()],
        note: Annotated[str, Form()] = "",
        newest: SeenReview = None,
        cookie: ReviewerCookie = "",
    ) -> Response:
        reviewer, note = name_of(cookie), note.strip()
        fields: dict[str, Any] = {"undo": True} if verdict == "undo" else {"verdict": verdict, "note": note or None}
        fields |= {"board_id": board_id, "reviewer": reviewer or None, "newest": newest}
        try:
            site.ask_daemon("review", timeout_s=REVIEW_TIMEOUT_S, **Decision.from_fields(fields).fields)
        except ControlError as error:
            status = REFUSED.get(error.code, 503)
            refusal = {"problem": error.reason, "note": note, "status_code": status}
            return _board_page(site, request, board_id, "", 0, 0, reviewer=reviewer, **refusal)
        return RedirectResponse(f"/boards/{board_id}", 303)

    return routes


def final_verdicts(database: Database, board_ids: Sequence[int]) -> dict[int, Row[Any]]:
    return {row.board_id: row for row in database.rows(_FINAL, {"ids": list(board_ids)}, limit=len(board_ids) + 1)}


def listed(
    database: Database, boards: Sequence[Row[Any]]
) -> list[tuple[Row[Any], list[dict[str, Any]], Row[Any] | None]]:
    final = final_verdicts(database, [board.board_id for board in boards if board.verdict])  # others may close now
    return [(board, findings_of(board), final.get(board.board_id)) for board in boards]


def findings_of(board: Row[Any]) -> list[dict[str, Any]]:
    """Return the positions of a closed board to look at, worst first; those without a defect have a `why`."""
    found = json_rows(board.failed)
    for name, why in (("unknown", "not judged"), ("missing", "no image"), ("review", "review")):
        found += [{**one, "why": why} for one in json_rows(getattr(board, name))]
    return found


def find_boards(database: Database, search: BoardSearch) -> list[Row[Any]]:
    """Return the boards of one list and one more, newest first. A serial matches by its beginning, in any case."""
    conditions = {
        "verdict": "boards.verdict IS NULL" if search.verdict == "open" else "final_boards.verdict = :verdict",
        "board_type": "boards.board_type = :board_type",
        "lot": "boards.lot = :lot",
        "before": "boards.board_id < :before",
    }
    values: dict[str, Any] = {name: getattr(search, name) for name in conditions if getattr(search, name)}
    where = [conditions[name] for name in values]
    if search.verdict == "open":
        del values["verdict"]
    if search.serial:
        condition, bounds = _serial_condition(database, search.serial)
        where.append(condition)
        values |= bounds
    limit = _LIST_BOARDS + 1
    of_verdict = "JOIN final_boards ON final_boards.board_id = boards.board_id" if "verdict" in values else ""
    sql = f"{BOARDS} {of_verdict} WHERE {' AND '.join(where) or '1 = 1'} ORDER BY boards.board_id DESC LIMIT {limit}"
    return database.rows(sql, values, limit=limit)


def _serial_condition(database: Database, text: str) -> tuple[str, dict[str, Any]]:
    """Match serials by their beginning, by index only if few match: a walk from the newest board finds many sooner."""
    first, behind = serial_range(text)
    within = "lower(boards.serial) >= :first AND lower(boards.serial) < :behind"
    values = {"first": first, "behind": behind}
    limit = _MAX_INDEXED_BOARDS + 1
    matches = database.rows(f"SELECT board_id FROM boards WHERE {within} LIMIT {limit}", values, limit=limit)  # noqa: S608
    if len(matches) < limit:
        return within, values
    return "lower(substr(boards.serial, 1, :length)) = :first", {"first": first, "length": len(text)}


def _board_page(
    site: Site, request: Request, board_id: int, verdict: str, after: int, inspection: int, **shown_beside: Any
) -> HTMLResponse:
    """Render the page; `shown_beside` is the reviewer and, of a refused decision, problem, note and status code."""
    database = site.database
    board = database.first(f"{BOARDS} WHERE board_id = :board_id", board_id=board_id)
    if board is None:
        raise HTTPException(404, f"There is no board {board_id}: it never existed, or was pruned with its results.")
    limit = _MAX_COUNTED_IMAGES + 1
    counts = {row.verdict: row.number for row in database.rows(_COUNT, {"board_id": board_id, "limit": limit}, limit=9)}
    total = sum(counts.values())
    is_whole = total <= _MAX_WHOLE_IMAGES
    part = _MAX_WHOLE_IMAGES if is_whole else _PART_IMAGES
    images = _images(database, board_id, verdict, after, part + 1)
    more = images[part - 1].inspection_id if len(images) > part else None
    images = images[:part]
    if is_whole:
        images.sort(key=lambda row: _WORST_FIRST.index(row.verdict))
    shown = _components(database, images)
    findings = [component for component in shown if component["image"].verdict in ("fail", "unknown", "review")]

    def card(one: InspectedComponent) -> tuple[InspectedComponent, PictureSize | None, str]:
        size = site.pictures.size(one["image"].image_path)
        return one, size, site.rules.reason(board.board_type, one["image"], one["stages"], one["boxes"], size)

    of_board = f"{_IMAGES} WHERE inspection_id = :id AND board_id = :board_id"
    image = database.first(of_board, id=inspection, board_id=board_id) if inspection else None
    if inspection and image is None:
        raise HTTPException(404, f"Board {board_id} has no image {inspection}.")
    of_serial = f"{BOARDS} WHERE board_type = :type AND serial = :serial ORDER BY attempt"
    attempts = database.rows(of_serial, {"type": board.board_type, "serial": board.serial}, limit=_MAX_ATTEMPTS)
    finals = final_verdicts(database, [board_id, *(one.board_id for one in attempts)])
    return site.page(
        request,
        "board.html",
        **{"problem": "", "note": "", **shown_beside},
        board=board,
        attempts=attempts,
        finals=finals,
        final=finals.get(board_id),
        decisions=database.rows(_DECISIONS, {"board_id": board_id}, limit=_MAX_REVIEWS),
        counts=counts,
        total=total,
        is_counted=total <= _MAX_COUNTED_IMAGES,
        missing=json_rows(board.missing),
        attributes=next(iter(json_rows(f"[{board.attributes or '{}'}]")), {}),
        verdict=verdict,
        after=after,
        more=more,
        is_whole=is_whole,
        components=shown,
        with_picture={one["image"].inspection_id for one in shown if site.pictures.size(one["image"].image_path)},
        findings=[card(finding) for finding in findings[:_MAX_FINDINGS]],
        more_findings=len(findings[_MAX_FINDINGS:]),
        chosen=card(*_components(database, [image])) if image is not None else None,
    )


def _images(database: Database, board_id: int, verdict: str, after: int, limit: int) -> list[Row[Any]]:
    of_verdict = "AND verdict = :verdict" if verdict else ""
    sql = f"{_IMAGES} WHERE board_id = :board_id {of_verdict} AND inspection_id > :after ORDER BY inspection_id"
    values: dict[str, Any] = {"board_id": board_id, "after": after} | ({"verdict": verdict} if verdict else {})
    return database.rows(f"{sql} LIMIT {limit}", values, limit=limit)


def _components(database: Database, images: Sequence[Row[Any]]) -> list[InspectedComponent]:
    ids = [image.inspection_id for image in images]
    stages = _by_image(database, _STAGES, ids, _MAX_STAGES)
    boxes = _by_image(database, _BOXES, ids, _MAX_BOXES)
    reviews = _by_image(database, _REVIEWS, ids, _MAX_REVIEWS)
    return [
        {"image": image, "stages": stages[number], "boxes": boxes[number], "reviews": reviews[number]}
        for number, image in zip(ids, images, strict=True)
    ]


def _by_image(database: Database, sql: str, ids: list[int], max_each: int) -> Mapping[int, list[Row[Any]]]:
    grouped: defaultdict[int, list[Row[Any]]] = defaultdict(list)
    for row in database.rows(sql, {"ids": ids}, limit=2 * max_each * len(ids) + 1):
        if len(grouped[row.inspection_id]) < max_each:
            grouped[row.inspection_id].append(row)
    return grouped


def json_rows(value: str | None) -> list[dict[str, Any]]:
    """Return the objects of a stored list; none if it cannot be read."""
    try:
        items = json.loads(value or "[]")
    except ValueError:
        return []
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _add_pictures(routes: APIRouter, site: Site) -> None:
    unpacking = anyio.CapacityLimiter(_UNPACKED_AT_ONCE)

    @routes.get("/pictures/{inspection_id}")
    async def picture(request: Request, inspection_id: IdInPath, width: Annotated[int, Query()] = 0) -> Response:
        if width not in (0, *WIDTHS):
            raise HTTPException(422, f"width: expected {' or '.join(map(str, WIDTHS))}, or none for the whole image")
        try:
            stored = await anyio.to_thread.run_sync(_open_picture, site, inspection_id)
            headers = stored.headers(width)
            if request.headers.get("if-none-match") == headers["ETag"]:
                stored.file.close()
                return Response(status_code=304, headers=headers)
            limiter = unpacking if width or stored.is_converted else None
            try:
                return await anyio.to_thread.run_sync(stored.response, width, limiter=limiter)
            except BaseException:  # also if the client disconnected while it waited for its turn
                stored.file.close()
                raise
        except NoPicture as error:
            raise HTTPException(404, f"The image of inspection {inspection_id} cannot be shown: {error}.") from None


def _open_picture(site: Site, inspection_id: int) -> StoredPicture:
    row = site.database.first("SELECT image_path FROM inspections WHERE inspection_id = :id", id=inspection_id)
    if row is None:
        raise HTTPException(404, f"There is no inspection {inspection_id}.")
    if row.image_path is None:
        raise HTTPException(404, f"The image of inspection {inspection_id} was not kept, or was pruned.")
    return site.pictures.open(row.image_path)
