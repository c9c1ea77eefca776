"""Limit the images and bytes per second of each source: a token bucket for each, of one second's worth.

Plain state: time comes in as an argument. A bucket is kept as the moment at which it is full again (GCRA), so that a
source that has been quiet needs no memory.
"""

from collections import OrderedDict
from dataclasses import dataclass

#: Sources that are remembered. Those beyond share one bucket: a publisher that invents names gains nothing by it.
_MAX_SOURCES = 4096
_OTHERS = ""
_BURST_S = 1.0


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Limits of each source, per second; None: no limit."""

    images_per_s: float | None = None
    bytes_per_s: float | None = None


@dataclass(slots=True)
class _Buckets:
    """The times at which a source's buckets are full again (seconds)."""

    images_full_s: float
    bytes_full_s: float

    @property
    def full_s(self) -> float:
        return max(self.images_full_s, self.bytes_full_s)


class Quotas:
    """`wait_s` changes nothing; `spend` takes what an image costs. One thread; other limits are another object."""

    def __init__(self, limits: QuotaLimits) -> None:
        self.limits = limits
        #: In the order of their last image.
        self._sources: OrderedDict[str, _Buckets] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sources)

    def wait_s(self, source: str, size_bytes: int, now_s: float) -> float:
        """Return the seconds until this source may send an image of `size_bytes`; 0 if it may now.

        An image that costs more than a whole bucket needs a full bucket.
        """
        buckets = self._sources.get(source) or self._sources.get(_OTHERS)
        if buckets is None or (source not in self._sources and len(self._sources) < _MAX_SOURCES):
            return 0.0
        images_s, bytes_s = self._costs_s(size_bytes)
        images_wait_s = buckets.images_full_s + min(images_s, _BURST_S) - _BURST_S - now_s if images_s else 0.0
        bytes_wait_s = buckets.bytes_full_s + min(bytes_s, _BURST_S) - _BURST_S - now_s if bytes_s else 0.0
        return max(0.0, images_wait_s, bytes_wait_s)

    def spend(self, source: str, size_bytes: int, now_s: float) -> None:
        """Take one image's cost; a large one may leave a debt that later images wait for."""
        images_s, bytes_s = self._costs_s(size_bytes)
        if not (images_s or bytes_s):
            return
        if source not in self._sources and len(self._sources) >= _MAX_SOURCES:
            self._forget_quiet_ones(now_s)
            source = source if len(self._sources) < _MAX_SOURCES else _OTHERS
        buckets = self._sources.setdefault(source, _Buckets(now_s, now_s))
        self._sources.move_to_end(source)
        buckets.images_full_s = max(buckets.images_full_s, now_s) + images_s
        buckets.bytes_full_s = max(buckets.bytes_full_s, now_s) + bytes_s

    def _costs_s(self, size_bytes: int) -> tuple[float, float]:
        """Return the share of each bucket that an image takes, as seconds of its filling."""
        images_per_s, bytes_per_s = self.limits.images_per_s, self.limits.bytes_per_s
        return 1 / images_per_s if images_per_s else 0.0, size_bytes / bytes_per_s if bytes_per_s else 0.0

    def _forget_quiet_ones(self, now_s: float) -> None:
        while self._sources and next(iter(self._sources.values())).full_s <= now_s:
            self._sources.popitem(last=False)
