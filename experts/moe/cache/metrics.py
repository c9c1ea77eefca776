"""Counts of what a cache of experts did.

A fetch is *blocking* if computing had to wait for it at its first use, even for an instant, else *overlapped*. A
prefetch that is waited for at once is therefore blocking.
"""

from dataclasses import dataclass, fields
from operator import add, attrgetter, sub
from typing import Literal

from experts.moe.gating import ForwardStep

#: Reasons for loading an expert.
FetchReason = Literal["startup", "demand", "prefetch"]

#: Even adjacent events of a GPU stream are microseconds apart.
_NO_WAIT_S = 20e-6


@dataclass(slots=True)
class FetchCounts:
    """Totals since the start, or the difference of two such totals."""

    #: Experts that ran, once for each layer and step. Of these, at the gate's choice: ready in a slot, being loaded, or
    #: not begun.
    served: int = 0
    hits: int = 0
    joined: int = 0
    misses: int = 0
    #: Loads begun because an expert was to run, because it was predicted, and before anything ran.
    fetches_demand: int = 0
    fetches_prefetch: int = 0
    fetches_startup: int = 0
    #: Of the first two: first use waited for; first use found it ready; evicted without any use.
    blocking: int = 0
    overlapped: int = 0
    unused: int = 0
    #: Stored bytes that loads have read.
    bytes_moved: int = 0
    #: Seconds that computing stood still for experts, and seconds of all transfers.
    wait_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def fetches(self) -> int:
        return self.fetches_demand + self.fetches_prefetch

    @property
    def hit_rate(self) -> float:
        """Share of experts that were ready when the gate chose them; 0 if none ran."""
        return self.hits / self.served if self.served else 0.0

    def copy(self) -> "FetchCounts":
        return FetchCounts(*_values(self))

    def __add__(self, other: "FetchCounts") -> "FetchCounts":
        return FetchCounts(*map(add, _values(self), _values(other)))

    def __sub__(self, other: "FetchCounts") -> "FetchCounts":
        return FetchCounts(*map(sub, _values(self), _values(other)))


_values = attrgetter(*(field.name for field in fields(FetchCounts)))


class CacheMetrics:
    """Counts of one cache: in total, by phase, by request. A step's counts belong to each of its requests in full."""

    def __init__(self) -> None:
        self.counts = FetchCounts()
        self.of_phase = {"prefill": FetchCounts(), "decode": FetchCounts()}
        self._of_request: dict[str, FetchCounts] = {}
        self._at_begin = FetchCounts()

    def load_begun(self, reason: FetchReason) -> None:
        if reason == "demand":
            self.counts.fetches_demand += 1
        elif reason == "prefetch":
            self.counts.fetches_prefetch += 1
        else:
            self.counts.fetches_startup += 1

    def first_use(self, *, late: bool) -> None:
        """Count the first run of a fetched expert; `late` if computing waited for it."""
        if late:
            self.counts.blocking += 1
        else:
            self.counts.overlapped += 1

    def device_waited(self, wait_s: float, *, late: bool) -> None:
        """Count a wait of a GPU's stream, known only afterwards; `late` if the thread had waited too."""
        self.counts.wait_s += wait_s
        if wait_s > _NO_WAIT_S and not late:
            self.counts.overlapped -= 1
            self.counts.blocking += 1

    def begin_step(self) -> None:
        self._at_begin = self.counts.copy()

    def end_step(self, step: ForwardStep) -> None:
        spent = self.counts - self._at_begin
        self.of_phase[step.phase] = self.of_phase[step.phase] + spent
        for row in step.rows:
            if row.request:
                self._of_request[row.request] = self._of_request.get(row.request, FetchCounts()) + spent

    def pop_request(self, request: str) -> FetchCounts:
        return self._of_request.pop(request, FetchCounts())
