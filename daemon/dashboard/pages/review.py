"""The page Review: images that wait for a person's decision, one at a time, decided by a key.

The page holds the next few images ready and asks for more; a decision goes to the daemon, which checks that nobody
decided meanwhile. Fragments are rendered here, so that every text of a publisher is escaped in one place.
"""

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote, urlencode

from fastapi import APIRouter, Cookie, Depends, Form, Path, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from pydantic import StringConstraints
from starlette.exceptions import HTTPException

from daemon.dashboard.pages import questions_review as questions
from daemon.dashboard.pages.review_facts import Facts, Item
from daemon.dashboard.pages.review_offers import Offers
from daemon.dashboard.site.access import safe_path
from daemon.dashboard.site.site import Site
from daemon.storage.database.reviews import Waiting, count_of, waiting
from daemon.wire.control import ControlError
from daemon.wire.frames import MAX_INTEGER
from daemon.wire.messages import NAME

#: More are said as "1000 or more": nobody counts a million for a number in a corner.
COUNTED = 1000
_NAME_COOKIE = "coserve_reviewer"
_NAME_COOKIE_S = 365 * 86400
_MOST_EXCLUDED = 1000
#: The daemon waits a second for its writer, and then says what it knows.
_REVIEW_S = 3.0
_STATUS = {"conflict": 409, "not_finished": 409, "no_decision": 409, "unknown_inspection": 404, "bad_field": 422}

Text = Annotated[str, StringConstraints(max_length=128)]
ImageId = Annotated[int, Path(ge=1, le=MAX_INTEGER)]
Seen = Annotated[str, Form(pattern=r"^[0-9]{0,19}$")]
#: What a browser remembers (static/review.js): at most 200 images.
Skipped = Annotated[str, Query(pattern=r"^([0-9]{1,19}(,[0-9]{1,19}){0,199})?$")]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The filters in the address, and which end of the queue comes first."""

    type: str
    lot: str
    station: str
    component: str
    verdict: str
    defect: str
    expert: str
    order: str

    @property
    def waiting(self) -> Waiting:
        return Waiting(
            *(self.type or None, self.lot or None, self.station or None, self.component or None),
            *(self.verdict or None, self.defect or None, self.expert or None),
        )

    @property
    def fields(self) -> dict[str, str]:
        """Those in force."""
        named = ("type", "lot", "station", "component", "verdict", "defect", "expert")
        given = {name: getattr(self, name) for name in named if getattr(self, name)}
        return given | ({"order": self.order} if self.order == "newest" else {})

    @property
    def query(self) -> str:
        return urlencode(self.fields)


def chosen(
    type: Annotated[Text, Query()] = "",  # noqa: A002 - the name in the address
    lot: Annotated[Text, Query()] = "",
    station: Annotated[Text, Query()] = "",
    component: Annotated[Text, Query()] = "",
    verdict: Literal["", "fail", "review", "unknown", "pass"] = "",
    defect: Annotated[Text, Query()] = "",
    expert: Annotated[Text, Query()] = "",
    order: Literal["oldest", "newest"] = "oldest",
) -> Chosen:
    return Chosen(type, lot, station, component, verdict, defect, expert, order)


def router(site: Site) -> APIRouter:
    """The page, its fragments, and what it sends."""
    routes = APIRouter()
    desk = _Desk(site)

    @routes.get("/review")
    def page(
        request: Request,
        which: Annotated[Chosen, Depends(chosen)],
        image: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None,
        coserve_reviewer: Annotated[str, Cookie()] = "",
    ) -> HTMLResponse:
        return desk.page(request, which, image, name_of(coserve_reviewer))

    @routes.post("/review/name")
    def name(
        reviewer: Annotated[str, Form(max_length=512)],
        next: Annotated[str, Form(max_length=2048)] = "/review",  # noqa: A002
    ) -> Response:
        given = reviewer.strip()
        if not NAME.fullmatch(given):
            raise HTTPException(422, "your name: 1 to 128 characters without control characters")
        answer = RedirectResponse(safe_path(next), 303)
        answer.set_cookie(_NAME_COOKIE, quote(given), _NAME_COOKIE_S, path="/", httponly=True, samesite="strict")
        return answer

    @routes.get("/review/next")
    def following(
        which: Annotated[Chosen, Depends(chosen)],
        seat: Annotated[str, Query(pattern=r"^[0-9a-f]{16}$")],
        held: Annotated[str, Query(pattern=r"^[0-9,]{0,400}$")] = "",
        skipped: Skipped = "",
        count: Annotated[int, Query(ge=0, le=12)] = 4,
        since: Annotated[str, Query(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,12}Z$")] = "9999-12-31T00:00:00Z",
        coserve_reviewer: Annotated[str, Cookie()] = "",
    ) -> JSONResponse:
        holds = [int(part) for part in held.split(",") if part]
        reviewer = name_of(coserve_reviewer)
        desk.offers.remember(reviewer, [int(part) for part in skipped.split(",") if part])
        found = desk.following(which, seat, reviewer, holds, count)
        return JSONResponse(found | desk.progress(since, reviewer))

    @routes.get("/review/items/{image}")
    def one(image: ImageId) -> JSONResponse:
        return JSONResponse(desk.one(image))

    _add_decisions(routes, desk)
    return routes


def _add_decisions(routes: APIRouter, desk: "_Desk") -> None:
    @routes.post("/review/items/{image}")
    def decide(
        image: ImageId,
        verdict: Annotated[str, Form()],
        defect: Annotated[str, Form()] = "",
        note: Annotated[str, Form()] = "",
        newest: Seen = "",
        coserve_reviewer: Annotated[str, Cookie()] = "",
    ) -> JSONResponse:
        given = {"verdict": verdict, "defect": defect or None, "note": note.strip() or None}
        return desk.write(image, coserve_reviewer, newest, **given)

    @routes.post("/review/items/{image}/undo")
    def undo(image: ImageId, newest: Seen = "", coserve_reviewer: Annotated[str, Cookie()] = "") -> JSONResponse:
        return desk.write(image, coserve_reviewer, newest, undo=True)

    @routes.post("/review/items/{image}/skip")
    def skip(image: ImageId, coserve_reviewer: Annotated[str, Cookie()] = "") -> Response:
        desk.offers.skip(name_of(coserve_reviewer), image)
        return Response(status_code=204)

    @routes.get("/review/last")
    def last(
        since: Annotated[str, Query(max_length=32)], coserve_reviewer: Annotated[str, Cookie()] = ""
    ) -> JSONResponse:
        return JSONResponse(desk.last(since, name_of(coserve_reviewer)))


class _Desk:
    """What the routes share."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._facts = Facts(site.database, site.pictures)
        self.offers = Offers()

    def page(self, request: Request, which: Chosen, image: int | None, reviewer: str) -> HTMLResponse:
        here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return self._site.page(
            *(request, "review.html"),
            reviewer=reviewer,
            here=here,
            which=which,
            image=image,
            codes=self._facts.codes() if reviewer else [],
            facets=self._facts.facets() if reviewer else {},
            seat=secrets.token_hex(8),
        )

    def following(self, which: Chosen, seat: str, reviewer: str, held: list[int], count: int) -> dict[str, Any]:
        """The next images beside those the page holds, and how many wait in all."""
        query = waiting(which.waiting, newest_first=which.order == "newest")
        most = count + len(held) + min(self.offers.excluded, _MOST_EXCLUDED)
        ids = [row.inspection_id for row in self._site.database.rows(query.limit(most), limit=most)] if count else []
        chosen_ids = self.offers.choose(seat, reviewer, ids, held, count)
        items = [self._rendered(item) for item in map(self._facts.item, chosen_ids) if item]
        left = self._site.database.rows(count_of(query, COUNTED), limit=1)[0][0]
        return {"items": items, "left": left, "left_is_least": left >= COUNTED}

    def one(self, inspection_id: int) -> dict[str, Any]:
        item = self._facts.item(inspection_id)
        if item is None:
            raise HTTPException(404, f"there is no image {inspection_id}")
        return self._rendered(item)

    def progress(self, since: str, reviewer: str) -> dict[str, int]:
        """Decisions since the reader's midnight."""
        done = self._site.database.rows(questions.done_since(since, reviewer), limit=1)[0]
        return {"done": int(done.by_all), "done_by_you": int(done.by_one)}

    def last(self, since: str, reviewer: str) -> dict[str, Any]:
        """The decision that this reviewer could undo after the page was loaded anew."""
        rows = self._site.database.rows(questions.newest_of(reviewer, since), limit=1)
        return {"id": rows[0].inspection_id, "newest": rows[0].review_id} if rows else {}

    def write(self, image: int, cookie: str, newest: str, **fields: Any) -> JSONResponse:
        """Have the daemon write it; what it refuses is the page's to show."""
        reviewer = name_of(cookie)
        if not reviewer:
            return _refusal(401, "no_name", "say who you are first: reload the page")
        given = {name: value for name, value in fields.items() if value is not None}
        if newest:
            given["newest"] = int(newest)
        try:
            written = self._site.ask_daemon(
                "review", timeout_s=_REVIEW_S, inspection_id=image, reviewer=reviewer, **given
            )
        except ControlError as error:
            return _refusal(_STATUS.get(error.code, 503), error.code, error.reason)
        self.offers.forget(image)
        return JSONResponse(written)

    def _rendered(self, item: Item) -> dict[str, Any]:
        html = self._site.render("_review_item.html", item=item, image=item.image)
        return {"id": item.image.inspection_id, "html": html}


def _refusal(status: int, code: str, reason: str) -> JSONResponse:
    return JSONResponse({"code": code, "reason": reason}, status)


def name_of(cookie: str) -> str:
    """The reviewer's name; empty where nobody has said it, or not as a name may be."""
    try:
        name = unquote(cookie, errors="strict")
    except UnicodeDecodeError:
        return ""
    return name if NAME.fullmatch(name) and name.strip() else ""
