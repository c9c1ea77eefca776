"""The plant's clock: its days, hours and shifts as ranges of UTC, which is all that the database knows.

A day has 23 or 25 hours when the clock changes. A shift lasts until the next one begins; its day is the one on which it
began. Whatever begins at a time that the clock skips begins at the skip; at a time that comes twice, the first time.
"""

import itertools
import os
import re
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from zoneinfo import ZoneInfo, available_timezones

from daemon.units import utc_text, wall_seconds
from routing_rules.load import nearest

_DAY = timedelta(days=1)
_FORMATS = {
    "full": "%Y-%m-%d %H:%M:%S %Z",
    "short": "%m-%d %H:%M:%S",
    "minute": "%Y-%m-%d %H:%M",
    "time": "%H:%M:%S",
    "date": "%Y-%m-%d",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A range of time as the database writes it; `until` is excluded."""

    since: str
    until: str


@dataclass(frozen=True, slots=True)
class Shift(Span):
    name: str
    day: date


@dataclass(frozen=True)
class PlantTime:
    """The clock of one plant, in seconds since 1970. ValueError or OverflowError beyond the calendar."""

    timezone: str = "UTC"
    starts: tuple[tuple[str, time], ...] = ()

    @cached_property
    def zone(self) -> ZoneInfo:
        return ZoneInfo(self.timezone)

    @cached_property
    def shift_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in sorted(self.starts, key=itemgetter(1)))

    def at(self, day: date, clock: time = time()) -> float:
        """Return when the plant's clock first shows `clock` of `day`, or skips it."""
        wanted = datetime.combine(day, clock)
        early, late = sorted(wanted.replace(tzinfo=self.zone, fold=fold).timestamp() for fold in (0, 1))
        if self._shown(early) >= wanted:
            return early
        skipped = range(int(early), int(late) + 1)
        return float(skipped[bisect_left(skipped, wanted, key=self._shown)])

    def today(self, now_s: float) -> date:
        return self._shown(now_s).date()

    def days(self, first: date, last: date | None = None) -> Span:
        return Span(utc_text(self.at(first)), utc_text(self.at((last or first) + _DAY)))

    def hours(self, span: Span) -> list[Span]:
        """Return the clock hours that begin in `span`; the first and last may be shorter."""
        edges = [wall_seconds(span.since)]
        until_s = wall_seconds(span.until)
        while edges[-1] < until_s:
            shown = self._shown(edges[-1])
            edges.append(min(edges[-1] + 3600 - 60 * shown.minute - shown.second - shown.microsecond / 1e6, until_s))
        texts = [utc_text(edge) for edge in edges]
        return [Span(since, until) for since, until in itertools.pairwise(texts)]

    def shift(self, name: str, day: date) -> Shift:
        if name not in self.shift_names:
            known = f"expected one of {', '.join(self.shift_names)}"
            raise ValueError(f"no shift {name!r}: {known if self.starts else 'coserve.yaml has no plant.shifts'}")
        return next(shift for shift in self._shifts_of(day) if shift.name == name)

    def shift_at(self, at_s: float) -> Shift | None:
        text = utc_text(at_s)
        day = self.today(at_s)
        begun = [one for near in (day - _DAY, day) for one in self._shifts_of(near) if one.since <= text]
        return begun[-1] if begun else None

    def shifts(self, span: Span) -> list[Shift]:
        day, last = self.today(wall_seconds(span.since)) - _DAY, self.today(wall_seconds(span.until))
        days = [day + number * _DAY for number in range((last - day).days + 1)]
        found = [one for day in days for one in self._shifts_of(day)]
        return [one for one in found if max(one.since, span.since) < min(one.until, span.until)]

    def text(self, at: str, style: str = "full") -> str:
        return format(datetime.fromtimestamp(wall_seconds(at), self.zone), _FORMATS[style])

    def _shown(self, at_s: float) -> datetime:
        return datetime.fromtimestamp(at_s, self.zone).replace(tzinfo=None, fold=0)

    def _shifts_of(self, day: date) -> Sequence[Shift]:
        if not self.starts:
            return ()
        clocks = sorted(clock for _, clock in self.starts)
        moments = [utc_text(self.at(day, clock)) for clock in clocks] + [utc_text(self.at(day + _DAY, clocks[0]))]
        edges = zip(moments, moments[1:], self.shift_names, strict=False)
        return [Shift(since, until, name, day) for since, until, name in edges]


def zone_of_this_pc() -> str | None:
    """Return the name of the PC's own time zone, such as Europe/Berlin; None where it has none by name."""
    link = os.path.realpath("/etc/localtime").partition("/zoneinfo/")[2]
    with suppress(OSError):
        link = link or Path("/etc/timezone").read_text(encoding="utf-8").strip()
    name = os.environ.get("TZ", "").removeprefix(":") or link.removeprefix("posix/")
    return name if name in available_timezones() else None


def timezone_name(name: str) -> str:
    known = sorted(available_timezones())
    if name in known:
        return name
    close = nearest(name, known)
    hint = f"; did you mean {close}?" if close else ""
    raise ValueError(f"expected a time zone such as Europe/Berlin{hint}")


def shift_name(name: str) -> str:
    """Check the name of a shift. It has no `@`, which separates a shift from its day."""
    if not re.fullmatch(r"\w[\w.-]{0,31}", name):
        raise ValueError("expected a name of at most 32 letters, digits and _ . -")
    return name


def clock_time(text: str) -> str:
    try:
        time.fromisoformat(text if len(text) == 5 and text[2] == ":" else "")
    except ValueError:
        raise ValueError("expected a time of day from 00:00 to 23:59") from None
    return text
