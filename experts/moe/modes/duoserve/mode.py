"""DuoServe-MoE: prefill streams each layer's experts past the computing; decode fetches what a predictor names.

Prefill (§5.2), two streams: each distinct expert of a layer is fetched once, the next one while this one computes, and
the first absent one of the next layer while its attention computes.

Decode (§5.3), three streams: when a layer's gate has spoken, the prediction stream predicts a layer ahead. First
synchronisation point: the gate is compared with what is there; experts that were missed are fetched, and each is
computed when it is there in full. Second: when the first expert has been computed *and* the prediction is there,
whichever comes last, the communication stream begins with the predicted layer. The first layer is not predicted.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from experts.moe.arch import MoeArch
from experts.moe.cache.slots import SlotCache
from experts.moe.gating import ExpertIterator, ExpertKey, ForwardStep, Routing
from experts.moe.model.mode import BaseMode
from experts.moe.modes.duoserve.fitting import load_predictors
from experts.moe.modes.duoserve.predictor import Predictor
from experts.moe.modes.duoserve.state import Paths, known
from experts.moe.modes.duoserve.stream import PredictionStream, prediction_stream
from experts.moe.modes.options import Options, read_options
from experts.moe.policy.duoserve import first_of_prefill, plan_prefetch
from experts.moe.trace import load_popularity
from experts.moe.weights.prepared import PreparedFiles

#: (rows, E): for each row's token how likely it chooses each expert of the layer.
_Prediction = Future[list[list[float]]]
#: Sequences whose last path is remembered; an engine has fewer in flight.
_REMEMBERED = 256


class _Options(Options, frozen=True):
    overlap: bool = True


class DuoServe(BaseMode):
    """`predictors` by the layer that they predict; `popularity` (L, E), both from training traces.

    `overlap=False` does the same work serially, for comparison: predict, fetch and wait, then go on.
    """

    name = "duoserve"

    def __init__(
        self, predictors: Mapping[int, Predictor], popularity: Sequence[Sequence[float]], *, overlap: bool = True
    ) -> None:
        super().__init__()
        self._predictors = predictors
        self._popularity = popularity
        self._overlap = overlap
        self._stream: PredictionStream | None = None
        self._layer = -1
        #: What the State Constructor keeps of this step: (rows, k) of each layer, of the last token of each row.
        self._index: list[torch.Tensor] = []
        self._weight: list[torch.Tensor] = []
        #: By row: the whole path of its token before, (L, k) each.
        self._paths: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._before: Paths | None = None
        self._predictions: dict[int, _Prediction] = {}

    @classmethod
    def open(cls, checkpoint: Path, options: Mapping[str, Any]) -> "DuoServe":
        """With what `coserve moe fit` made. Options: `overlap`. Raises ModelError."""
        chosen = read_options(_Options, "duoserve", checkpoint, options)
        prepared = PreparedFiles(checkpoint)
        popular, _ = load_popularity(prepared)
        return cls(load_predictors(prepared), popular.tolist(), overlap=chosen.overlap)

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        super().attach(cache, arch)
        if arch.encoder_layers:
            self._predictors = {}  # a decoder's tokens have no path through the encoder's layers

    def begin(self, step: ForwardStep) -> None:
        super().begin(step)
        self._layer = -1
        self._index.clear()
        self._weight.clear()
        self._predictions.clear()
        self._ends = [end - 1 for end in accumulate(row.tokens for row in step.rows)]
        self._before = self._recall(_names(step)) if step.phase == "decode" else None

    def route(self, routing: Routing) -> Routing:
        self._layer = routing.layer
        self._compare(routing)
        if self._predictors:
            several = len(routing.index) > len(self._ends)
            self._index.append(routing.index[self._ends] if several else routing.index)
            self._weight.append(routing.weight[self._ends] if several else routing.weight)
            for layer in self._due(routing.layer):
                self._predict(layer)
        return routing

    def experts(self, routing: Routing) -> ExpertIterator:
        if self.step.phase == "prefill":
            return self._prefill(routing)
        return self._decode(routing)

    def end(self, step: ForwardStep) -> None:
        if len(self._index) != self.arch.layers:
            return  # it failed half way
        index, weight = torch.stack(self._index, dim=1), torch.stack(self._weight, dim=1)
        for row, name in enumerate(_names(step)):
            self._paths.pop(name, None)
            self._paths[name] = index[row], weight[row]
        while len(self._paths) > _REMEMBERED:
            del self._paths[next(iter(self._paths))]

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _prefill(self, routing: Routing) -> ExpertIterator:
        yield from self.cache.serve(routing.layer, routing.wanted(), ahead=True)
        layer = routing.layer + 1
        if layer < self.arch.layers:
            share, tokens = self._popularity[layer], len(routing.index)
            first = first_of_prefill(share, self.cache.resident(layer), tokens, self.arch.top_k)
            if first is not None:
                self.cache.prefetch([ExpertKey(layer, first)])

    def _decode(self, routing: Routing) -> ExpertIterator:
        for turn, served in enumerate(self.cache.serve(routing.layer, routing.wanted(), ahead=self._overlap)):
            yield served
            if turn == 0 and self._overlap:
                self._fetch_when_predicted(routing.layer)
        if not self._overlap:
            self._fetch_when_predicted(routing.layer)

    def _compare(self, routing: Routing) -> None:
        """The first synchronisation point: the gate has overtaken what was predicted and not begun."""
        prediction = self._predictions.pop(routing.layer, None)
        if prediction is None:
            return
        self.cache.cancel(routing.layer)
        if prediction.cancel() or not prediction.done() or len(routing.index) != len(self._ends):
            return  # too late to be of use, or not of every token
        guess = torch.tensor(prediction.result(), device=routing.index.device).topk(self.arch.top_k).indices
        self.cache.metrics.predictions.predict(routing.layer, guess)
        self.cache.metrics.predictions.check(routing)

    def _predict(self, layer: int) -> None:
        before, predictor = self._before, self._predictors.get(layer)
        if before is None or predictor is None:
            return
        if self._stream is None:
            device = before.index.device
            self._stream = prediction_stream(device)
            self._predictors = {one: each.to(device) for one, each in self._predictors.items()}
            predictor = self._predictors[layer]
        sofar = Paths(torch.stack(self._index, dim=1), torch.stack(self._weight, dim=1))

        def work() -> list[list[float]]:
            return predictor.probabilities(sofar, before).tolist()

        self._predictions[layer] = self._stream.submit(work)

    def _due(self, spoken: int) -> Sequence[int]:
        """The layers to predict when the gate of layer `spoken` has spoken.

        The one that is farther goes first: after the first gate the next layer's guess may come too late, and would
        hold up the one behind it; it is withdrawn where it has not begun by then.
        """
        return [layer for layer in sorted(self._predictors, reverse=True) if known(layer) == spoken + 1]

    def _fetch_when_predicted(self, spoken: int) -> None:
        """The second synchronisation point, which no thread waits at."""
        for layer in self._due(spoken):
            prediction = self._predictions.get(layer)
            if prediction is None:
                continue
            if self._overlap:
                prediction.add_done_callback(partial(self._fetch, layer))
            else:
                self._fetch(layer, prediction)
                self.cache.quiesce()

    def _fetch(self, layer: int, prediction: _Prediction) -> None:
        """Carry out what the policy makes of a prediction; on either thread."""
        if prediction.cancelled() or self._layer >= layer:
            return
        slots = max(1, self.cache.slots // self.arch.layers)
        plan = plan_prefetch(prediction.result(), self.cache.resident(layer), slots, self.arch.top_k)
        self.cache.prefetch([ExpertKey(layer, expert) for expert in (*plan.keep, *plan.fetch)])

    def _recall(self, names: Sequence[str]) -> Paths | None:
        """The paths of the tokens before; nowhere, by the sentinel, for a row that has none. None where no row has."""
        known = [self._paths[name] for name in names if name in self._paths]
        if not known:
            return None
        index, weight = known[0]
        nowhere = torch.full_like(index, self.arch.experts), torch.zeros_like(weight)
        paths = [self._paths.get(name, nowhere) for name in names]
        return Paths(torch.stack([index for index, _ in paths]), torch.stack([weight for _, weight in paths]))


def _names(step: ForwardStep) -> list[str]:
    """What the rows are remembered by: anonymous ones by their place."""
    return [row.request or f"#{number}" for number, row in enumerate(step.rows)]
