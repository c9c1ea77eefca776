"""What the Machine page knows of this PC and the files on it: disks, their fill and what fills them, temperatures.

Looked at by the web process itself: the daemon has other things to do.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from daemon.config.settings import Config
from daemon.dashboard.pages.questions_machine import Holdings
from daemon.storage.database.connections import sqlite_path
from daemon.storage.disk_space import DiskSpace, Space, places
from daemon.units import size_text

_DAY_S = 86400.0
#: Files of one folder that are counted; the journal has a few, the quarantine is bounded by its bytes.
_FILES = 20_000
#: A rate over less than this says nothing.
_LEAST_S = 60.0
#: With less free than this the picture warns; alert rules have their own limit.
_TIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Disk:
    """One disk and what of the line lies on it. `full_in_s` is None where it does not fill."""

    places: Sequence[str]
    free_bytes: int
    size_bytes: int
    full_in_s: float | None
    because: str

    @property
    def is_tight(self) -> bool:
        return self.free_bytes < _TIGHT * self.size_bytes or (self.full_in_s or _DAY_S) < _DAY_S


@dataclass(frozen=True, slots=True)
class Files:
    """Bytes on disk of each part of the line; None where it cannot be read."""

    database_bytes: int | None
    wal_bytes: int | None
    journal_bytes: int | None
    quarantine_bytes: int | None


def files(config: Config) -> Files:
    database = sqlite_path(config.database)
    wal = database.with_name(database.name + "-wal") if database else None
    return Files(_file(database), _file(wal), _folder(config.journal), _folder(config.quarantine))


def disks(config: Config, known: Files, held: Holdings | None, now: datetime) -> list[Disk]:
    """The disks of journal, images and database, each once, and when they are full at today's rate."""
    spaces = DiskSpace(places(config), config.retention.reserve).look()
    rates = growth(config, known, held, now)
    by_disk: dict[int, list[str]] = {}
    for name, space in spaces.items():
        by_disk.setdefault(space.disk, []).append(name)
    return [_disk(names, spaces[names[0]], rates) for names in by_disk.values()]


def growth(config: Config, known: Files, held: Holdings | None, now: datetime) -> dict[str, float]:
    """Bytes a second that each place gets more, by what came today; a journal's segments go as they are done."""
    if held is None or held.since is None:
        return {}
    seconds = max(_LEAST_S, (now - datetime.fromisoformat(held.since)).total_seconds())
    rates = {"images": held.kept_bytes_today / seconds}
    if config.retention.images_bytes is not None or config.retention.images_for is not None:
        rates["images"] = 0.0  # retention lets as much go as comes
    if known.database_bytes and held.results and config.retention.results_for is None:
        rates["database"] = known.database_bytes / held.results * held.images_today / seconds
    return rates


def _disk(names: Sequence[str], space: Space, rates: Mapping[str, float]) -> Disk:
    rate = sum(rates.get(name, 0.0) for name in names)
    full_in_s = None
    if not rates:
        because = "no image came today"
    elif rate <= 0:
        because = "nothing on it grows, or retention keeps up"
    else:
        full_in_s, because = space.free_bytes / rate, f"{size_text(rate * 3600)} an hour"
    return Disk(names, space.free_bytes, space.total_bytes, full_in_s, because)


def duration(seconds: float | None) -> str:
    """For people: the largest unit that fits."""
    if seconds is None:
        return "–"
    for unit, length in (("years", 365 * _DAY_S), ("days", _DAY_S), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            number = seconds / length
            return f"more than 10 {unit}" if unit == "years" and number > 10 else f"{number:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def retention(config: Config) -> list[tuple[str, str]]:
    """What is kept how long, in words, by coserve.yaml."""
    kept = config.retention
    pictures = ", ".join(kept.keep) or "none"
    return [
        ("Pictures that stay", pictures),
        ("For how long", duration(kept.images_for) if kept.images_for else "no limit (images_for)"),
        ("At most", size_text(kept.images_bytes) if kept.images_bytes else "no limit (images_bytes)"),
        ("Free on their disk", size_text(kept.free) if kept.free else "no floor (free)"),
        ("Results stay", duration(kept.results_for) if kept.results_for else "for ever (results_for)"),
        ("Never filled", f"{size_text(kept.reserve)}, or an eighth of a small disk (reserve)"),
        ("Refused images", f"at most {size_text(kept.quarantine)} (quarantine)"),
    ]


def today_begins() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}T00:00:00.000Z"


def _file(path: Path | None) -> int | None:
    try:
        return path.stat().st_size if path else None
    except OSError:
        return None


def _folder(folder: Path) -> int | None:
    """Bytes of a folder's files, one level deep."""
    total = 0
    try:
        with os.scandir(folder) as entries:
            for number, entry in enumerate(entries):
                if number >= _FILES:
                    break
                total += entry.stat(follow_symlinks=False).st_size if entry.is_file(follow_symlinks=False) else 0
    except OSError:
        return None
    return total


def steps(samples: Sequence[Mapping[str, Any]], now_s: float, seconds: float, most: int) -> list[Mapping[str, Any]]:
    """Samples as points of a chart: a value holds until the next sample, the last until now; at most so many.

    Where there are too many, of each few neighbours the one with the most waiting is shown.
    """
    points: list[dict[str, Any]] = []
    for number, sample in enumerate(samples):
        at_s = now_s - min(sample["ago_s"], seconds)
        if points and at_s - points[-1]["at_s"] > 2.0:
            points.append({**points[-1], "at_s": at_s - 1.0})
        points.append({**sample, "at_s": at_s})
        if number == len(samples) - 1 and now_s - at_s > 2.0:
            points.append({**sample, "at_s": now_s, "busy": dict.fromkeys(sample["busy"], 0.0)})
    every = -(-len(points) // most) if points else 1
    groups = [points[first : first + every] for first in range(0, len(points), every)]
    return [max(group, key=lambda one: one["waiting"]) for group in groups]
