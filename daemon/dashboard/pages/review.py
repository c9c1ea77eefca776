"""The page Review: images that wait for a person's decision, one at a time, decided by a key.

The page holds the next few images ready. The daemon checks that no other person decided meanwhile. Fragments are
rendered here, so that every text of a publisher is escaped in one place.
"""

import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote

from fastapi import APIRouter, Cookie, Depends, Form, Path, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from pydantic import Json
from sqlalchemy import ColumnElement, Row, Select, and_, case, exists, func, literal, select
from starlette.exceptions import HTTPException

from daemon.dashboard.site.access import safe_path
from daemon.dashboard.site.database import CachedAnswers, TooMuchToCount
from daemon.dashboard.site.pictures import PictureSize
from daemon.dashboard.site.site import Filters, ShortText, Site, Verdict
from daemon.storage.database.reviews import (
    Review,
    WaitingFilter,
    count_of,
    counting_boxes,
    decisions,
    is_newest,
    stands,
    waiting,
)
from daemon.storage.database.schema import boards, detections, inspections, pending, reviews, stages
from daemon.storage.decisions import Decision
from daemon.wire.control import ControlError
from daemon.wire.messages import MAX_INTEGER, NAME

#: Waiting images beyond this are shown as "1000 or more".
_MAX_COUNTED = 1000
_NAME_COOKIE = "coserve_reviewer"
_NAME_COOKIE_S = 365 * 86400
_MAX_ELSEWHERE = 1000
#: The daemon waits a second for its writer, and then answers what it knows.
REVIEW_TIMEOUT_S = 3.0
_GONE = ("unknown_inspection", "unknown_board")
REFUSED = dict.fromkeys(_GONE, 404) | {"conflict": 409, "not_finished": 409, "no_decision": 409, "bad_field": 422}
_CACHE_S = 30.0
#: Codes, filters, and the good parts of each component.
_MAX_CACHED = 1000
_MAX_CODES = 60
_MAX_ROWS = 300
#: How many waiting images give the filters' values, and how many of the newest fails the line's codes.
_FACET_IMAGES = 1000
_CODE_IMAGES = 5000
#: Good parts of one component of which the most similar is chosen.
_GOOD_PARTS = 60
_GOOD_PARTS_TIMEOUT_S = 1.0
#: A page that is silent for this long is closed.
_SHOWN_S = 60.0

#: Only detectors have boxes or answer without a label.
_CLASSES = """
SELECT classes FROM stages JOIN expert_versions USING (expert, expert_version)
WHERE inspection_id = :id
AND (label IS NULL OR step IN (SELECT detections.step FROM detections WHERE detections.inspection_id = :id))
ORDER BY step
"""

ImageId = Annotated[int, Path(ge=1, le=MAX_INTEGER)]
ReviewerCookie = Annotated[str, Cookie(alias=_NAME_COOKIE)]
SeenReview = Annotated[int | None, Form()]
#: The images that a reviewer skipped, the longest ago first: the browser remembers at most 200 (static/review.js).
SkippedIds = Annotated[str, Query(pattern=r"^([0-9]{1,19}(,[0-9]{1,19}){0,199})?$")]
Question = Select[*tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class ReviewFilter(Filters):
    type: ShortText = ""
    lot: ShortText = ""
    station: ShortText = ""
    component: ShortText = ""
    verdict: Verdict = ""
    defect: ShortText = ""
    expert: ShortText = ""
    order: Literal["oldest", "newest"] = "oldest"

    @property
    def waiting(self) -> WaitingFilter:
        fields = {name: value or None for name, value in asdict(self).items() if name not in ("type", "order")}
        return WaitingFilter(board_type=self.type or None, **fields)


_Which = Annotated[ReviewFilter, Depends()]


def router(site: Site) -> APIRouter:
    routes, page = APIRouter(), _ReviewPage(site)
    routes.get("/review")(page.show)
    routes.post("/review/name")(set_name)
    routes.get("/review/next")(page.following)
    routes.get("/review/last")(page.last)
    routes.get("/review/items/{image}")(page.item)
    routes.post("/review/items/{image}")(page.decide)
    routes.post("/review/items/{image}/undo")(page.undo)
    return routes


def set_name(
    reviewer: Annotated[str, Form(max_length=512)],
    next: Annotated[str, Form(max_length=2048)] = "/review",  # noqa: A002
) -> Response:
    reviewer = reviewer.strip()
    if not NAME.fullmatch(reviewer):
        raise HTTPException(422, "your name: 1 to 128 characters without control characters")
    answer = RedirectResponse(safe_path(next), 303)
    answer.set_cookie(_NAME_COOKIE, quote(reviewer), _NAME_COOKIE_S, path="/", httponly=True, samesite="strict")
    return answer


def name_of(cookie: str) -> str:
    try:
        name = unquote(cookie, errors="strict")
    except UnicodeDecodeError:
        return ""
    return name if NAME.fullmatch(name) and name.strip() else ""


class _ReviewPage:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._database = site.database
        self._cache = CachedAnswers(_CACHE_S, _MAX_CACHED)
        self._offers = ReviewOffers()

    def show(
        self,
        request: Request,
        which: _Which,
        image: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None,
        cookie: ReviewerCookie = "",
    ) -> HTMLResponse:
        reviewer = name_of(cookie)
        here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        codes = self._cache.get("codes", self._codes) if reviewer else []
        facets = self._cache.get("facets", self._facets) if reviewer else {}
        return self._site.page(
            *(request, "review.html"),
            reviewer=reviewer,
            here=here,
            which=which,
            image=image,
            codes=codes,
            facets=facets,
            seat=secrets.token_hex(8),
        )

    def following(
        self,
        which: _Which,
        seat: Annotated[str, Query(pattern=r"^[0-9a-f]{16}$")],
        held: Annotated[str, Query(pattern=r"^[0-9,]{0,400}$")] = "",
        skipped: SkippedIds = "",
        count: Annotated[int, Query(ge=0, le=12)] = 4,
        cookie: ReviewerCookie = "",
    ) -> JSONResponse:
        """Return up to `count` more images for the page `seat`, and what is left and done today."""
        query = waiting(which.waiting, newest_first=which.order == "newest")
        here, last = ([int(part) for part in text.split(",") if part] for text in (held, skipped))
        limit = count + len(here) + len(last) + min(len(self._offers), _MAX_ELSEWHERE)  # those may be ranked last
        ids = [row.inspection_id for row in self._database.rows(query.limit(limit), limit=limit)] if count else []
        chosen = map(self._rendered, self._offers.choose(seat, ids, here, last, count))
        items = [item for item in chosen if item is not None]
        left = self._database.number(count_of(query, _MAX_COUNTED))
        is_own = case((reviews.c.reviewer == name_of(cookie), 1), else_=0)
        done_today = select(func.count().label("by_all"), func.coalesce(func.sum(is_own), 0).label("by_one"))
        done_today = done_today.where(reviews.c.at >= self._site.day_began(), stands())
        (done,) = self._database.rows(done_today, limit=1)
        progress = {"done": int(done.by_all), "done_by_you": int(done.by_one)}
        return JSONResponse({"items": items, "left": left, "left_is_least": left >= _MAX_COUNTED} | progress)

    def item(self, image: ImageId) -> JSONResponse:
        item = self._rendered(image)
        if item is None:
            raise HTTPException(404, f"there is no image {image}")
        return JSONResponse(item)

    def last(self, cookie: ReviewerCookie = "") -> JSONResponse:
        table = reviews.c
        is_own = (table.inspection_id.is_not(None), table.reviewer == name_of(cookie), stands())
        newest = select(table.inspection_id, table.review_id).order_by(table.review_id.desc())
        row = self._database.first(newest.where(*is_own, table.at >= self._site.day_began()))
        return JSONResponse({"id": row.inspection_id, "newest": row.review_id} if row is not None else {})

    def decide(
        self,
        image: ImageId,
        verdict: Annotated[str, Form()],
        defect: Annotated[str, Form()] = "",
        note: Annotated[str, Form()] = "",
        boxes: Annotated[Json[Any], Form()] = None,
        newest: SeenReview = None,
        cookie: ReviewerCookie = "",
    ) -> JSONResponse:
        fields = {"defect": self._site.rules.code(defect) if defect else None, "note": note.strip() or None}
        return self._write(image, cookie, newest, verdict=verdict, boxes=boxes, **fields)

    def undo(self, image: ImageId, newest: SeenReview = None, cookie: ReviewerCookie = "") -> JSONResponse:
        return self._write(image, cookie, newest, undo=True)

    def _write(self, image: int, cookie: str, newest: int | None, **fields: Any) -> JSONResponse:
        reviewer = name_of(cookie)
        if not reviewer:
            return _refusal(401, "no_name", "give your name first: reload the page")
        try:
            decision = Decision.from_fields(fields | {"inspection_id": image, "reviewer": reviewer, "newest": newest})
            written = self._site.ask_daemon("review", timeout_s=REVIEW_TIMEOUT_S, **decision.fields)
        except ControlError as error:
            return _refusal(REFUSED.get(error.code, 503), error.code, error.reason)
        return JSONResponse(written)

    def _rendered(self, inspection_id: int) -> dict[str, Any] | None:
        rows, site = self._database.rows, self._site
        image = self._database.first(image_question(inspection_id))
        if image is None:
            return None
        decided = rows(_of_image(reviews, inspection_id, reviews.c.review_id), limit=_MAX_ROWS)
        past = [Review(**row._mapping) for row in decided]
        standing = decisions(past)
        size = site.pictures.size(image.image_path)
        answers = rows(_of_image(stages, inspection_id, stages.c.step), limit=_MAX_ROWS)
        surest_first = (detections.c.confidence.desc(), detections.c.detection_id)
        boxes = rows(_of_image(detections, inspection_id, *surest_first), limit=_MAX_ROWS)
        html = site.render(
            "_review_item.html",
            image=image,
            size=size,
            answers=answers,
            boxes=boxes,
            drawn=rows(counting_boxes([inspection_id]), limit=_MAX_ROWS),
            labels=self._labels(inspection_id),
            past=past,
            standing=standing[-1] if standing else None,
            good_part=self._good_part(image),
            reason=site.rules.reason(image.board_type, image, answers, boxes, size),
        )
        return {"id": inspection_id, "html": html}

    def _facets(self) -> dict[str, list[tuple[str, int]]]:
        some = waiting().order_by(None).limit(_FACET_IMAGES)  # in any order: sorting would read all of them
        rows = self._database.rows(some, limit=_FACET_IMAGES)
        columns = {"type": "board_type", "lot": "lot", "component": "component", "verdict": "verdict"}
        facets: dict[str, list[tuple[str, int]]] = {
            name: Counter(value for row in rows if (value := getattr(row, column)) is not None).most_common(_MAX_ROWS)
            for name, column in columns.items()
        }
        found, expert = some.subquery(), stages.c.expert
        counts = select(expert, func.count()).join(found, found.c.inspection_id == stages.c.inspection_id)
        counts = counts.group_by(expert).order_by(func.count().desc(), expert)
        experts = self._database.rows(counts, limit=_MAX_ROWS)
        return facets | {"expert": [(str(name), int(images)) for name, images in map(tuple, experts)]}

    def _codes(self) -> list[tuple[str, str]]:
        """Return (code, name): the rules' codes in their order, then those that people and the line have used."""
        table, images = reviews.c, inspections.c
        # In the order of first use, so that a code keeps its number.
        of_people = select(table.defect).where(table.defect.is_not(None)).group_by(table.defect)
        of_people = of_people.order_by(func.min(table.review_id))
        newest = select(images.defect).where(images.verdict == "fail", images.image_path.is_not(None))
        newest = newest.order_by(images.completed_at.desc()).limit(_CODE_IMAGES).subquery()
        of_line = select(newest.c.defect).where(newest.c.defect.is_not(None)).distinct().order_by(newest.c.defect)
        codes = dict(self._site.rules.defects())
        for question in (of_people, of_line):
            for (code,) in self._database.rows(question, limit=_MAX_CODES):
                codes.setdefault(code, code)
        return list(codes.items())[:_MAX_CODES]

    def _labels(self, inspection_id: int) -> list[str]:
        """Return labels for boxes: classes of the detectors that answered, else names of the codes."""
        classes = self._database.rows(_CLASSES, {"id": inspection_id}, limit=_MAX_ROWS)
        labels = dict.fromkeys(label for row in classes for label in json.loads(row.classes))
        return list(labels) or [name for _, name in self._cache.get("codes", self._codes)]

    def _good_part(self, image: Row[Any]) -> tuple[Row[Any], PictureSize] | None:
        """Return the most similar good part and its size: of this place and board type, passed by a person, newest."""
        parts = self._cache.get(f"good {image.component}", lambda: self._good_parts(image.component))
        ranked = sorted(
            (part for part in parts if part.inspection_id != image.inspection_id),
            key=lambda part: (part.board_type != image.board_type, part.designator != image.designator),
        )
        for part in ranked[:3]:
            size = self._site.pictures.size(part.image_path)
            if size is not None:
                return part, size
        return None

    def _good_parts(self, component: str) -> list[Row[Any]]:
        """Return good parts with a kept picture, newest first: passed by people, then passed by the line."""
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
        ask = partial(self._database.rows, limit=_GOOD_PARTS, timeout_s=_GOOD_PARTS_TIMEOUT_S)
        try:
            return [*ask(by_person), *ask(by_line)]
        except TooMuchToCount:
            return []  # the page does not wait longer for a comparison


def _refusal(status: int, code: str, reason: str) -> JSONResponse:
    return JSONResponse({"code": code, "reason": reason}, status)


class ReviewOffers:
    """The images on each open page (seat), so that two reviewers seldom get the same. Lost at a restart."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: dict[int, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._shown)

    def choose(
        self, seat: str, waiting: Sequence[int], held: Collection[int], skipped: Sequence[int], count: int
    ) -> list[int]:
        """Return up to `count` more of `waiting`: images on no other page first, then others, then `skipped`."""
        now_s = time.monotonic()
        places = {image: place for place, image in enumerate(skipped)}
        with self._lock:
            shown = {
                image: (other, at_s)
                for image, (other, at_s) in self._shown.items()
                if other != seat and now_s - at_s < _SHOWN_S
            }
            free = [image for image in waiting if image not in held]
            # The sort is stable: ties keep the order of `waiting`.
            free.sort(key=lambda image: (2, places[image]) if image in places else (int(image in shown), 0))
            chosen = free[:count]
            self._shown = dict.fromkeys((*held, *chosen), (seat, now_s)) | shown
            return chosen


# Questions


def image_question(inspection_id: int) -> Question:
    """Select one image with its board; `is_copied_later` while its picture is on its way to `images/`."""
    table, board = inspections.c, boards.c
    is_pending = exists().where(pending.c.inspection_id == table.inspection_id, pending.c.task == "keep")
    return (
        select(
            *(table.inspection_id, table.board_id, table.component, table.designator, table.status, table.verdict),
            *(table.defect, table.reason, table.completed_at, table.image_path, table.rules_version),
            is_pending.label("is_copied_later"),
            *(board.board_type, board.serial, board.attempt, board.lot, board.station),
        )
        .join_from(inspections, boards, table.board_id == board.board_id)
        .where(table.inspection_id == inspection_id)
    )


def _of_image(table: Any, inspection_id: int, *order: ColumnElement[Any]) -> Question:
    return select(table).where(table.c.inspection_id == inspection_id).order_by(*order)
