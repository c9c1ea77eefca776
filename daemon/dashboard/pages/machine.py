"""The page Machine: executors and queues of the last minutes, temperature, disks, retention, versions, processes.

The timeline comes from the daemon's memory: exact to the millisecond, and lost at a restart.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from daemon.config.settings import Config
from daemon.dashboard.pages.drawings import Series, work_lanes
from daemon.dashboard.site.database import CachedAnswer, Database, ask_or
from daemon.dashboard.site.site import Site
from daemon.host.temperature import Thermometer
from daemon.storage.database.connections import sqlite_path
from daemon.storage.disk_space import DiskSpace, places
from daemon.units import count_text, size_text

#: Seconds that the timeline may show: names can be read in the shortest, shifts of work seen in the longest.
WINDOWS = (5, 10, 30, 60, 300)
#: The charts of queues and executors: how far they look back, and points of a line.
_CHART_S, _MAX_POINTS = 600, 600
_MAX_TABLE_ROWS = 200
#: Images of which the growth of disks is computed, and rules or versions listed.
_RECENT_IMAGES = 20_000
_MAX_VERSIONS = 8
_DAY_S = 86400.0
#: Files of one folder that are counted; the journal has a few, the quarantine is bounded by its bytes.
_MAX_FILES = 20_000
#: Growth is averaged over at least this long.
_MIN_GROWTH_S = 60.0
#: A disk with less free than this share is shown as tight; alert rules have their own limit.
_TIGHT = 0.1

_TODAY = """
SELECT count(*) AS images_today, min(accepted_at) AS since,
       coalesce(sum(CASE WHEN image_path IS NOT NULL THEN image_bytes ELSE 0 END), 0) AS kept_bytes_today
FROM inspections WHERE inspection_id > :after AND accepted_at >= :today
"""
_KEPT = """
SELECT count(*) AS kept_images, coalesce(sum(image_bytes), 0) AS kept_bytes, min(completed_at) AS oldest_image
FROM inspections WHERE image_path IS NOT NULL
"""
_OLDEST = "SELECT completed_at FROM inspections WHERE seq IS NOT NULL ORDER BY seq LIMIT 1"
_RESULTS = "SELECT last_seq - pruned FROM stream_position"
_PENDING = "SELECT task, count(*) AS images, sum(length) AS bytes FROM pending GROUP BY task ORDER BY task"
_RULES = f"SELECT rules_version, loaded_at FROM rules_versions ORDER BY loaded_at DESC LIMIT {_MAX_VERSIONS}"  # noqa: S608
_EXPERTS = f"""
SELECT expert, expert_version, first_used_at FROM expert_versions
ORDER BY first_used_at DESC, expert LIMIT {_MAX_VERSIONS}
"""  # noqa: S608

#: Field of control's `waits`, label and tone in the chart.
_WAITS = (
    ("under_way", "under way", "muted"),
    ("waiting", "waiting", "accent"),
    ("unloaded", "waiting for a load", "review"),
)


Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DiskUse:
    """One disk, the parts of the line on it, and `full_in_s` at today's rate: None if it does not fill."""

    places: Sequence[str]
    free_bytes: int
    size_bytes: int
    full_in_s: float | None
    because: str

    @property
    def is_tight(self) -> bool:
        return self.free_bytes < _TIGHT * self.size_bytes or (self.full_in_s or _DAY_S) < _DAY_S


def router(site: Site) -> APIRouter:
    routes = APIRouter()
    now = CachedAnswer(0.9, _machine(site))
    for seconds in WINDOWS:
        work = partial(_timeline, site, seconds)
        site.add_part(f"timeline-{seconds}", "_timeline.html", work, "The daemon shows no timeline", 2.0)
    site.add_part("machine-tiles", "_machine_tiles.html", now.get, "", 1.0)
    site.add_part("machine", "_machine.html", now.get, "", 2.0)
    site.add_part("machine-charts", "_machine_charts.html", lambda: _charts(site), "The daemon shows no queues", 10.0)

    @routes.get("/machine")
    def page(request: Request, seconds: Literal["5", "10", "30", "60", "300"] = "60") -> HTMLResponse:
        return site.page(request, "machine.html", window=int(seconds), windows=WINDOWS)

    return routes


def _timeline(site: Site, seconds: int) -> dict[str, Any]:
    work = site.ask_daemon("timeline", seconds=seconds)
    lanes = work_lanes(work, [row["name"] for row in site.status()["executors"]])
    return {"lanes": lanes, "totals": _totals(work), "work": work, "seconds": seconds}


def _charts(site: Site) -> dict[str, Any]:
    points = steps(site.ask_daemon("waits", seconds=_CHART_S)["samples"], _CHART_S, _MAX_POINTS)
    if not points:
        return {"waits": [], "busy": [], "most": 0, "seconds": _CHART_S}
    newest = points[-1]
    waits = [
        Series(label, tone, f"{newest[key]:,}", [(point["ago_s"], point[key]) for point in points])
        for key, label, tone in _WAITS
    ]
    executors = sorted({name for point in points for name in point["busy"]})
    busy = [
        Series(
            *(name, f"other{1 + number % 4}", f"{100 * newest['busy'].get(name, 0.0):.0f} %"),
            [(point["ago_s"], point["busy"].get(name, 0.0)) for point in points],
        )
        for number, name in enumerate(executors)
    ]
    most = max(value for one in waits for _, value in one.points) or 1
    return {"waits": waits, "busy": busy, "most": most, "seconds": _CHART_S}


def _machine(site: Site) -> Callable[[], dict[str, Any]]:
    """Return a function that gathers the line's state and contents. Costly answers are cached."""
    thermometer, no_answer = Thermometer(), "No answer from the daemon"
    holdings = CachedAnswer(30.0, lambda: _holdings(site.database, site.day_began()))
    file_sizes = CachedAnswer(5.0, lambda: _file_sizes(site.config))
    newest_pruning = CachedAnswer(5.0, lambda: site.ask_daemon("prune", begin=False))

    def gather() -> dict[str, Any]:
        problems: list[str] = []
        status: Mapping[str, Any] = ask_or({}, site.status, no_answer, problems)
        running: Sequence[Any] = ask_or([], lambda: site.ask_daemon("queues")["running"], no_answer, problems)
        pruned: Mapping[str, Any] | None = ask_or(None, newest_pruning.get, no_answer, problems)
        held: Facts | None = ask_or(None, holdings.get, "Database", problems)
        files = file_sizes.get()
        return {
            "status": status,
            "running": {row["executor"]: row["expert"] for row in running},
            "problems": list(dict.fromkeys(problems)),
            "heat": thermometer.read(),
            "disks": disk_uses(site.config, files, held, datetime.now(UTC)),
            "files": files,
            "held": held,
            "pruned": pruned,
            "retention": site.config.retention,
            "duration": duration,
        }

    return gather


def _totals(work: Mapping[str, Any]) -> list[tuple[str, str, int, int]]:
    """Return (executor or pool, expert, images, batches or loads), the most first: the chart in words."""
    counts: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for row in work["batches"]:
        counts[row["executor"], row["expert"]][0] += row["images"]
        counts[row["executor"], row["expert"]][1] += 1
    for row in work["loads"]:
        counts[f"loads into {row['pool']}", row["expert"]][1] += 1
    totals = [(place, expert, images, count) for (place, expert), (images, count) in counts.items()]
    return sorted(totals, key=lambda row: (row[0], -row[3]))[:_MAX_TABLE_ROWS]


def steps(samples: Sequence[Mapping[str, Any]], seconds: float, max_points: int) -> list[Mapping[str, Any]]:
    """Return the points of a step chart; of too many, the one with the most waiting stands for its neighbours."""
    points: list[Mapping[str, Any]] = []
    for sample in samples:
        ago_s = min(sample["ago_s"], seconds)
        if points and points[-1]["ago_s"] - ago_s > 2.0:
            points.append({**points[-1], "ago_s": ago_s + 1.0})
        points.append({**sample, "ago_s": ago_s})
    if points and points[-1]["ago_s"] > 2.0:
        points.append({**points[-1], "ago_s": 0.0, "busy": dict.fromkeys(points[-1]["busy"], 0.0)})
    every = -(-len(points) // max_points) if points else 1
    groups = [points[first : first + every] for first in range(0, len(points), every)]
    return [max(group, key=lambda point: point["waiting"]) for group in groups]


# Disks and files


def _holdings(database: Database, day_began: str) -> Facts:
    """Return counts and versions in the database, and today's part of them. Times are None if there is nothing."""
    after = database.id_before_newest(_RECENT_IMAGES)
    (today,) = database.rows(_TODAY, {"after": after, "today": day_began}, limit=1)
    (kept,) = database.rows(_KEPT, limit=1)
    oldest = database.first(_OLDEST)
    return {
        **today._mapping,
        **kept._mapping,
        "oldest_result": oldest.completed_at if oldest else None,
        "results": database.number(_RESULTS),
        "pending": database.rows(_PENDING, limit=10),
        "rules": database.rows(_RULES, limit=_MAX_VERSIONS),
        "experts": database.rows(_EXPERTS, limit=_MAX_VERSIONS),
    }


def _file_sizes(config: Config) -> Facts:
    database = sqlite_path(config.database)
    return {
        "database_bytes": _bytes(database),
        "wal_bytes": _bytes(database.with_name(database.name + "-wal")),
        "journal_bytes": _bytes(config.journal),
        "quarantine_bytes": _bytes(config.quarantine),
    }


def _bytes(place: Path) -> int | None:
    """Return the bytes of a file, or of a folder's files; None if unreadable."""
    try:
        if not place.is_dir():
            return place.stat().st_size
        with os.scandir(place) as entries:
            files = [entry for entry in islice(entries, _MAX_FILES) if entry.is_file(follow_symlinks=False)]
            return sum(file.stat(follow_symlinks=False).st_size for file in files)
    except OSError:
        return None


def disk_uses(config: Config, files: Facts, held: Facts | None, now: datetime) -> list[DiskUse]:
    spaces = DiskSpace(places(config)).look()
    rates = growth(config, files, held, now)
    by_disk: defaultdict[int, list[str]] = defaultdict(list)
    for name, space in spaces.items():
        by_disk[space.disk].append(name)
    uses: list[DiskUse] = []
    for names in by_disk.values():
        space, rate, full_in_s = spaces[names[0]], sum(rates.get(name, 0.0) for name in names), None
        if not rates:
            because = "no image came today"
        elif rate <= 0:
            because = "nothing on it grows, or retention keeps up"
        else:
            full_in_s, because = space.free_bytes / rate, f"{size_text(rate * 3600)} an hour"
        uses.append(DiskUse(names, space.free_bytes, space.total_bytes, full_in_s, because))
    return uses


def growth(config: Config, files: Facts, held: Facts | None, now: datetime) -> dict[str, float]:
    """Return today's growth of each place in bytes a second. The journal has none: done segments are deleted."""
    if held is None or held["since"] is None:
        return {}
    seconds = max(_MIN_GROWTH_S, (now - datetime.fromisoformat(held["since"])).total_seconds())
    rates = {"images": held["kept_bytes_today"] / seconds}
    if config.retention.images_bytes is not None or config.retention.images_for is not None:
        rates["images"] = 0.0  # retention deletes as much as comes
    if files["database_bytes"] and held["results"] and config.retention.results_for is None:
        rates["database"] = files["database_bytes"] / held["results"] * held["images_today"] / seconds
    return rates


def duration(seconds: float | None) -> str:
    """Format a duration in the largest unit that fits twice."""
    if seconds is None:
        return "–"
    for unit, length_s in (("years", 365 * _DAY_S), ("days", _DAY_S), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length_s:
            number = seconds / length_s
            return f"more than 10 {unit}" if unit == "years" and number > 10 else f"{number:.0f} {unit}"
    return count_text(round(seconds), "second")
