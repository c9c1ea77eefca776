"""Counts of what a cache of experts did, and of how many predictions of experts were right.

A fetch is *blocking* if computing had to wait for it at its first use, even for an instant, and *overlapped* if it was
finished in time. A prefetch that is waited for at once is therefore blocking.
"""

from dataclasses import astuple, dataclass, fields
from operator import add, attrgetter, sub
from typing import Literal, Self

import torch

from experts.moe.gating import ForwardStep, Routing

#: Reasons for loading an expert.
FetchReason = Literal["startup", "demand", "prefetch"]

#: Predictions that are compared with the gate in one go.
_COUNTED_TOGETHER = 512
#: Two events of a GPU's stream with nothing between them are some microseconds apart.
_NO_WAIT_S = 20e-6


@dataclass(slots=True)
class FetchCounts:
    """Totals since the start, or the difference of two such totals."""

    #: Experts that ran, once for each layer and step. Of these, when the gate had spoken: ready in a slot, being
    #: loaded, or not even begun.
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
        """Loads while serving."""
        return self.fetches_demand + self.fetches_prefetch

    @property
    def hit_rate(self) -> float:
        """Share of the experts that ran which were ready when the gate had spoken; 0 if none ran."""
        return self.hits / self.served if self.served else 0.0

    def copy(self) -> "FetchCounts":
        return FetchCounts(*_values(self))

    def __add__(self, other: "FetchCounts") -> "FetchCounts":
        return FetchCounts(*map(add, _values(self), _values(other)))

    def __sub__(self, other: "FetchCounts") -> "FetchCounts":
        return FetchCounts(*map(sub, _values(self), _values(other)))


_values = attrgetter(*(field.name for field in fields(FetchCounts)))


@dataclass(slots=True)
class PredictionCounts:
    """Accuracy of the predicted experts, over tokens and layers that had a prediction."""

    tokens: int = 0
    #: Tokens all of whose experts were predicted ("both hit" for top-2), and tokens with at least one predicted.
    all_hit: int = 0
    any_hit: int = 0
    #: Experts that the gate chose, and those of them that were predicted.
    chosen: int = 0
    predicted: int = 0

    @property
    def all_rate(self) -> float:
        return self.all_hit / self.tokens if self.tokens else 0.0

    @property
    def any_rate(self) -> float:
        return self.any_hit / self.tokens if self.tokens else 0.0

    @property
    def recall(self) -> float:
        return self.predicted / self.chosen if self.chosen else 0.0

    def add(self, guesses: torch.Tensor, chosen: torch.Tensor, sentinel: int) -> Self:
        """Count tokens. `guesses`: (T, P) or, the same for all tokens, (P,) int64; `chosen`: (T, k) int64.

        A chosen `sentinel` is not an expert; a token with nothing else does not count. An expert predicted twice
        counts once.
        """
        real = chosen < sentinel
        guesses = guesses.reshape(1, 1, -1) if guesses.dim() == 1 else guesses[:, None, :]
        right = ((chosen[:, :, None] == guesses).any(-1) & real).sum(-1)
        needed = real.sum(-1)
        rows = needed > 0
        table = torch.stack([rows, (right == needed) & rows, right > 0, needed, right]).sum(-1).tolist()
        self.tokens += table[0]
        self.all_hit += table[1]
        self.any_hit += table[2]
        self.chosen += table[3]
        self.predicted += table[4]
        return self


class Predictions:
    """Compares predictions of a layer's experts with its gate's choice, for every mode that predicts.

    Tokens are counted by the hundred, when the counts are read or many are pending: on a GPU counting waits for the
    device, and takes as long for one token as for all.
    """

    def __init__(self, layers: int) -> None:
        self._of_layer = [PredictionCounts() for _ in range(layers)]
        self._open: dict[int, torch.Tensor] = {}
        #: By layer and number of guesses: (T, P) guesses, (T, k) chosen experts, and the sentinel.
        self._pending: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor, int]]] = {}
        self._pending_count = 0

    @property
    def of_layer(self) -> list[PredictionCounts]:
        self._count()
        return self._of_layer

    def total(self) -> PredictionCounts:
        """Return the counts of all layers together."""
        return PredictionCounts(*map(sum, zip(*map(astuple, self.of_layer), strict=True)))

    def predict(self, layer: int, experts: torch.Tensor) -> None:
        """Note (T, P) int64 experts for the tokens of this step, or (P,) for all of them; replaces an earlier note."""
        self._open[layer] = experts

    def check(self, routing: Routing) -> None:
        """Compare with the gate's own choice; a layer without a prediction does not count."""
        guesses = self._open.pop(routing.layer, None)
        if guesses is None:
            return
        guesses = guesses.expand(len(routing.index), -1) if guesses.dim() == 1 else guesses
        group = self._pending.setdefault((routing.layer, guesses.shape[-1]), [])
        group.append((guesses, routing.index, routing.logits.shape[-1]))
        self._pending_count += 1
        if self._pending_count >= _COUNTED_TOGETHER:
            self._count()

    def forget(self) -> None:
        """Drop predictions of a step that has ended without checking them."""
        self._open.clear()

    def _count(self) -> None:
        pending, self._pending, self._pending_count = self._pending, {}, 0
        for (layer, _), group in pending.items():
            guesses, chosen, sentinels = zip(*group, strict=True)
            self._of_layer[layer].add(torch.cat(guesses), torch.cat(chosen), sentinels[0])


class CacheMetrics:
    """The counts of one cache: in total, by phase, and by request.

    A step's counts belong to each of its requests in full: a batch's experts are fetched once for all of it.
    """

    def __init__(self, layers: int) -> None:
        self.counts = FetchCounts()
        self.of_phase = {"prefill": FetchCounts(), "decode": FetchCounts()}
        self.predictions = Predictions(layers)
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
        self.predictions.forget()

    def pop_request(self, request: str) -> FetchCounts:
        """Return the counts of a request that has ended, and forget them."""
        return self._of_request.pop(request, FetchCounts())
