"""How many images wait for something, in count and bytes, of each source and of all; and the limits.

Accepted ones wait for their verdict: they enter when intake takes them, and leave when their outcome is durable. Those
in memory wait for the disk. Any thread may call.
"""

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BacklogLimits:
    """The most that may wait: in all, and of one source."""

    images: int
    bytes: int
    source_images: int
    source_bytes: int


@dataclass(frozen=True, slots=True)
class Full:
    """Why an image has to wait outside, and when to try again."""

    reason: str
    retry_after_ms: int


@dataclass(slots=True)
class _Load:
    images: int = 0
    bytes: int = 0

    def add(self, size_bytes: int) -> None:
        self.images += 1
        self.bytes += size_bytes

    def take(self, size_bytes: int) -> None:
        self.images -= 1
        self.bytes -= size_bytes


class Backlog:
    """Counters with limits. An empty backlog takes any one image, so that none waits forever.

    The last eighth of the whole is kept for sources that hold less than their even share of it: publishers that
    flood the line cannot shut out one that sends now and then. Half of that is for regulars, sources that have had
    images before: a publisher that invents a source for each image cannot shut them out either.
    """

    _MIN_RETRY_MS = 20
    _MAX_RETRY_MS = 2000

    def __init__(self, limits: BacklogLimits, waits_for: str = "their verdict") -> None:
        self._waits_for = waits_for
        self._lock = threading.Lock()
        self._limits = limits
        self._all = _Load()
        self._sources: dict[str, _Load] = {}
        self._regulars = _Regulars()
        self._regulars_here: set[str] = set()
        self._released_at_s = time.monotonic()
        self._release_interval_s = 0.05

    @property
    def limits(self) -> BacklogLimits:
        return self._limits

    def change_limits(self, limits: BacklogLimits) -> None:
        """Put other limits in force; what is already in stays."""
        with self._lock:
            self._limits = limits

    @property
    def images(self) -> int:
        return self._all.images

    @property
    def bytes(self) -> int:
        return self._all.bytes

    def enter(self, source: str, size_bytes: int) -> Full | None:
        """Count an image in, or say why it has to wait."""
        with self._lock:
            mine = self._sources.get(source, _Load())
            full = self._full(source, mine, size_bytes)
            if full is None:
                self._add(source, size_bytes)
            return full

    def restore(self, source: str, size_bytes: int) -> None:
        """Count in an image that was accepted before a restart, whatever the limits are now."""
        with self._lock:
            self._add(source, size_bytes)

    def leave(self, source: str, size_bytes: int) -> None:
        """Count out an image whose outcome is durable, or that could not be made durable."""
        now_s = time.monotonic()
        with self._lock:
            mine = self._sources[source]
            mine.take(size_bytes)
            if mine.images == 0:
                del self._sources[source]
            forgotten = self._regulars.saw(source)
            self._all.take(size_bytes)
            for changed in (source, *forgotten):
                self._note_regular(changed)
            passed_s = min(now_s - self._released_at_s, 1.0)
            self._release_interval_s += (passed_s - self._release_interval_s) / 16
            self._released_at_s = now_s

    def room(self, source: str) -> int:
        """How many more images this source may bring in now, by count alone."""
        with self._lock:
            mine = self._sources.get(source)
            left_of_mine = self._limits.source_images - (mine.images if mine else 0)
            return max(0, min(left_of_mine, self._limits.images - self._all.images))

    def check(self) -> None:
        """Assert that the sources add up to the whole and nothing is negative."""
        with self._lock:
            loads = list(self._sources.values())
            assert self._all.images == sum(load.images for load in loads), "images of sources and of all differ"
            assert self._all.bytes == sum(load.bytes for load in loads), "bytes of sources and of all differ"
            assert all(load.images > 0 and load.bytes >= 0 for load in loads), "a source holds less than nothing"
            here = {source for source in self._sources if source in self._regulars}
            assert self._regulars_here == here, "regulars that have images here are not those that are counted"

    def _add(self, source: str, size_bytes: int) -> None:
        self._sources.setdefault(source, _Load()).add(size_bytes)
        self._all.add(size_bytes)
        self._note_regular(source)

    def _note_regular(self, source: str) -> None:
        if source in self._sources and source in self._regulars:
            self._regulars_here.add(source)
        else:
            self._regulars_here.discard(source)

    def _full(self, source: str, mine: _Load, size_bytes: int) -> Full | None:
        limits = self._limits
        if self._all.images == 0:
            return None
        if mine.images and (mine.images >= limits.source_images or mine.bytes + size_bytes > limits.source_bytes):
            over = mine.images - limits.source_images
            reason = f"source {source} has {mine.images} images and {mine.bytes} bytes waiting for {self._waits_for}"
            return self._wait(reason, over)
        sixteenths = self._share(source, mine, size_bytes)
        if (
            self._all.images >= max(1, limits.images * sixteenths // 16)
            or self._all.bytes + size_bytes > limits.bytes * sixteenths // 16
        ):
            over = self._all.images - limits.images * sixteenths // 16
            return self._wait(f"{self._all.images} images and {self._all.bytes} bytes wait for {self._waits_for}", over)
        return None

    def _share(self, source: str, mine: _Load, size_bytes: int) -> int:
        """How much of the whole this source may fill, in sixteenths."""
        is_regular = source in self._regulars
        # Among those that have images here now: who only came by some time ago takes nothing from anybody's share.
        if is_regular and self._is_modest(mine, size_bytes, len(self._regulars_here) + (mine.images == 0)):
            return 16
        if self._is_modest(mine, size_bytes, len(self._sources) + (mine.images == 0)):
            return 15 if len(self._regulars) - is_regular else 16
        return 14

    def _is_modest(self, mine: _Load, size_bytes: int, sources: int) -> bool:
        limits = self._limits
        return mine.images < limits.images // sources and mine.bytes + size_bytes <= limits.bytes // sources

    def _wait(self, reason: str, over_images: int) -> Full:
        """Retry once about as many verdicts as are too many, and an eighth of a publisher's burst, have come."""
        wait_ms = self._release_interval_s * 1000 * (max(0, over_images) + 8)
        return Full(reason, int(min(self._MAX_RETRY_MS, max(self._MIN_RETRY_MS, wait_ms))))


class _Regulars:
    """The sources that were seen twice or more, the newest so many; those seen once are on probation, as many."""

    _MOST = 256

    def __init__(self) -> None:
        self._known: OrderedDict[str, None] = OrderedDict()
        self._probation: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, source: str) -> bool:
        return source in self._known

    def __len__(self) -> int:
        return len(self._known)

    def saw(self, source: str) -> list[str]:
        """A source's image has left; the sources that are no regulars any more because of it."""
        seen_before = source in self._known or source in self._probation
        self._probation.pop(source, None)
        among = self._known if seen_before else self._probation
        among[source] = None
        among.move_to_end(source)
        return [among.popitem(last=False)[0]] if len(among) > self._MOST else []
