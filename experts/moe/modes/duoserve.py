"""DuoServe-MoE: prefill streams each layer's experts past the computing; decode fetches what a predictor names.

Prefill (§5.2), two streams: each distinct expert of a layer is fetched once, the next one while this one computes, and
the first absent one of the next layer while its attention computes.

Decode (§5.3), three streams: when a layer's gate has spoken, the prediction stream predicts the next layer. First
synchronisation point: the gate is compared with what is resident; experts computed are there in full, and those missed
are fetched. Second: when the first expert has been computed *and* the prediction is there, whichever comes last, the
communication stream begins with the next layer. Neither holds up the computing. The first layer is not predicted.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from experts.moe.arch import MoeArch
from experts.moe.duoserve.fitting import load_predictors
from experts.moe.duoserve.predictor import Predictor
from experts.moe.duoserve.stream import PredictionStream, prediction_stream
from experts.moe.gating import ExpertKey, Routing, Served, Step
from experts.moe.modes.mode import BaseMode
from experts.moe.policy.duoserve import first_of_prefill, plan_prefetch
from experts.moe.prepared import Prepared
from experts.moe.slots import SlotCache
from experts.moe.trace import load_popularity

#: (T, E): for each token how likely it chooses each expert of the layer.
_Prediction = Future[list[list[float]]]


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
        self._layer = 0
        #: The State Constructor's trace of this step: (T, k) of each layer so far.
        self._index: list[torch.Tensor] = []
        self._weight: list[torch.Tensor] = []
        self._prediction: _Prediction | None = None

    @classmethod
    def open(cls, checkpoint: Path, options: Mapping[str, Any]) -> "DuoServe":
        """With what `coserve moe fit` made. Options: `overlap`. Raises ModelError."""
        prepared = Prepared(checkpoint)
        popular, _ = load_popularity(prepared)
        return cls(load_predictors(prepared), popular.tolist(), **options)

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        super().attach(cache, arch)
        # Slots that a layer has under the residency policy: predictions beyond them would push one another out.
        self._layer_slots = max(1, cache.slots // arch.layers)

    def begin(self, step: Step) -> None:
        super().begin(step)
        self._index.clear()
        self._weight.clear()
        self._prediction = None

    def route(self, routing: Routing) -> Routing:
        self._layer = routing.layer
        if self.step.phase == "decode":
            self._compare(routing)
            self._index.append(routing.index)
            self._weight.append(routing.weight)
            self._predict(routing.layer + 1, routing.hidden.device)
        return routing

    def experts(self, routing: Routing) -> Served:
        if self.step.phase == "prefill":
            return self._prefill(routing)
        return self._decode(routing) if self._overlap else self._decode_serially(routing)

    def resize(self, budget_bytes: int) -> None:
        super().resize(budget_bytes)
        self._layer_slots = max(1, self.cache.slots // self.arch.layers)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _prefill(self, routing: Routing) -> Served:
        yield from self.cache.serve(routing.layer, routing.wanted(), ahead=True)
        layer = routing.layer + 1
        if layer < self.arch.layers:
            share, tokens = self._popularity[layer], len(routing.index)
            first = first_of_prefill(share, self.cache.resident(layer), tokens, self.arch.top_k)
            if first is not None:
                self.cache.prefetch([ExpertKey(layer, first)])

    def _decode(self, routing: Routing) -> Served:
        prediction, layer = self._prediction, routing.layer + 1
        for turn, served in enumerate(self.cache.serve(routing.layer, routing.wanted(), ahead=True)):
            yield served
            if turn == 0 and prediction is not None:
                # The second synchronisation point, which no thread waits at.
                prediction.add_done_callback(lambda done: self._fetch(layer, done))

    def _decode_serially(self, routing: Routing) -> Served:
        yield from self.cache.serve(routing.layer, routing.wanted(), ahead=False)
        if self._prediction is not None:
            self._fetch(routing.layer + 1, self._prediction)
            self.cache.quiesce()

    def _compare(self, routing: Routing) -> None:
        """The first synchronisation point: what was predicted and not begun, the gate has overtaken."""
        prediction, self._prediction = self._prediction, None
        if prediction is None:
            return
        self.cache.cancel(routing.layer)
        if prediction.cancel() or not prediction.done():
            return  # too late to be of use; the prediction stream lags behind
        guess = torch.tensor(prediction.result(), device=routing.index.device).topk(self.arch.top_k).indices
        self.cache.metrics.predictions.predict(routing.layer, guess)
        self.cache.metrics.predictions.check(routing)

    def _predict(self, layer: int, device: torch.device) -> None:
        predictor = self._predictors.get(layer)
        if predictor is None:
            return
        if self._stream is None:
            self._stream = prediction_stream(device)
            self._predictors = {one: each.to(device) for one, each in self._predictors.items()}
        index, weight = torch.stack(self._index, dim=1), torch.stack(self._weight, dim=1)

        def work() -> list[list[float]]:
            return predictor.probabilities(index, weight).tolist()

        self._prediction = self._stream.submit(work)

    def _fetch(self, layer: int, prediction: _Prediction) -> None:
        """Carry out what the policy makes of a prediction; on either thread."""
        if prediction.cancelled() or self._layer >= layer:
            return
        plan = plan_prefetch(prediction.result(), self.cache.resident(layer), self._layer_slots, self.arch.top_k)
        self.cache.prefetch([ExpertKey(layer, expert) for expert in (*plan.keep, *plan.fetch)])
