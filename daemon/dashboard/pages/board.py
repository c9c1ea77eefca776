"""The pages Boards (a list and a search) and Board: one attempt at one board, with everything that was found."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from sqlalchemy import Row
from starlette.exceptions import HTTPException

from daemon.dashboard.pages import questions_board as questions
from daemon.dashboard.pages.questions_board import COUNTED, LIST, PART, WHOLE, Component, Search
from daemon.dashboard.site.pictures import WIDTHS, NoPicture, Stored
from daemon.dashboard.site.site import Site

#: SQLite's and PostgreSQL's largest number; one more would be an error of theirs.
MAX_ID = 2**63 - 1
#: Findings that are shown with picture and stages; of a board with more the others are one click away.
_FINDINGS = 24
#: Each holds an unpacked picture, and a core: pages go on meanwhile in threads of their own.
_UNPACKED_AT_ONCE = 1

Id = Annotated[int, Path(ge=0, le=MAX_ID)]
Text = Annotated[str, Query(max_length=128)]
Verdict = Literal["", "pass", "fail", "review", "unknown"]


def router(site: Site) -> APIRouter:
    routes = APIRouter()
    _add_pictures(routes, site)

    @routes.get("/boards")
    def boards(
        request: Request,
        serial: Text = "",
        verdict: Literal["", "pass", "fail", "review", "unknown", "open"] = "",
        board_type: Text = "",
        lot: Text = "",
        before: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
    ) -> Response:
        search = Search(serial.strip(), verdict, board_type.strip(), lot.strip(), before or None)
        found = questions.find_boards(site.database, search)
        if search.serial and not before and _is_one_board(found, search.serial):
            return RedirectResponse(f"/boards/{found[0].board_id}", 303)
        more = found[LIST - 1].board_id if len(found) > LIST else None
        rows = [(board, failures(board)) for board in found[:LIST]]
        return site.page(request, "boards.html", search=search, rows=rows, more=more)

    @routes.get("/boards/{board_id}")
    def board(
        request: Request,
        board_id: Id,
        verdict: Verdict = "",
        after: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
        inspection: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
    ) -> HTMLResponse:
        return _board(site, request, board_id, verdict, after, inspection)

    return routes


def failures(board: Row[Any]) -> list[dict[str, Any]]:
    """The failed positions that a closed board carries: `designator`, `component`, `defect`."""
    return _json_list(board.failed)


def _is_one_board(found: Sequence[Row[Any]], serial: str) -> bool:
    """Whether all that was found are attempts at the one board of this serial: a scanner's user wants that board."""
    return len({(board.board_type, board.serial) for board in found}) == 1 and found[0].serial == serial


def _board(site: Site, request: Request, board_id: int, verdict: str, after: int, inspection: int) -> HTMLResponse:
    board = questions.board(site.database, board_id)
    if board is None:
        raise HTTPException(404, f"There is no board {board_id}: it never was, or was pruned with its results.")
    counts = questions.counts(site.database, board_id)
    total = sum(counts.values())
    is_whole = total <= WHOLE
    if is_whole:
        images, more = questions.whole_board(site.database, board_id, verdict), None
    else:
        images = questions.part_of_board(site.database, board_id, verdict, after)
        more = images[PART - 1].inspection_id if len(images) > PART else None
        images = images[:PART]
    shown = questions.components(site.database, images)
    findings = [one for one in shown if one.image.verdict in ("fail", "unknown", "review")]
    chosen = _chosen(site, board_id, inspection)
    return site.page(
        request,
        "board.html",
        board=board,
        attempts=questions.attempts(site.database, board),
        counts=counts,
        total=total,
        is_counted=total <= COUNTED,
        missing=_json_list(board.missing),
        verdict=verdict,
        after=after,
        more=more,
        is_whole=is_whole,
        components=shown,
        findings=[(one, site.pictures.size(one.image.image_path)) for one in findings[:_FINDINGS]],
        more_findings=len(findings[_FINDINGS:]),
        chosen=chosen and (chosen, site.pictures.size(chosen.image.image_path)),
    )


def _chosen(site: Site, board_id: int, inspection: int) -> Component | None:
    image = questions.one_image(site.database, inspection) if inspection else None
    if inspection and (image is None or image.board_id != board_id):
        raise HTTPException(404, f"Board {board_id} has no image {inspection}.")
    return questions.components(site.database, [image])[0] if image is not None else None


def _json_list(value: str | None) -> list[dict[str, Any]]:
    """A stored JSON list; empty where there is none, or where somebody's hand has changed it."""
    try:
        found = json.loads(value or "[]")
    except ValueError:
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _add_pictures(routes: APIRouter, site: Site) -> None:
    unpacking = anyio.CapacityLimiter(_UNPACKED_AT_ONCE)

    @routes.get("/pictures/{inspection_id}")
    async def picture(request: Request, inspection_id: Id, width: Annotated[int, Query()] = 0) -> Response:
        if width not in (0, *WIDTHS):
            raise HTTPException(422, f"width: expected {' or '.join(map(str, WIDTHS))}, or none for the whole picture")
        stored = await anyio.to_thread.run_sync(_stored, site, inspection_id)
        try:
            if request.headers.get("if-none-match") == stored.etag(width):
                stored.close()
                return Response(status_code=304, headers=_headers(stored.etag(width)))
            limiter = unpacking if width or stored.is_converted else None
            picture = await anyio.to_thread.run_sync(stored.picture, width, limiter=limiter)
        except NoPicture as error:
            raise _not_shown(inspection_id, error) from None
        except BaseException:  # who asked has gone while others were served
            stored.close()
            raise
        headers = _headers(picture.etag) | {"Content-Length": str(picture.length_bytes)}
        return StreamingResponse(picture.chunks(), media_type=picture.media_type, headers=headers)


def _stored(site: Site, inspection_id: int) -> Stored:
    found = questions.image_path(site.database, inspection_id)
    if found is None:
        raise HTTPException(404, f"There is no inspection {inspection_id}.")
    if found.image_path is None:
        raise HTTPException(404, f"The picture of inspection {inspection_id} was not kept, or was pruned.")
    try:
        return site.pictures.open(found.image_path)
    except NoPicture as error:
        raise _not_shown(inspection_id, error) from None


def _not_shown(inspection_id: int, error: NoPicture) -> HTTPException:
    return HTTPException(404, f"The picture of inspection {inspection_id} is not shown: {error}.")


def _headers(etag: str) -> dict[str, str]:
    """It is asked for again each time, and mostly answered "unchanged": a pruned one is gone from every screen."""
    return {"Cache-Control": "private, no-cache", "ETag": etag}
