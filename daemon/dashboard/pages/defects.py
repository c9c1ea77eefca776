"""The page Defects: what fails and where, what the line called wrongly, and the images behind every number."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import StringConstraints
from starlette.exceptions import HTTPException

from daemon.dashboard.pages import questions_defects as questions
from daemon.dashboard.pages.defects_account import VERDICTS, Account, Bar, Grouping, Tally, account
from daemon.dashboard.pages.questions_defects import Among, Span
from daemon.dashboard.pages.review_facts import Facts
from daemon.dashboard.site.cached_answers import KeptByKey
from daemon.dashboard.site.database import TooMuchToCount
from daemon.dashboard.site.site import Site
from daemon.units import spreadsheet_cell
from daemon.wire.frames import MAX_INTEGER

#: Groups of images that are no plain pass; a month of a large line has some ten thousand.
_MOST_GROUPS = 60_000
_MOST_CHOICES = 200
_PAGE_IMAGES = 100
_MOST_CSV_IMAGES = 10_000
_CHART_BARS = 15
_CHART_NAME = 20
#: Beside a line that needs every core the pages get a tenth of one: a million images then take some seconds more.
_COUNTS_S = 15.0
_KEEPS_S = 10.0
_MOST_KEPT = 8
_RANGES = {"today": 1, "7d": 7, "30d": 30}

Text = Annotated[str, StringConstraints(max_length=128)]
Day = Annotated[str, Query(pattern=r"^([0-9]{4}-[0-9]{2}-[0-9]{2})?$")]
Range = Literal["today", "7d", "30d", "own"]
Trend = Literal["day", "lot", "station", "component"]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The filters in the address. Days are UTC, as everywhere in the database; `until` is the last day."""

    range: Range
    since: date
    until: date
    type: str
    lot: str
    station: str
    by: Grouping

    @property
    def span(self) -> Span:
        after = self.until + timedelta(days=1)
        return Span(
            *(f"{self.since}T00:00:00.000Z", f"{after}T00:00:00.000Z"),
            board_type=self.type or None,
            lot=_none(self.lot),
            station=_none(self.station),
        )

    def query(self, **more: Any) -> str:
        """For a link: the same choice with `more`."""
        fields: dict[str, Any] = {"range": self.range}
        if self.range == "own":
            fields |= {"from": self.since, "to": self.until}
        fields |= {"type": self.type, "lot": self.lot, "station": self.station}
        fields |= {"by": self.by if self.by != "both" else ""} | more
        return urlencode({name: value for name, value in fields.items() if value not in ("", None)})


def chosen(
    range: Range = "7d",  # noqa: A002 - the name in the address
    first: Annotated[Day, Query(alias="from")] = "",
    last: Annotated[Day, Query(alias="to")] = "",
    type: Annotated[Text, Query()] = "",  # noqa: A002
    lot: Annotated[Text, Query()] = "",
    station: Annotated[Text, Query()] = "",
    by: Grouping = "both",
) -> Chosen:
    today = datetime.now(UTC).date()
    if range != "own":
        return Chosen(range, today - timedelta(days=_RANGES[range] - 1), today, type, lot, station, by)
    try:
        until = date.fromisoformat(last) if last else today
        since = date.fromisoformat(first) if first else until - timedelta(days=6)
    except (ValueError, OverflowError):
        raise HTTPException(422, "from, to: expected days such as 2026-11-21") from None
    if until == date.max:
        until -= timedelta(days=1)  # the calendar has an end, and a span ends on the day after
    if since > until:
        raise HTTPException(422, f"from {since} is after to {until}: turn them around")
    return Chosen(range, since, until, type, lot, station, by)


def among(
    final: Literal["", "pass", "fail", "review", "unknown"] = "",
    component: Annotated[Text, Query()] = "",
    defect: Annotated[Text, Query()] = "",
    day: Day = "",
    kind: Literal["", "false_call", "escape", "reviewed"] = "",
) -> Among:
    """`defect=-` is a fail without a code."""
    return Among(final or None, component or None, _none(defect), day or None, kind or None)


def router(site: Site) -> APIRouter:
    """The page, its charts' numbers, its lists and its CSV files."""
    routes = APIRouter()
    books = _Books(site)

    @routes.get("/defects")
    def page(request: Request, which: Annotated[Chosen, Depends(chosen)], trend: Trend = "day") -> HTMLResponse:
        found = books.account(which)
        tallies = _tallies(found, trend)
        return site.page(
            *(request, "defects.html"),
            which=which,
            found=found,
            bars=found.bars[:_MOST_CHOICES],
            trend=trend,
            tallies=tallies[:_MOST_CHOICES],
            more_tallies=max(0, len(tallies) - _MOST_CHOICES),
            choices=books.choices(),
            verdicts=VERDICTS,
            says=books.says(),
        )

    @routes.get("/defects/pareto.json")
    def pareto_chart(which: Annotated[Chosen, Depends(chosen)]) -> JSONResponse:
        return JSONResponse(_pareto_chart(books.account(which).bars[:_CHART_BARS], which.by))

    @routes.get("/defects/trend.json")
    def trend_chart(which: Annotated[Chosen, Depends(chosen)], trend: Trend = "day") -> JSONResponse:
        return JSONResponse(_trend_chart(_tallies(books.account(which), trend)[: _CHART_BARS * 2], trend))

    @routes.get("/defects/images")
    def images(
        request: Request,
        which: Annotated[Chosen, Depends(chosen)],
        only: Annotated[Among, Depends(among)],
        before: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None,
    ) -> HTMLResponse:
        rows = site.database.rows(questions.images(which.span, only, before), limit=_PAGE_IMAGES + 1)
        fields = {name: getattr(only, name) for name in ("final", "component", "day", "kind")}
        fields["defect"] = "-" if only.defect == "" else only.defect
        shown = rows[:_PAGE_IMAGES]
        return site.page(
            *(request, "defect_images.html"),
            which=which,
            only={name: value for name, value in fields.items() if value},
            rows=shown,
            before=shown[-1].inspection_id if len(rows) > _PAGE_IMAGES else None,
            is_first=before is None,
        )

    _add_files(routes, site, books)
    return routes


def _add_files(routes: APIRouter, site: Site, books: "_Books") -> None:
    @routes.get("/defects/pareto.csv")
    def pareto_file(which: Annotated[Chosen, Depends(chosen)]) -> Response:
        rows = [(bar.component, bar.defect, bar.count, bar.share, bar.cumulative) for bar in books.account(which).bars]
        return _csv(
            f"pareto-{which.since}-{which.until}", ("component", "defect", "count", "share", "cumulative"), rows
        )

    @routes.get("/defects/trend.csv")
    def trend_file(which: Annotated[Chosen, Depends(chosen)], trend: Trend = "day") -> Response:
        columns = (trend, "images", *VERDICTS, "fail_rate", "reviewed", "false_calls", "escapes")
        rows = [
            (
                *(tally.name, tally.judged, *tally.final.values(), tally.fail_rate),
                *(tally.reviewed, tally.false_calls, tally.escapes),
            )
            for tally in _tallies(books.account(which), trend)
        ]
        return _csv(f"{trend}-{which.since}-{which.until}", columns, rows)

    @routes.get("/defects/images.csv")
    def images_file(which: Annotated[Chosen, Depends(chosen)], only: Annotated[Among, Depends(among)]) -> Response:
        limit = _MOST_CSV_IMAGES
        rows = site.database.rows(questions.images(which.span, only, None), limit=limit + 1)
        if len(rows) > limit:
            raise TooMuchToCount(
                f"More than {limit} images: choose fewer days, or one lot (coserve export has them all)."
            )
        columns = tuple(rows[0]._fields) if rows else ("inspection_id",)
        return _csv(f"images-{which.since}-{which.until}", columns, rows)


class _Books:
    """Accounts of a span, kept for ten seconds: a page, its charts and its files ask for the same one."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._facts = Facts(site.database, site.pictures)
        self._kept = KeptByKey(_KEEPS_S, _MOST_KEPT)

    def account(self, which: Chosen) -> Account:
        return self._kept.get(which, lambda: self._account(which))

    def _account(self, which: Chosen) -> Account:
        rows, by_board, by_component = self._kept.get(which.span, lambda: self._ask(which.span))
        return account(rows, by_board, by_component, which.by)

    def choices(self) -> dict[str, list[str]]:
        """By filter, what may be chosen, newest first."""
        rows = self._site.database.rows
        return self._kept.get(
            "choices",
            lambda: {
                name: [row[0] for row in rows(ask, limit=_MOST_CHOICES)] for name, ask in questions.choices().items()
            },
        )

    def says(self) -> dict[str, str]:
        """The rules' label of each defect's code."""
        return {code.code: code.says for code in self._facts.codes() if code.says}

    def _ask(self, span: Span) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        rows = partial(self._site.database.rows, at_most_s=_COUNTS_S)
        found = rows(questions.not_passed(span), limit=_MOST_GROUPS + 1)
        boards = rows(questions.by_board(span), limit=_MOST_GROUPS + 1)
        if max(len(found), len(boards)) > _MOST_GROUPS:
            raise TooMuchToCount(
                "Too many different lots, stations and defects: choose fewer days, a lot or a station."
            )
        return found, boards, rows(questions.by_component(span), limit=_MOST_GROUPS)


def _none(value: str) -> str | None:
    """A filter's value: empty is all, `-` is what has none."""
    return None if not value else "" if value == "-" else value


def _tallies(found: Account, trend: str) -> list[Tally]:
    return {"day": found.days, "lot": found.lots, "station": found.stations, "component": found.components}[trend]


def _pareto_chart(bars: Sequence[Bar], by: Grouping) -> dict[str, Any]:
    def shares(values: Iterable[float]) -> list[float]:
        return [round(100 * value, 2) for value in values]

    unit = {"unit": "%"}
    return {
        "kind": "category",
        "x": [bar.name(by)[:_CHART_NAME] for bar in bars],
        "series": [
            {"label": "share", "values": shares(bar.share for bar in bars), "tone": "fail", "style": "bars"} | unit,
            {"label": "up to here", "values": shares(bar.cumulative for bar in bars), "tone": "accent"} | unit,
        ],
        "empty": "No fails in this time.",
    }


def _trend_chart(tallies: Sequence[Tally], trend: str) -> dict[str, Any]:
    def rates(values: Iterable[float | None]) -> list[float | None]:
        return [None if value is None else round(100 * value, 3) for value in values]

    is_time = trend == "day"
    style = "line" if is_time else "bars"
    series = [
        {
            "label": "fails",
            "values": rates(one.fail_rate for one in tallies),
            "tone": "fail",
            "style": style,
            "unit": "%",
        }
    ]
    if is_time:
        values = rates(one.false_call_rate for one in tallies)
        series.append({"label": "false calls", "values": values, "tone": "review", "style": "line", "unit": "%"})
    return {
        "kind": "category",
        "x": [(one.name or "none")[:_CHART_NAME] for one in tallies],
        "series": series,
        "empty": "No boards closed in this time.",
    }


def _csv(name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Response:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    for row in rows:
        writer.writerow([spreadsheet_cell(round(value, 6) if isinstance(value, float) else value) for value in row])
    headers = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
    return Response(text.getvalue().encode(), media_type="text/csv; charset=utf-8", headers=headers)
