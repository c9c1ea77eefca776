"""The page Teach of one expert: pictures that people decided about, and the report of the last `coserve learn`."""

import json
from typing import Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, HTMLResponse, Response
from starlette.exceptions import HTTPException

from daemon.dashboard.pages.experts import ExpertOverview, rules_in_force
from daemon.dashboard.site.database import ask_or
from daemon.dashboard.site.site import ShortText, Site
from daemon.storage.decided_pictures import MAX_PICTURES, Decided, decided_pictures, decided_question, learned_files
from experts.spec import ExpertId

#: Pictures of each label that are shown, the newest ones.
_SHOWN = 12


def router(site: Site) -> APIRouter:
    routes = APIRouter()
    overview = ExpertOverview(site)
    site.templates.globals["teach_href"] = href

    @routes.get("/teach")
    def teach(request: Request, expert: ShortText) -> HTMLResponse:
        catalog, _ = overview.catalog()
        spec = catalog.get(ExpertId(expert))
        if spec is None:
            raise HTTPException(404, "no expert of this name is in the catalog: see the page Experts")
        problems: list[str] = []
        rules = rules_in_force(site, catalog)
        rows = ask_or(
            [], lambda: site.database.rows(decided_question(expert), limit=MAX_PICTURES), "Decisions", problems
        )
        decided = decided_pictures(rows, rules, expert, spec.classes) if rules is not None else Decided((), {}, ())
        if rules is None:
            problems.append("The rules in force are not known: decisions cannot be given labels. See the page Line")
        return site.page(
            request,
            "teach.html",
            name=expert,
            spec=spec,
            decided=decided,
            shown={
                label: [picture for picture in decided.pictures if picture.label == label][:_SHOWN]
                for label in decided.counts
            },
            learned=_learned(site, expert, problems),
            problems=problems,
        )

    @routes.get("/teach/picture")
    def picture(expert: ShortText, which: Literal["worst", "confusion"]) -> Response:
        _, worst, confusion = learned_files(site.config.catalog, expert)
        file = worst if which == "worst" else confusion
        if ExpertId(expert) not in overview.catalog()[0] or not file.is_file():
            raise HTTPException(404, "no picture yet: coserve learn draws it")
        return FileResponse(file, media_type="image/png", headers={"Cache-Control": "no-cache"})

    return routes


def href(name: str) -> str:
    return "/teach?" + urlencode({"expert": name})


def _learned(site: Site, expert: str, problems: list[str]) -> dict[str, Any] | None:
    document, *_ = learned_files(site.config.catalog, expert)
    try:
        return json.loads(document.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{document.name}: {error}: run coserve learn {expert} again")
        return None
