"""What a cache of experts did, in counts that add up, and how good predictions were.

A fetch is *blocking* where computing had to wait for it at its first use, however short the rest of the way was, and
*overlapped* where it was there in time. A prefetch that is waited for at once is therefore blocking.
"""

from dataclasses import dataclass, fields
from itertools import groupby
from operator import add, attrgetter, sub
from typing import Literal, Self

import torch

from experts.moe.gating import ForwardStep, Routing


@dataclass(slots=True)
class FetchCounts:
    """Everything since the start, or a difference of two such accounts."""

    #: Experts that ran, once for each layer and step; of these, what the gate found when it had spoken: ready in a
    #: slot, on the way already, or not even begun.
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
    #: Loads that ended in an error; prefetches withdrawn; prefetches for which nobody could make room.
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    #: Read from where experts lie, as they are stored there.
    bytes_moved: int = 0
    #: Seconds that computing stood still for experts, and seconds that transfers took in all.
    wait_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def fetches(self) -> int:
        """Loads while serving."""
        return self.fetches_demand + self.fetches_prefetch

    @property
    def hit_rate(self) -> float:
        """Of the experts that ran, those ready when the gate had spoken; 0 where none ran."""
        return self.hits / self.served if self.served else 0.0

    def copy(self) -> "FetchCounts":
        return FetchCounts(*_values(self))

    def __add__(self, other: "FetchCounts") -> "FetchCounts":
        return FetchCounts(*map(add, _values(self), _values(other)))

    def __sub__(self, other: "FetchCounts") -> "FetchCounts":
        return FetchCounts(*map(sub, _values(self), _values(other)))

    def as_dict(self) -> dict[str, float]:
        """For a report: every count by its name."""
        return dict(zip(_COUNTS, _values(self), strict=True))


#: Why an expert is loaded.
FetchReason = Literal["startup", "demand", "prefetch"]

#: Layers whose predictions wait to be counted.
_MANY = 512

#: Two events of a GPU's stream with nothing between them are some microseconds apart.
_NO_WAIT_S = 20e-6

_COUNTS = tuple(field.name for field in fields(FetchCounts))
_values = attrgetter(*_COUNTS)


@dataclass(frozen=True, slots=True)
class _Checked:
    """One layer of one step: (T, P) predicted and (T, k) chosen int64."""

    layer: int
    predicted: torch.Tensor
    chosen: torch.Tensor
    sentinel: int

    @property
    def width(self) -> int:
        return self.predicted.shape[-1]


@dataclass(slots=True)
class PredictionCounts:
    """How often experts were predicted, over tokens and layers where there was a prediction."""

    tokens: int = 0
    #: Tokens all of whose experts were predicted ("both hit" for top-2), and at least one of them.
    all_hit: int = 0
    any_hit: int = 0
    #: Experts chosen, and those of them that were predicted.
    chosen: int = 0
    found: int = 0

    @property
    def all_rate(self) -> float:
        return self.all_hit / self.tokens if self.tokens else 0.0

    @property
    def any_rate(self) -> float:
        return self.any_hit / self.tokens if self.tokens else 0.0

    @property
    def recall(self) -> float:
        return self.found / self.chosen if self.chosen else 0.0

    def add(self, predicted: torch.Tensor, chosen: torch.Tensor, sentinel: int) -> Self:
        """Count tokens. `predicted`: (T, P) or, the same for all tokens, (P,) int64; `chosen`: (T, k) int64.

        A chosen `sentinel` is no expert; a token with nothing else does not count. An expert predicted twice counts
        once.
        """
        real = chosen < sentinel
        guesses = predicted.reshape(1, 1, -1) if predicted.dim() == 1 else predicted[:, None, :]
        found = (chosen[:, :, None] == guesses).any(-1) & real
        wanted, got = real.sum(-1), found.sum(-1)
        rows = wanted > 0
        table = torch.stack([rows, (got == wanted) & rows, got > 0, wanted, got]).sum(-1).tolist()
        self.tokens += table[0]
        self.all_hit += table[1]
        self.any_hit += table[2]
        self.chosen += table[3]
        self.found += table[4]
        return self


class Predictions:
    """Predictions of a layer's experts against what its gate then said. Every predicting mode counts with this.

    Tokens are counted by the hundred, when they are looked at or have become many: on a GPU counting waits for the
    device, and takes as long for one token as for all.
    """

    def __init__(self, layers: int) -> None:
        self._of_layer = [PredictionCounts() for _ in range(layers)]
        self._open: dict[int, torch.Tensor] = {}
        self._checked: list[_Checked] = []

    @property
    def of_layer(self) -> list[PredictionCounts]:
        self._count()
        return self._of_layer

    def predict(self, layer: int, experts: torch.Tensor) -> None:
        """(T, P) int64 experts for the tokens of this step, or (P,) for all of them; replaces an earlier one."""
        self._open[layer] = experts

    def check(self, routing: Routing) -> None:
        """Compare with the gate's own choice; a layer without a prediction does not count."""
        predicted = self._open.pop(routing.layer, None)
        if predicted is None:
            return
        chosen = routing.index
        each = predicted.expand(len(chosen), -1) if predicted.dim() == 1 else predicted
        self._checked.append(_Checked(routing.layer, each, chosen, routing.logits.shape[-1]))
        if len(self._checked) >= _MANY:
            self._count()

    def forget(self) -> None:
        """A step has ended: what was predicted for it and not checked does not count."""
        self._open.clear()

    def total(self) -> PredictionCounts:
        """Over all layers."""
        sums = PredictionCounts()
        for one in self.of_layer:
            sums.tokens += one.tokens
            sums.all_hit += one.all_hit
            sums.any_hit += one.any_hit
            sums.chosen += one.chosen
            sums.found += one.found
        return sums

    def _count(self) -> None:
        checked, self._checked = self._checked, []
        alike = attrgetter("layer", "width")
        for (layer, _), group in groupby(sorted(checked, key=alike), alike):
            same = list(group)
            predicted, chosen = torch.cat([one.predicted for one in same]), torch.cat([one.chosen for one in same])
            self._of_layer[layer].add(predicted, chosen, same[0].sentinel)


class CacheMetrics:
    """The account of one cache: in all, by phase, and by request.

    A step's counts belong to each of its requests in full: what is fetched for a batch is fetched once for all.
    """

    def __init__(self, layers: int) -> None:
        self.counts = FetchCounts()
        self.of_phase = {"prefill": FetchCounts(), "decode": FetchCounts()}
        self.predictions = Predictions(layers)
        self._of_request: dict[str, FetchCounts] = {}
        self._at_begin = FetchCounts()

    def began(self, origin: FetchReason) -> None:
        """A load begins."""
        if origin == "demand":
            self.counts.fetches_demand += 1
        elif origin == "prefetch":
            self.counts.fetches_prefetch += 1
        else:
            self.counts.fetches_startup += 1

    def first_use(self, *, late: bool) -> None:
        """A fetched expert runs for the first time; `late` where computing waited for it."""
        if late:
            self.counts.blocking += 1
        else:
            self.counts.overlapped += 1

    def waited_on_device(self, wait_s: float, *, late: bool) -> None:
        """A GPU's stream waited for a copy, which it tells afterwards; `late` where the thread had waited too."""
        self.counts.wait_s += wait_s
        if wait_s > _NO_WAIT_S and not late:
            self.counts.overlapped -= 1
            self.counts.blocking += 1

    def begin(self, _step: ForwardStep) -> None:
        self._at_begin = self.counts.copy()

    def end(self, step: ForwardStep) -> None:
        spent = self.counts - self._at_begin
        self.of_phase[step.phase] = self.of_phase[step.phase] + spent
        for row in step.rows:
            if row.request:
                self._of_request[row.request] = self._of_request.get(row.request, FetchCounts()) + spent
        self.predictions.forget()

    def take(self, request: str) -> FetchCounts:
        """The counts of a request that has ended; they are kept no longer."""
        return self._of_request.pop(request, FetchCounts())
