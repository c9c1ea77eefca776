"""The pages Experts, one expert and Teach: memory, rates, drift, decisions. They change nothing (docs/decisions.md)."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import FileResponse, HTMLResponse, Response
from sqlalchemy import Row
from starlette.exceptions import HTTPException

from daemon.dashboard.pages.drawings import WIDE, Bar, BarChart, expert_state, memory_blocks
from daemon.dashboard.site.database import CachedAnswer, Database, NoDatabase, TooMuchToCount, ask_or
from daemon.dashboard.site.site import Filters, SearchText, ShortText, Site
from daemon.line.line import compile_kept_rules
from daemon.shadow.comparison import EFFECTS, MAX_IMAGES, shadow_report
from daemon.storage.database.reviews import ExpertCalls, VersionKey, by_version, calls_statement, confidences_statement
from daemon.storage.decided_pictures import MAX_PICTURES, Decided, decided_pictures, decided_question, learned_files
from daemon.units import utc_text
from daemon.wire.control import ControlError
from experts.catalog import Catalog, CatalogError, CatalogFile, read_catalog, resolve
from experts.drift import BINS, compare
from experts.editions.edition import EditionError
from experts.editions.folder import EditionFolder
from experts.editions.history import Expert, experts_of
from experts.spec import ExpertId, ExpertSpec
from routing_rules.routes import Routes, uses

#: How far back the page looks: images for rates and the hit rate, images for calls, loads for load times.
_RECENT_IMAGES = 20_000
_RECENT_IMAGES_FOR_CALLS = 100_000
_RECENT_LOADS = 50_000
#: More experts than any catalog has, and more bins of confidence than all their versions and labels have.
_MAX_EXPERTS = 10_000
_MAX_BINS = 200_000
_MAX_ANSWERS = 24
#: Pictures of each label that the page Teach shows, the newest ones.
_MAX_TAUGHT = 12
_PAGE_ROWS = 100
_CHART_MINUTES = 60

_RATES = """
SELECT stages.expert, count(*) AS answers, avg(stages.confidence) AS confidence,
       1.0 * sum(CASE WHEN inspections.verdict = 'fail' THEN 1 ELSE 0 END) / count(*) AS fail_rate,
       1.0 * sum(CASE WHEN inspections.verdict = 'review' THEN 1 ELSE 0 END) / count(*) AS review_rate,
       1.0 * sum(CASE WHEN inspections.verdict = 'unknown' THEN 1 ELSE 0 END) / count(*) AS unknown_rate
FROM stages JOIN inspections ON inspections.inspection_id = stages.inspection_id
WHERE stages.inspection_id > :after
GROUP BY stages.expert
"""
_BATCHES = """
SELECT expert, count(*) AS batches, sum(CASE WHEN load_ms > 0 THEN 1 ELSE 0 END) AS batches_after_load
FROM (
    SELECT expert, executor, batch_id, max(load_ms) AS load_ms
    FROM stages WHERE inspection_id > :after
    GROUP BY expert, executor, batch_id
) AS batch
GROUP BY expert
"""
_TODAY = """
SELECT stages.expert, count(*) AS today
FROM stages JOIN inspections ON inspections.inspection_id = stages.inspection_id
WHERE stages.inspection_id > :after AND inspections.completed_at >= :since
GROUP BY stages.expert
"""
_NEWEST_LOADS = f"""
(SELECT at, device, loaded, load_ms FROM expert_switches WHERE cause <> 'startup'
 ORDER BY switch_id DESC LIMIT {_RECENT_LOADS}) AS newest
"""  # noqa: S608 - our own number
_LOADS = f"""
SELECT loaded AS expert, count(*) AS loads, avg(load_ms) AS mean_load_ms FROM {_NEWEST_LOADS} GROUP BY loaded
"""  # noqa: S608
_LOADS_PER_MINUTE = f"""
SELECT substr(at, 1, 16) AS minute, device, count(*) AS loads
FROM {_NEWEST_LOADS} WHERE at >= :since
GROUP BY substr(at, 1, 16), device
"""  # noqa: S608
_ANSWERS = f"""
SELECT stages.inspection_id, stages.step, stages.label, stages.confidence, stages.expert_version,
       inspections.board_id, inspections.designator, inspections.component, inspections.verdict,
       inspections.completed_at, inspections.image_path
FROM stages JOIN inspections ON inspections.inspection_id = stages.inspection_id
WHERE stages.inspection_id > :after AND stages.expert = :expert {{only}}
ORDER BY stages.inspection_id DESC, stages.step
LIMIT {_MAX_ANSWERS}
"""  # noqa: S608
_VERSIONS = """
SELECT expert_version, architecture, bytes, dtype, origin, first_used_at
FROM expert_versions WHERE expert = :expert ORDER BY first_used_at DESC
"""
_RULES = "SELECT text FROM rules_versions WHERE rules_version = :version"

#: Of each version with its settings: counts of confidence in 20 bins, by answered label.
VersionHistograms = Mapping[VersionKey, Mapping[str, Sequence[int]]]
_Sort = Literal[
    "health", "name", "today", "size", "usage", "answers", "confidence", "fail", "hit", "loads", "drift", "calls"
]  # fmt: skip
_Show = Literal["all", "resident", "trouble", "pinned", "unused"]


#: A row of the list: control's of one expert, its numbers in the newest images, its drift and health. Rates are shares
#: of its answers, None without answers; `failed` says why it cannot be loaded.
ExpertRow = Mapping[str, Any]
_NO_WORK: ExpertRow = {
    **dict.fromkeys(("today", "answers", "batches", "batches_after_load", "loads", "false_calls", "escapes"), 0),
    **dict.fromkeys(("confidence", "fail_rate", "review_rate", "unknown_rate", "mean_load_ms")),
}


#: The worst first.
HEALTH = ("cannot be loaded", "drifted", "shifting", "never used", "OK")
#: The orders of the list. The largest comes first but for names, health, confidence and hit rate.
SORTS: Mapping[str, Callable[[ExpertRow], Any]] = {
    "health": lambda row: (HEALTH.index(row["health"]), -row["answers"], row["expert"]),
    "name": lambda row: row["expert"],
    "today": lambda row: -row["today"],
    "size": lambda row: -row["bytes"],
    "usage": lambda row: -row["usage"],
    "answers": lambda row: -row["answers"],
    "confidence": lambda row: row["confidence"] if row["confidence"] is not None else 2.0,
    "fail": lambda row: -(row["fail_rate"] or 0.0),
    "hit": lambda row: row["hit_rate"] if row["hit_rate"] is not None else 2.0,
    "loads": lambda row: -row["loads"],
    "drift": lambda row: -(row["drift"].value if row["drift"] else -1.0),
    "calls": lambda row: (-row["false_calls"], -row["escapes"]),
}
SHOWN: Mapping[str, Callable[[ExpertRow], bool]] = {
    "all": lambda _row: True,
    "resident": lambda row: bool(row["resident"] or row["loading"]),
    "trouble": lambda row: row["health"] in HEALTH[:3],
    "pinned": lambda row: bool(row["pinned"]),
    "unused": lambda row: row["health"] == "never used",
}


@dataclass(frozen=True, slots=True)
class ExpertSearch(Filters):
    q: SearchText = ""
    show: _Show = "all"
    sort: _Sort = "health"
    columns: Literal["people", "all"] = "people"
    page: Annotated[int, Query(ge=1, le=1000)] = 1

    def matches(self, row: ExpertRow) -> bool:
        return self.q.casefold() in f"{row['expert']} {row['architecture']}".casefold() and SHOWN[self.show](row)

    def link(self, **changes: Any) -> str:
        return "/experts?" + self.query(**({"page": 1} | changes))


def router(site: Site) -> APIRouter:
    routes = APIRouter()
    overview = ExpertOverview(site)
    site.templates.globals |= {"expert_href": href, "teach_href": teach_href}
    memory, loads = "The daemon does not say what is in memory", "The loads cannot be counted now"
    site.add_part("memory", "_memory.html", lambda: _memory(site), memory, 1.0)
    site.add_part("loads", "_loads.html", lambda: _loads(site), loads, 30.0)

    @routes.get("/experts")
    def experts(request: Request, search: Annotated[ExpertSearch, Depends()]) -> HTMLResponse:
        every, hit_rate, problems = overview.listing()
        matches = sorted(filter(search.matches, every), key=SORTS[search.sort])
        first = (search.page - 1) * _PAGE_ROWS
        return site.page(
            request,
            "experts.html",
            all=every,
            hit_rate=hit_rate,
            problems=problems,
            rows=matches[first : first + _PAGE_ROWS],
            count=len(matches),
            first=first,
            pages=-(-len(matches) // _PAGE_ROWS),
            search=search,
        )

    @routes.get("/experts/{name:path}")
    def expert(request: Request, name: str, full: ShortText = "") -> HTMLResponse:
        name = full or name
        stem = name.partition("@")[0]  # a backbone in memory is named with its version
        return _expert_page(site, overview, request, stem if ExpertId(stem) in overview.catalog()[0] else name)

    _add_teach(routes, site, overview)
    return routes


def href(name: str) -> str:
    """Return an expert's address. A name with parts that a browser would resolve goes into the query."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "/experts/named?" + urlencode({"full": name})
    return "/experts/" + "/".join(quote(part, safe="") for part in parts)


class ExpertOverview:
    """All experts from the daemon, the catalog and the results. Answers are cached. Any thread."""

    def __init__(self, site: Site) -> None:
        self._places = CachedAnswer(0.5, lambda: site.ask_daemon("experts")["experts"])
        self._recent = CachedAnswer(5.0, lambda: _recent_work(site))
        self.catalog = CachedAnswer(10.0, lambda: _read_catalog(site)).get
        self.confidences = CachedAnswer(60.0, lambda: _confidences(site.database)).get
        self.calls = CachedAnswer(60.0, lambda: _calls(site.database)).get
        #: The experts graded `drifted`, the worst first; none if they cannot be counted.
        self.drifted = CachedAnswer(60.0, self._find_drifted).get

    def listing(self) -> tuple[list[ExpertRow], float | None, list[str]]:
        """Return all rows, their hit rate, and a message for each thing that could not be read."""
        catalog, problems = self.catalog()
        failed: list[str] = []
        known: list[dict[str, Any]] = ask_or([], self._places.get, "Where experts are", failed)
        if failed:
            known = [_without_daemon(catalog, name) for name in catalog]
        recent: Mapping[str, Mapping[str, Any]] = ask_or({}, self._recent.get, "Rates and loads", failed)
        histograms: VersionHistograms = ask_or({}, self.confidences, "Drift", failed)
        calls: Sequence[ExpertCalls] = ask_or([], self.calls, "False calls and escapes", failed)
        calls_of = {(each.expert, each.expert_version, each.expert_settings): each for each in calls}
        rows = [_row(each, catalog, recent, histograms, calls_of) for each in known]
        batches = sum(numbers.get("batches", 0) for numbers in recent.values())
        after_load = sum(numbers.get("batches_after_load", 0) for numbers in recent.values())
        return rows, 1 - after_load / batches if batches else None, [*failed, *problems]

    def is_any_known(self) -> bool:
        """Return False if the daemon has no experts; ControlError if it does not answer."""
        return bool(self._places.get())

    def unusable(self) -> list[str]:
        """Return one sentence for each cause: the heads of a backbone that cannot be loaded share theirs."""
        failed = {row.get("backbone", row["expert"]): row["failed"] for row in self._places.get() if row["failed"]}
        said = [f"{name} cannot be loaded: {why.removeprefix(f'expert {name}: ')}" for name, why in failed.items()]
        return said or self.catalog()[1]

    def _find_drifted(self) -> list[str]:
        catalog, _ = self.catalog()
        histograms: VersionHistograms = ask_or({}, self.confidences, "Drift", []) if catalog.confidences else {}
        rows = [_row(_without_daemon(catalog, name), catalog, {}, histograms, {}) for name in catalog]
        return [row["expert"] for row in sorted(rows, key=SORTS["drift"]) if row["health"] == "drifted"]


def _confidences(database: Database) -> VersionHistograms:
    return by_version(database.rows(confidences_statement(), limit=_MAX_BINS))


def _calls(database: Database) -> list[ExpertCalls]:
    after = max(0, database.id_before_newest(_RECENT_IMAGES_FOR_CALLS))
    return [ExpertCalls(*row) for row in database.rows(calls_statement(None, after), limit=_MAX_EXPERTS)]


def _read_catalog(site: Site) -> tuple[Catalog, list[str]]:
    """Return the experts that the daemon judges by, and what is wrong with them.

    While it does not say they are those of the edition in force, before the first one those of the catalog.
    """
    folder = EditionFolder(site.config.catalog)
    try:
        status = ask_or({}, site.status, "", [])
        number = status.get("edition") or folder.current()
        entries = folder.absolute_entries(folder.read(number)) if number is not None else read_catalog(folder.catalog)
        catalog, mistakes = resolve(CatalogFile(experts=entries), folder.root)
    except (EditionError, CatalogError, OSError) as error:
        return Catalog({}, {}), [f"The experts cannot be read: {error}"]
    return catalog, [f"{where[1]}: {message}" for where, message in mistakes]


def _recent_work(site: Site) -> dict[str, dict[str, Any]]:
    database = site.database
    after = {"after": database.id_before_newest(_RECENT_IMAGES)}
    today = {"since": site.day_began(), "after": database.id_before_newest(_RECENT_IMAGES_FOR_CALLS)}
    work: dict[str, dict[str, Any]] = {}
    for sql, values in ((_RATES, after), (_BATCHES, after), (_LOADS, {}), (_TODAY, today)):
        for row in database.rows(sql, values, limit=_MAX_EXPERTS):
            numbers = dict(row._mapping)
            work.setdefault(numbers.pop("expert"), {}).update(numbers)
    return work


def _without_daemon(catalog: Catalog, name: ExpertId) -> dict[str, Any]:
    spec = catalog[name]
    known = {"expert": name, "architecture": spec.architecture, "bytes": spec.weights_bytes}
    known |= {"version": spec.version, "settings": spec.settings_digest}
    return {**known, "usage": 0.0, "resident": [], "loading": [], "pinned": [], "queued": 0, "failed": None}


def _row(
    known: Mapping[str, Any],
    catalog: Catalog,
    recent: Mapping[str, Mapping[str, Any]],
    histograms: VersionHistograms,
    calls_of: Mapping[VersionKey, ExpertCalls],
) -> ExpertRow:
    name, key = known["expert"], (known["expert"], known["version"], known["settings"])
    # The file may name another version than the daemon has: that one's training says nothing of this one.
    spec = catalog.get(name)
    is_in_force = spec is not None and (spec.version, spec.settings_digest) == key[1:]
    training = catalog.confidences.get(name) if is_in_force else None
    calls = calls_of.get(key)
    work: Mapping[str, Any] = recent.get(name, {})
    if spec is not None and not spec.classes:  # a backbone answers through its heads, and is loaded by its slot's name
        heads = [{head, each.resident.name} for head, each in catalog.items() if each.resident.sha256 == spec.sha256]
        counts = [recent[each] for each in set().union(*heads) if each in recent]
        work = {field: sum(row.get(field, 0) for row in counts) for field in ("today", "answers", "loads")}
    row = {**_NO_WORK, **known, **work, "has_training": training is not None}
    if calls is not None:
        row |= {"false_calls": calls.false_calls, "escapes": calls.escapes}
    row["hit_rate"] = 1 - row["batches_after_load"] / row["batches"] if row["batches"] else None
    drift = row["drift"] = compare(training, histograms.get(key, {})) if training else None
    grade = drift.grade if drift is not None and drift.grade in ("drifted", "shifting") else None
    row["health"] = "cannot be loaded" if row["failed"] else grade or ("OK" if row["answers"] else "never used")
    return row


def _memory(site: Site) -> dict[str, Any]:
    pools = [{"pool": pool, "blocks": memory_blocks(pool)} for pool in site.ask_daemon("memory")["pools"]]
    return {"pools": pools, "state_of": expert_state}


def _loads(site: Site) -> dict[str, Any]:
    now = int(time.time()) // 60 * 60
    minutes = [utc_text(now - 60 * (_CHART_MINUTES - 1 - number)) for number in range(_CHART_MINUTES)]
    loads: dict[str, dict[str, int]] = {}
    for row in site.database.rows(_LOADS_PER_MINUTE, {"since": minutes[0]}, limit=_MAX_EXPERTS):
        loads.setdefault(row.device, {})[row.minute] = row.loads

    def bar(minute: str, count: int) -> Bar:
        name = site.plant.text(minute, "time")[:5]
        return Bar(name, count, str(count or ""), f"{name}: {count}" if count else "", "accent")

    def chart(counts: Mapping[str, int]) -> BarChart:
        return BarChart([bar(minute, counts.get(minute[:16], 0)) for minute in minutes], most=max(counts.values()))

    return {"devices": [(device, sum(counts.values()), chart(counts)) for device, counts in sorted(loads.items())]}


def _confidence_chart(
    recent: Mapping[str, Sequence[int]], training: Mapping[str, Sequence[int]] | None
) -> BarChart | None:
    if not (recent or training):
        return None
    now, before = _shares(recent), _shares(training or {})
    bars: list[Bar] = []
    for number, (share, mark) in enumerate(zip(now, before, strict=True)):
        name = f"{number / BINS:.2f}"
        title = f"{name}: {100 * share:.1f} %" + (f", in training {100 * mark:.1f} %" if training else "")
        text = f"{100 * share:.0f}" if share else ""
        bars.append(Bar(name, share, text, title, "accent", mark if training else None))
    return BarChart(bars, most=max(now + before), wide=WIDE // 2)


def _shares(histograms: Mapping[str, Sequence[int]]) -> list[float]:
    """Return each bin's share over all labels, so that few answers and many can be compared."""
    counts = [sum(column) for column in zip([0] * BINS, *histograms.values(), strict=True)]
    return [count / max(1, sum(counts)) for count in counts]


def _expert_page(site: Site, overview: ExpertOverview, request: Request, name: str) -> HTMLResponse:
    catalog, mistakes = overview.catalog()
    rows, _, problems = overview.listing()
    row = next((row for row in rows if row["expert"] == name), None)
    versions = site.database.rows(_VERSIONS, {"expert": name}, limit=100)
    if row is None and not versions:
        raise HTTPException(404, "no expert of this name is in the catalog or has ever answered: see the page Experts")
    problems += [mistake for mistake in mistakes if name in mistake]
    every: Sequence[ExpertCalls] = ask_or([], overview.calls, "False calls and escapes", problems)
    calls = [each for each in every if each.expert == name]
    answers: Sequence[Row[Any]] = ask_or([], lambda: _newest_answers(site.database, name), "Newest answers", problems)
    spec, history = catalog.get(ExpertId(name)), _history(site, name, problems)
    histograms: VersionHistograms = ask_or({}, overview.confidences, "Drift", problems)
    newest: VersionKey = next((key for key in histograms if key[0] == name), (name, "", None))
    shown = (name, spec.version, spec.settings_digest) if spec is not None else newest
    training, recent = catalog.confidences.get(ExpertId(name)), histograms.get(shown, {})
    routes = rules_in_force(site, catalog)
    return site.page(
        request,
        "expert.html",
        name=name,
        row=row,
        spec=spec,
        uses=uses(routes, name) if routes else (),
        versions=versions,
        history=history,
        shadow=ask_or(None, lambda: _shadow(site, history, spec), "Shadow", problems),
        effects=EFFECTS,
        calls=calls,
        answered={
            name for each in calls for name in (each.expert_version, f"{each.expert_version}+{each.expert_settings}")
        },
        answers=answers,
        training=training,
        drift=compare(training, recent) if training else None,
        problems=list(dict.fromkeys(problems)),
        confidence=_confidence_chart(recent, training),
    )


def _shadow(site: Site, expert: Expert | None, spec: ExpertSpec | None) -> dict[str, Any] | None:
    """Return the comparison of a version in shadow, and the `problem` of its process."""
    if expert is None or expert.shadow is None or spec is None:
        return None
    rows = ask_or([], lambda: site.status().get("shadows", []), "", [])
    ask, in_force = partial(site.database.rows, limit=MAX_IMAGES), (spec.version, spec.settings_digest)
    problem = next((row["problem"] for row in rows if row["expert"] == expert.name), None)
    return shadow_report(ask, expert.name, in_force, expert.shadow) | {"problem": problem}


def _newest_answers(database: Database, expert: str) -> list[Row[Any]]:
    values = {"expert": expert, "after": database.id_before_newest(_RECENT_IMAGES_FOR_CALLS)}
    with_picture = _ANSWERS.format(only="AND inspections.image_path IS NOT NULL")
    answers = database.rows(with_picture, values, limit=_MAX_ANSWERS)
    return answers or database.rows(_ANSWERS.format(only=""), values, limit=_MAX_ANSWERS)


def rules_in_force(site: Site, catalog: Catalog) -> Routes | None:
    """Return the rules as the daemon reads them; None if unknown or no longer compatible with the catalog."""
    try:
        rules = site.database.first(_RULES, version=str(site.status()["rules_version"]))
    except (ControlError, NoDatabase, TooMuchToCount):
        return None
    return compile_kept_rules(rules.text, catalog) if rules is not None else None


def _history(site: Site, name: str, problems: list[str]) -> Expert | None:
    try:
        return experts_of(EditionFolder(site.config.catalog)).get(name)
    except (EditionError, OSError) as error:
        problems.append(f"versions: {error}")
        return None


# Teach: pictures that people decided about, and the report of the last `coserve learn`


def _add_teach(routes: APIRouter, site: Site, overview: ExpertOverview) -> None:
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
                label: [picture for picture in decided.pictures if picture.label == label][:_MAX_TAUGHT]
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


def teach_href(name: str) -> str:
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
