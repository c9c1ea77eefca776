"""The page Machine: what the executors did in the last minutes, what waits, heat, disks, versions, processes beside.

The timeline is what the daemon itself remembers (control's `timeline` and `waits`): exact to the millisecond, without a
question to the database, and gone with the daemon.
"""

import time
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from daemon.dashboard.pages import machine_facts as facts
from daemon.dashboard.pages.questions_machine import Holdings, holdings
from daemon.dashboard.pages.time_picture import NARROW, WIDE, draw
from daemon.dashboard.site.cached_answers import Kept
from daemon.dashboard.site.database import NoDatabase, TooMuchToCount
from daemon.dashboard.site.site import Site
from daemon.host.temperature import Thermometer
from daemon.wire.control import ControlError

#: Seconds that the timeline may show: names are read in the shortest, shifts of work in the longest.
WINDOWS = (10, 60, 300)
_SEEN_KEEPS_S = 0.9
_HOLDINGS_KEEP_S = 30.0
_FILES_KEEP_S = 5.0
_PRUNED_KEEPS_S = 5.0
_POINTS = 600
_Seconds = Annotated[int, Query(ge=60, le=3600)]


def router(site: Site) -> APIRouter:
    routes = APIRouter()
    machine = _Machine(site)
    for seconds in WINDOWS:
        site.live.add(f"timeline-{seconds}", lambda seconds=seconds: machine.timeline(seconds), every_s=2.0)
    site.live.add("machine-tiles", machine.tiles, every_s=1.0)
    site.live.add("machine", machine.now, every_s=2.0)

    @routes.get("/machine")
    def page(request: Request, seconds: Literal["10", "60", "300"] = "60") -> HTMLResponse:
        window = int(seconds)
        return site.page(
            request,
            "machine.html",
            timeline=machine.timeline(window),
            tiles=machine.tiles(),
            now=machine.now(),
            window=window,
            windows=WINDOWS,
        )

    @routes.get("/machine-charts/waits.json")
    def waits(seconds: _Seconds = 600) -> dict[str, Any]:
        points = machine.points(seconds)
        names = {"under_way": "under way", "waiting": "waiting", "unloaded": "waiting for a load"}
        series = [
            {"label": label, "values": [point[key] for point in points], "tone": tone, "style": "area"}
            for (key, label), tone in zip(names.items(), ("muted", "accent", "review"), strict=True)
        ]
        return _over_time(points, series, seconds)

    @routes.get("/machine-charts/busy.json")
    def busy(seconds: _Seconds = 600) -> dict[str, Any]:
        points = machine.points(seconds)
        names = sorted({name for point in points for name in point["busy"]})
        series = [
            {
                "label": name,
                "values": [round(100 * point["busy"].get(name, 0.0), 1) for point in points],
                "tone": f"other{1 + at % 4}",
                "style": "line",
                "unit": "%",
            }
            for at, name in enumerate(names)
        ]
        return _over_time(points, series, seconds)

    return routes


_QUIET = "The daemon has noted nothing yet."


def _over_time(points: list[Any], series: list[dict[str, Any]], seconds: int) -> dict[str, Any]:
    """A chart whose axis is as long as its title says, however little the daemon has noted yet."""
    times = [point["at_s"] for point in points]
    now = time.time()
    return {"kind": "time", "x": times, "series": series, "from": now - seconds, "to": now, "empty": _QUIET}


class _Machine:
    """What is expensive is kept for all readers."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._thermometer = Thermometer()
        self._holdings: Kept[Holdings] = Kept(_HOLDINGS_KEEP_S, lambda: holdings(site.database, facts.today_begins()))
        self._files = Kept(_FILES_KEEP_S, lambda: facts.files(site.config))
        self._seen = Kept(_SEEN_KEEPS_S, self._look)
        self._pruned = Kept(_PRUNED_KEEPS_S, lambda: site.ask_daemon("prune", begin=False))

    def timeline(self, seconds: int) -> str:
        """A fragment: the picture and its table."""
        try:
            seen = self._site.ask_daemon("timeline", seconds=seconds)
            executors = [row["name"] for row in self._site.status()["executors"]]
        except ControlError as error:
            return self._site.render("_problem.html", title="The daemon shows no timeline", remedy=error.reason)
        pictures = [("wide", draw(seen, executors, WIDE)), ("narrow", draw(seen, executors, NARROW))]
        return self._site.render("_timeline.html", pictures=pictures, totals=_totals(seen), seen=seen, seconds=seconds)

    def tiles(self) -> str:
        """A fragment: what a technician asks first."""
        return self._site.render("_machine_tiles.html", **self._seen.get())

    def now(self) -> str:
        """A fragment: everything else that changes."""
        return self._site.render("_machine.html", **self._seen.get())

    def _look(self) -> dict[str, Any]:
        problems: list[str] = []
        status = _or(self._site.status, {}, problems, "the daemon")
        running = _or(lambda: self._site.ask_daemon("queues")["running"], [], problems, "the daemon")
        pruned = _or(self._pruned.get, None, problems, "the daemon")
        held = _or(self._holdings.get, None, problems, "the database")
        known = self._files.get()
        return {
            "status": status,
            "running": {row["executor"]: row["expert"] for row in running},
            "problems": list(dict.fromkeys(problems)),
            "heat": self._thermometer.read(),
            "disks": facts.disks(self._site.config, known, held, datetime.now(UTC)),
            "files": known,
            "held": held,
            "pruned": pruned,
            "retention": facts.retention(self._site.config),
            "duration": facts.duration,
        }

    def points(self, seconds: int) -> list[Any]:
        """ControlError where the daemon does not answer: the chart says so."""
        samples = self._site.ask_daemon("waits", seconds=seconds)["samples"]
        return facts.steps(samples, time.time(), seconds, _POINTS)


def _or(ask: Any, instead: Any, problems: list[str], who: str) -> Any:
    try:
        return ask()
    except TooMuchToCount:
        problems.append("What the database holds is not counted: it took longer than 5 s")
    except (ControlError, NoDatabase) as error:
        problems.append(f"No answer from {who}: {getattr(error, 'reason', error)}")
    return instead


def _totals(seen: Any) -> list[tuple[str, str, int, int]]:
    """(executor or pool, expert, images or loads, batches), the most first: the picture in words."""
    counted: dict[tuple[str, str, str], list[int]] = {}
    for row in seen["batches"]:
        found = counted.setdefault((row["executor"], row["expert"], "batch"), [0, 0])
        found[0] += row["images"]
        found[1] += 1
    for row in seen["loads"]:
        found = counted.setdefault((f"loads into {row['pool']}", row["expert"], "load"), [0, 0])
        found[1] += 1
    return sorted(
        ((place, expert, images, count) for (place, expert, _), (images, count) in counted.items()),
        key=lambda row: (row[0], -row[3]),
    )[:200]
