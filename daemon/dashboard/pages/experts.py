"""The pages Experts and one expert: what is in memory, how well each does, and whether it still sees what it learnt.

Nothing can be changed here: who is pinned or unloaded decides how fast the line is, and is asked for with `coserve
pin`, by somebody who may reach the daemon's control socket (docs/decisions.md).
"""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException

from daemon.dashboard.pages import questions_experts as questions
from daemon.dashboard.pages.expert_facts import ExpertFacts, added, chosen, rules_in_force, shares
from daemon.dashboard.pages.memory_picture import NARROW, WIDE, draw, state_of
from daemon.dashboard.site.database import NoDatabase, TooMuchToCount
from daemon.dashboard.site.site import Site
from daemon.units import utc_text
from daemon.wire.control import ControlError
from experts.drift import BINS, compare
from experts.spec import ExpertId
from experts.versions import Versions, VersionsError
from routing_rules.routes import Routes
from routing_rules.uses import uses

#: Rows of one page of the list.
_PAGE = 100
_MINUTES = 60
_Text = Annotated[str, Query(max_length=128)]
_Sort = Literal[
    "health", "name", "size", "usage", "answers", "confidence", "fail", "hit", "loads", "drift", "calls"
]  # fmt: skip
_Show = Literal["all", "resident", "trouble", "pinned", "unused"]


def router(site: Site) -> APIRouter:
    routes = APIRouter()
    facts = ExpertFacts(site)
    site.templates.globals["expert_href"] = href
    site.live.add("memory", lambda: _memory(site), every_s=1.0)

    @routes.get("/experts")
    def experts(
        request: Request,
        q: _Text = "",
        show: _Show = "all",
        sort: _Sort = "health",
        page: Annotated[int, Query(ge=1, le=1000)] = 1,
    ) -> HTMLResponse:
        listing = facts.listing()
        found = chosen(listing.rows, q.strip(), show, sort)
        first = (page - 1) * _PAGE

        def link(**changed: Any) -> str:
            asked = {"q": q.strip(), "show": show, "sort": sort, "page": 1} | changed
            defaults = {"q": "", "show": "all", "sort": "health", "page": 1}
            return "/experts?" + urlencode({key: value for key, value in asked.items() if value != defaults[key]})

        return site.page(
            request,
            "experts.html",
            memory=_memory(site),
            listing=listing,
            rows=found[first : first + _PAGE],
            count=len(found),
            first=first,
            pages=-(-len(found) // _PAGE),
            number=page,
            q=q,
            show=show,
            sort=sort,
            link=link,
        )

    @routes.get("/expert-charts/loads.json")
    def loads_chart() -> dict[str, Any]:
        return _loads_chart(site)

    @routes.get("/expert-charts/confidence.json")
    def confidence_chart(name: Annotated[str, Query(min_length=1, max_length=128)]) -> dict[str, Any]:
        return _confidence_chart(site, facts, name)

    @routes.get("/experts/{name:path}")
    def expert(request: Request, name: str, full: _Text = "") -> HTMLResponse:
        return _expert(site, facts, request, full or name)

    return routes


def href(name: str) -> str:
    """The address of one expert. A name that a browser would take for a way up goes into the question."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "/experts/named?" + urlencode({"full": name})
    return "/experts/" + "/".join(quote(part, safe="") for part in parts)


def _memory(site: Site) -> str:
    """What lies in memory now, as a fragment: a picture and a table for each pool."""
    try:
        pools = site.ask_daemon("memory")["pools"]
    except ControlError as error:
        return site.render("_problem.html", title="The daemon does not say what is in memory", remedy=error.reason)
    drawn = [{"pool": pool, "pictures": [("wide", draw(pool, WIDE)), ("narrow", draw(pool, NARROW))]} for pool in pools]
    return site.render("_memory.html", pools=drawn, state_of=state_of)


def _loads_chart(site: Site) -> dict[str, Any]:
    now = int(time.time()) // 60 * 60
    minutes = [now - 60 * (_MINUTES - 1 - number) for number in range(_MINUTES)]
    rows = questions.loads_per_minute(site.database, utc_text(minutes[0]))
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        found.setdefault(row.device, {})[row.minute] = row.loads
    names = [utc_text(minute)[:16] for minute in minutes]
    series = [
        {
            "label": device,
            "values": [counts.get(name, 0) for name in names],
            "tone": f"other{1 + at % 4}",
            "style": "bars",
        }
        for at, (device, counts) in enumerate(sorted(found.items()))
    ]
    empty = "No expert was loaded in the last hour: all that were needed were in memory."
    return {"kind": "time", "x": minutes if series else [], "series": series, "empty": empty}


def _confidence_chart(site: Site, facts: ExpertFacts, name: str) -> dict[str, Any]:
    recent = _newest_version(questions.confidences(site.database, name), name, facts)
    training = facts.trained(name)
    bins = [f"{number / BINS:.2f}" for number in range(BINS)]
    series = [{"label": "now", "values": shares(added(recent)), "tone": "accent", "style": "bars", "unit": "%"}]
    if training:
        of_training = {"label": "in training", "values": shares(added(training)), "tone": "other2", "style": "line"}
        series.append({**of_training, "unit": "%"})
    has_any = sum(added(recent)) > 0 or training
    empty = "No answers yet, and no training distribution."
    return {"kind": "category", "x": bins if has_any else [], "series": series, "empty": empty}


def _newest_version(histograms: questions.Histograms, name: str, facts: ExpertFacts) -> Mapping[str, Sequence[int]]:
    """Those of the version in force; of whichever answered where the catalog does not have the expert."""
    spec = facts.catalog.get()[0].get(ExpertId(name))
    if spec is not None:
        return histograms.get((name, spec.version), {})
    return next(iter(histograms.values()), {})


def _expert(site: Site, facts: ExpertFacts, request: Request, name: str) -> HTMLResponse:
    catalog, broken = facts.catalog.get()
    listing = facts.listing()
    row = next((one for one in listing.rows if one.name == name), None)
    versions = questions.versions(site.database, name)
    if row is None and not versions:
        raise HTTPException(404, "no expert of this name is in the catalog or has ever answered: see the page Experts")
    problems = [*listing.problems, *(one for one in broken if name in one)]
    calls = _or_none(lambda: {one.expert_version: one for one in questions.calls(site.database, name)}, problems)
    answers = _or_none(lambda: questions.newest_answers(site.database, name), problems)
    training = facts.trained(name)
    recent = _newest_version(questions.confidences(site.database, name), name, facts)
    routes = _rules(site, facts)
    return site.page(
        request,
        "expert.html",
        name=name,
        row=row,
        spec=catalog.get(ExpertId(name)),
        uses=uses(routes, name) if routes else (),
        versions=versions,
        history=_history(site, name, problems),
        calls=calls or {},
        answers=answers or [],
        training=training,
        drift=compare(training, recent) if training else None,
        problems=list(dict.fromkeys(problems)),
        chart=urlencode({"name": name}),
    )


def _or_none(ask: Any, problems: list[str]) -> Any:
    try:
        return ask()
    except (NoDatabase, TooMuchToCount) as error:
        problems.append(str(error) or "not counted, it took longer than 5 s")
        return None


def _rules(site: Site, facts: ExpertFacts) -> Routes | None:
    try:
        version = str(site.status()["rules_version"])
        return rules_in_force(site.database, version, facts.catalog.get()[0])
    except (ControlError, NoDatabase, TooMuchToCount):
        return None


def _history(site: Site, name: str, problems: list[str]) -> Any:
    """Who put which version in force and when (`coserve experts`); None where nobody ever did."""
    try:
        return Versions(site.config.catalog).read().get(name)
    except (VersionsError, OSError) as error:
        problems.append(f"versions: {error}")
        return None
