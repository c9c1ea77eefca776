"""The page Defects: causes and places of fails, the line's false calls and escapes, and the images behind each number.

The verdict that counts is a person's newest, else the line's. A million images are counted within seconds: passes by
board and by component only, the few others in a table of their own.
"""

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from datetime import date, timedelta
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, Response
from sqlalchemy import ColumnElement, Select, case, func, literal_column, or_, select
from starlette.exceptions import HTTPException

from daemon.config.plant_time import PlantTime, Span
from daemon.dashboard.pages.drawings import Bar, BarChart
from daemon.dashboard.site.database import CachedAnswers, Database, TooMuchToCount
from daemon.dashboard.site.site import Filters, ShortText, Site, Verdict
from daemon.storage.database.reviews import DAEMON, is_newest
from daemon.storage.database.schema import boards, inspections, reviews
from daemon.units import spreadsheet_cell
from daemon.wire.messages import MAX_INTEGER

#: Groups of images that are not plain passes; a month of a large line has some ten thousand.
_MAX_GROUPS = 60_000
_MAX_ROWS = 200
_PAGE_IMAGES = 100
_MAX_CSV_IMAGES = 10_000
_CHART_DAYS = 31
#: Beside a line that needs every core the pages get a tenth of one: a million images then take some seconds more.
_COUNT_TIMEOUT_S = 15.0
_CACHE_S = 10.0
_MAX_CACHED = 8
_RANGES = {"today": 1, "7d": 7, "30d": 30}
#: Most days of a span in the plant's zone: the question names each.
_MAX_ZONED_DAYS = 3660
_VERDICTS = ("pass", "fail", "review", "unknown")

_UTC = PlantTime()
_FIRST_DAY, _LAST_DAY = date(1970, 1, 1), date(2999, 12, 31)

Day = Annotated[str, Query(pattern=r"^([0-9]{4}-[0-9]{2}-[0-9]{2})?$")]
Grouping = Literal["both", "defect", "component"]
Trend = Literal["day", "lot", "station", "component"]
Question = Select[*tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class DefectSpan:
    """Boards closed on the plant's days `since` to `until`. An empty filter matches all, `-` no lot or station."""

    since: date
    until: date
    type: str = ""
    lot: str = ""
    station: str = ""
    plant: PlantTime = _UTC


@dataclass(frozen=True, slots=True)
class DefectFilter(Filters):
    """The filters in the address: `from` and `to` count with the range `own`."""

    range: Literal["today", "7d", "30d", "own"] = "7d"
    first: Annotated[Day, Query(alias="from")] = ""
    last: Annotated[Day, Query(alias="to")] = ""
    type: ShortText = ""
    lot: ShortText = ""
    station: ShortText = ""
    by: Grouping = "defect"

    def span(self, plant: PlantTime, today: date) -> DefectSpan:
        return DefectSpan(*self._days(plant, today), self.type, self.lot, self.station, plant)

    def _days(self, plant: PlantTime, today: date) -> tuple[date, date]:
        if self.range != "own":
            return today - timedelta(days=_RANGES[self.range] - 1), today
        until = _date(self.last) if self.last else today
        since = _date(self.first) if self.first else max(until, _FIRST_DAY + timedelta(days=6)) - timedelta(days=6)
        if since > until:
            raise HTTPException(422, f"from {since} is after to {until}: exchange them")
        if plant.timezone != "UTC" and (until - since).days >= _MAX_ZONED_DAYS:
            raise HTTPException(422, f"from {since} to {until}: choose at most {_MAX_ZONED_DAYS:,} days")
        return since, until

    def query(self, **changes: Any) -> str:
        return Filters.query(self, **{"from": self.first, "to": self.last, "first": "", "last": ""} | changes)


@dataclass(frozen=True, slots=True)
class ImageFilter(Filters):
    """Filters of a list of images; an empty one matches all. The defect `-` is a missing code."""

    final: Verdict = ""
    component: ShortText = ""
    defect: ShortText = ""
    day: Day = ""
    kind: Literal["", "false_call", "escape", "reviewed"] = ""


def _date(text: str) -> date:
    try:
        return min(max(date.fromisoformat(text), _FIRST_DAY), _LAST_DAY)
    except ValueError:
        raise HTTPException(422, "from, to, day: expected days such as 2026-11-21") from None


_Which = Annotated[DefectFilter, Depends()]
_Only = Annotated[ImageFilter, Depends()]


def router(site: Site) -> APIRouter:
    routes, cache = APIRouter(), CachedAnswers(_CACHE_S, _MAX_CACHED)

    def span_of(which: DefectFilter) -> DefectSpan:
        return which.span(site.plant, site.today())

    def summary_of(span: DefectSpan) -> DefectSummary:
        """Return the tables of a span, cached for ten seconds: a page, its charts and its files ask for the same."""
        return cache.get(span, lambda: _counted(site.database, span))

    @routes.get("/defects")
    def page(request: Request, which: _Which, trend: Trend = "day") -> HTMLResponse:
        span = span_of(which)
        summary = summary_of(span)
        tallies, causes = summary.tallies[trend], pareto(summary.not_passed, which.by)
        return site.page(
            *(request, "defects.html"),
            which=which,
            span=span,
            summary=summary,
            causes=causes[:_MAX_ROWS],
            more_causes=len(causes[_MAX_ROWS:]),
            trend=trend,
            tallies=tallies[:_MAX_ROWS],
            more_tallies=len(tallies[_MAX_ROWS:]),
            days=_day_charts(tallies) if trend == "day" else None,
            top_rate=max((tally.fail_rate or 0.0 for tally in tallies), default=0.0) or 1.0,
            choices=cache.get("choices", lambda: _choices(site.database)),
            verdicts=_VERDICTS,
        )

    @routes.get("/defects/images")
    def images(
        request: Request, which: _Which, only: _Only, before: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None
    ) -> HTMLResponse:
        span = span_of(which)
        rows = site.database.rows(images_question(span, only, before), limit=_PAGE_IMAGES + 1)
        shown = rows[:_PAGE_IMAGES]
        return site.page(
            *(request, "defect_images.html"),
            which=which,
            span=span,
            only=only.fields(),
            rows=shown,
            before=shown[-1].inspection_id if len(rows) > _PAGE_IMAGES else None,
            is_first=before is None,
        )

    @routes.get("/defects/pareto.csv")
    def pareto_file(which: _Which) -> Response:
        span = span_of(which)
        rows = map(astuple, pareto(summary_of(span).not_passed, which.by))
        return _csv("pareto", span, tuple(FailCause.__dataclass_fields__), rows)

    @routes.get("/defects/trend.csv")
    def trend_file(which: _Which, trend: Trend = "day") -> Response:
        span = span_of(which)
        columns = (trend, "images", *_VERDICTS, "fail_rate", "reviewed", "false_calls", "escapes")
        rows = [
            (one.name, one.judged, *one.final.values(), one.fail_rate, one.reviewed, one.false_calls, one.escapes)
            for one in summary_of(span).tallies[trend]
        ]
        return _csv(trend, span, columns, rows)

    @routes.get("/defects/images.csv")
    def images_file(which: _Which, only: _Only) -> Response:
        span = span_of(which)
        rows = site.database.rows(images_question(span, only, None), limit=_MAX_CSV_IMAGES + 1)
        if len(rows) > _MAX_CSV_IMAGES:
            raise TooMuchToCount(
                f"More than {_MAX_CSV_IMAGES} images: choose fewer days, or one lot (coserve export has them all)."
            )
        return _csv("images", span, tuple(rows[0]._fields) if rows else ("inspection_id",), rows)

    return routes


def _counted(database: Database, span: DefectSpan) -> "DefectSummary":
    rows = partial(database.rows, timeout_s=_COUNT_TIMEOUT_S)
    not_passed = rows(not_passed_question(span), limit=_MAX_GROUPS + 1)
    by_board = rows(by_board_question(span), limit=_MAX_GROUPS + 1)
    if max(len(not_passed), len(by_board)) > _MAX_GROUPS:
        raise TooMuchToCount("Too many different lots, stations and defects: choose fewer days, a lot or a station.")
    return summarize(not_passed, by_board, rows(by_component_question(span), limit=_MAX_GROUPS))


# Counted rows into tables


@dataclass(slots=True)
class DefectTally:
    """Images of one day, lot, station or component; `waiting` have no verdict yet."""

    name: str
    images: int = 0
    waiting: int = 0
    reviewed: int = 0
    false_calls: int = 0
    escapes: int = 0
    not_passed: Counter[str] = field(default_factory=Counter)

    @property
    def judged(self) -> int:
        return max(0, self.images - self.waiting)

    @property
    def final(self) -> dict[str, int]:
        others = {verdict: self.not_passed[verdict] for verdict in _VERDICTS[1:]}
        return {"pass": max(0, self.judged - sum(others.values())), **others}

    @property
    def fail_rate(self) -> float | None:
        return self.not_passed["fail"] / self.judged if self.judged else None

    def add(self, row: Any) -> None:
        """Count a row of `not_passed_question`. Images that a person passed stay among the passes."""
        if row.said is None:
            self.waiting += row.images
            return
        final = row.decided or row.said
        if final != "pass":
            self.not_passed[final] += row.images
        if row.decided is not None:
            self.reviewed += row.images
        if (row.said, row.decided) == ("fail", "pass"):
            self.false_calls += row.images
        elif (row.said, row.decided) == ("pass", "fail"):
            self.escapes += row.images


@dataclass(frozen=True, slots=True)
class FailCause:
    """One cause of the Pareto chart: `share` of all fails, `cumulative` with those before it."""

    component: str | None
    defect: str | None
    count: int
    share: float
    cumulative: float


@dataclass(frozen=True, slots=True)
class DefectSummary:
    total: DefectTally
    boards: int
    tallies: Mapping[str, Sequence[DefectTally]]
    #: The rows of `not_passed_question`, for the Pareto chart.
    not_passed: Sequence[Any]


def summarize(not_passed: Sequence[Any], by_board: Iterable[Any], by_component: Iterable[Any]) -> DefectSummary:
    total, boards = DefectTally("all"), 0
    tallies: dict[str, dict[str, DefectTally]] = {"day": {}, "lot": {}, "station": {}, "component": {}}

    def tally_of(trend: str, row: Any) -> DefectTally:
        name = getattr(row, trend) or ""  # boards without a lot or a station
        return tallies[trend].setdefault(name, DefectTally(name))

    for row in by_board:
        boards += row.boards
        total.images += row.images
        for trend in ("day", "lot", "station"):
            tally_of(trend, row).images += row.images
    for row in by_component:
        tally_of("component", row).images += row.images
    for row in not_passed:
        total.add(row)
        for trend in tallies:
            tally_of(trend, row).add(row)
    ordered = {
        trend: sorted(named.values(), key=lambda tally: (-tally.not_passed["fail"], -tally.images, tally.name))
        for trend, named in tallies.items()
    }
    ordered["day"].sort(key=lambda tally: tally.name)
    return DefectSummary(total, boards, ordered, not_passed)


def pareto(rows: Iterable[Any], by: Grouping) -> list[FailCause]:
    counts: defaultdict[tuple[str | None, str | None], int] = defaultdict(int)
    for row in rows:
        if (row.decided or row.said) == "fail":
            component = None if by == "defect" else row.component
            counts[component, None if by == "component" else row.defect] += row.images
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0][0] or "", item[0][1] or ""))
    total, so_far, causes = sum(counts.values()), 0, []
    for (component, defect), count in ordered:
        so_far += count
        causes.append(FailCause(component, defect, count, count / total, so_far / total))
    return causes


def _day_charts(tallies: Sequence[DefectTally]) -> BarChart | None:
    by_day = {tally.name: tally for tally in tallies}
    if len(by_day) < 2:
        return None
    last = date.fromisoformat(max(by_day))
    first = max(date.fromisoformat(min(by_day)), last - timedelta(days=_CHART_DAYS - 1))
    days = [f"{first + timedelta(days=number)}" for number in range((last - first).days + 1)]
    values: list[Bar] = []
    for day in days:
        rate = by_day[day].fail_rate if day in by_day else None
        if rate is None:
            values.append(Bar(day[5:], None, "", f"{day}: no boards closed", "fail"))
        else:
            title = f"{day}: {100 * rate:.2f} % of the images failed"
            values.append(Bar(day[5:], rate, f"{100 * rate:.1f}", title, "fail"))
    return BarChart(values, most=max(value.value or 0.0 for value in values))


def _csv(name: str, span: DefectSpan, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Response:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    for row in rows:
        writer.writerow([spreadsheet_cell(round(value, 6) if isinstance(value, float) else value) for value in row])
    headers = {"Content-Disposition": f'attachment; filename="{name}-{span.since}-{span.until}.csv"'}
    return Response(text.getvalue().encode(), media_type="text/csv; charset=utf-8", headers=headers)


# Questions

# Numbers as text: the expression in GROUP BY is the one in SELECT.
_utc_day = func.substr(boards.c.completed_at, literal_column("1"), literal_column("10"))
_newest = (
    select(
        *(reviews.c.inspection_id, reviews.c.review_id, reviews.c.verdict, reviews.c.defect),
        *(reviews.c.reviewer, reviews.c.at, reviews.c.note),
    )
    .where(is_newest(), reviews.c.reviewer != DAEMON)
    .subquery("newest")
)
_is_reviewed = _newest.c.review_id.is_not(None)
_final = case((_is_reviewed, _newest.c.verdict), else_=inspections.c.verdict)
_final_defect = case((_is_reviewed, _newest.c.defect), else_=inspections.c.defect)


def not_passed_question(span: DefectSpan) -> Question:
    """Count images that are not plain passes by place, the line's verdict, a person's, and the defect."""
    columns = (
        *(_day_of(span).label("day"), boards.c.lot, boards.c.station, inspections.c.component),
        *(inspections.c.verdict.label("said"), _newest.c.verdict.label("decided"), _final_defect.label("defect")),
    )
    is_plain = (inspections.c.verdict == "pass") & ~_is_reviewed
    is_counted = or_(inspections.c.verdict.is_(None), ~is_plain)
    return _joined(select(*columns, func.count().label("images"))).where(*_within(span), is_counted).group_by(*columns)


def by_board_question(span: DefectSpan) -> Question:
    of_board = select(func.count()).where(inspections.c.board_id == boards.c.board_id).correlate(boards)
    counted = (
        select(_day_of(span).label("day"), boards.c.lot, boards.c.station, of_board.scalar_subquery().label("images"))
        .where(*_within(span))
        .subquery()
    )
    columns = (counted.c.day, counted.c.lot, counted.c.station)
    query = select(*columns, func.count().label("boards"), func.sum(counted.c.images).label("images"))
    return query.group_by(*columns)


def by_component_question(span: DefectSpan) -> Question:
    component = inspections.c.component
    return (
        select(component, func.count().label("images"))
        .select_from(boards)
        .join(inspections, inspections.c.board_id == boards.c.board_id)
        .where(*_within(span))
        .group_by(component)
    )


def images_question(span: DefectSpan, only: ImageFilter, before: int | None) -> Question:
    """Select the images behind a number, newest first, older than the image `before`."""
    where = [*_within(span), *_equal((_final, only.final), (inspections.c.component, only.component))]
    where += [*_equal((_final_defect, only.defect), missing="-"), inspections.c.status == "done"]
    if only.day:
        where += _between(span.plant.days(_date(only.day)))
    kinds = {
        "false_call": [inspections.c.verdict == "fail", _newest.c.verdict == "pass"],
        "escape": [inspections.c.verdict == "pass", _newest.c.verdict == "fail"],
        "reviewed": [_is_reviewed],
    }
    if before is not None:
        where.append(inspections.c.inspection_id < before)
    query = _joined(
        select(
            *(inspections.c.inspection_id, inspections.c.board_id, boards.c.completed_at, boards.c.board_type),
            *(boards.c.serial, boards.c.attempt, boards.c.lot, boards.c.station, inspections.c.component),
            *(inspections.c.designator, inspections.c.verdict.label("said"), inspections.c.defect.label("said_defect")),
            *(_final.label("final"), _final_defect.label("defect"), _newest.c.reviewer, _newest.c.at, _newest.c.note),
        )
    ).where(*where, *kinds.get(only.kind, []))
    return query.order_by(inspections.c.inspection_id.desc())


def _choices(database: Database) -> dict[str, list[str]]:
    """Return each filter's values over all closed boards: the index on them is read once."""

    def values(column: ColumnElement[str]) -> list[str]:
        question = select(column, func.count()).where(column.is_not(None), boards.c.completed_at.is_not(None))
        question = question.group_by(column).order_by(func.max(boards.c.board_id).desc())
        return [row[0] for row in database.rows(question, limit=_MAX_ROWS)]

    return {"type": values(boards.c.board_type), "lot": values(boards.c.lot), "station": values(boards.c.station)}


def _joined(query: Question) -> Question:
    return (
        query.select_from(boards)
        .join(inspections, inspections.c.board_id == boards.c.board_id)
        .join(_newest, _newest.c.inspection_id == inspections.c.inspection_id, isouter=True)
    )


def _within(span: DefectSpan) -> list[ColumnElement[bool]]:
    return [
        *_between(span.plant.days(span.since, span.until)),
        *_equal((boards.c.board_type, span.type)),
        *_equal((boards.c.lot, span.lot), (boards.c.station, span.station), missing="-"),
    ]


def _between(edges: Span) -> list[ColumnElement[bool]]:
    return [boards.c.completed_at >= edges.since, boards.c.completed_at < edges.until]


def _day_of(span: DefectSpan) -> ColumnElement[str]:
    """Return a board's day; in the plant's zone by bisection, so that a year costs nine comparisons."""
    if span.plant.timezone == "UTC":
        return _utc_day
    days = [span.since + timedelta(days=number) for number in range((span.until - span.since).days + 1)]

    def among(days: Sequence[date]) -> ColumnElement[str]:
        if len(days) == 1:
            return literal_column(f"'{days[0]}'")
        later = days[len(days) // 2 :]
        begins = literal_column(f"'{span.plant.days(later[0]).since}'")
        return case((boards.c.completed_at < begins, among(days[: len(days) // 2])), else_=among(later))

    return among(days)


def _equal(*filters: tuple[ColumnElement[Any], str], missing: str | None = None) -> list[ColumnElement[bool]]:
    return [column.is_(None) if value == missing else column == value for column, value in filters if value]
