"""DuoServe-MoE: prefill streams each layer's experts through the slots; decode fetches the experts a predictor names.

Prefill (§5.2), two streams: each distinct expert of a layer is fetched once, the next one while this one computes.

Decode (§5.3), three streams: when a layer's gate has chosen, the prediction stream predicts a later layer. First
synchronisation point: the gate is compared with the resident experts; missed ones are fetched, and each is computed
when it is there. Second: when the first expert has been computed *and* the prediction is finished, whichever is later,
the communication stream begins with the predicted layer. The first layer is not predicted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from experts.moe.gating import ExpertIterator, ExpertKey, ForwardStep, Routing
from experts.moe.model.mode import Mode, ModeOptions
from experts.moe.modes.duoserve.predictor import LayerPredictor, Paths, known_layers, load_predictors
from experts.moe.weights.prepared import PreparedFiles

#: (rows, E): probability of each expert of the layer for each row's token.
_Probabilities = list[list[float]]
#: Sequences whose last path is remembered; an engine has fewer in flight.
_MAX_PATHS = 256


class PredictionThread(ThreadPoolExecutor):
    """The third stream (§5.3): one thread that predicts, on a GPU with a CUDA stream of its own.

    torch releases the interpreter's lock while it computes, so two cores work at the same time. On a GPU the stream
    waits for the work given to the caller's stream so far, and the copy to the host blocks this thread only.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(max_workers=1, thread_name_prefix="moe-predict")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, work: Callable[[], _Probabilities]) -> "Future[_Probabilities]":
        """Compute `work` later; it may read what the caller's stream has been given so far."""
        stream = self._stream
        if stream is None:
            return self.submit(work)
        inputs_ready = torch.cuda.current_stream(stream.device).record_event()

        def on_stream() -> _Probabilities:
            with torch.cuda.stream(stream):
                stream.wait_event(inputs_ready)
                return work()

        return self.submit(on_stream)


class DuoServeOptions(ModeOptions, frozen=True):
    """`overlap: false` does the same work serially, for comparison: predict, fetch and wait, then go on."""

    overlap: bool = True


class DuoServe(Mode):
    """`predictors` by the layer that they predict."""

    Options = DuoServeOptions

    def __init__(self, predictors: Mapping[int, LayerPredictor], *, overlap: bool = True) -> None:
        super().__init__()
        self._predictors = predictors
        self._overlap = overlap
        self._thread: PredictionThread | None = None
        self._layer = -1
        #: Path of this step so far: (rows, k) of each layer, for the last token of each row.
        self._index: list[torch.Tensor] = []
        self._weight: list[torch.Tensor] = []
        #: By row: the complete path of its previous token, (L, k) each.
        self._paths: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._before: Paths | None = None
        self._predictions: dict[int, Future[_Probabilities]] = {}

    @classmethod
    def open(cls, checkpoint: Path, options: DuoServeOptions) -> "DuoServe":
        return cls(load_predictors(PreparedFiles(checkpoint)), overlap=options.overlap)

    def begin(self, step: ForwardStep) -> None:
        super().begin(step)
        self._layer = -1
        self._index.clear()
        self._weight.clear()
        self._predictions.clear()
        self._last_tokens = [end - 1 for end in accumulate(row.tokens for row in step.rows)]
        self._before = self._previous_paths(_row_names(step)) if step.phase == "decode" else None

    def route(self, routing: Routing) -> Routing:
        self._layer = routing.layer
        self._withdraw(routing.layer)
        several = len(routing.index) > len(self._last_tokens)
        self._index.append(routing.index[self._last_tokens] if several else routing.index)
        self._weight.append(routing.weight[self._last_tokens] if several else routing.weight)
        for layer in self._due(routing.layer):
            self._predict(layer)
        return routing

    def experts(self, routing: Routing) -> ExpertIterator:
        if self.step.phase == "prefill":
            return self.cache.serve(routing.layer, routing.distinct_experts(), ahead=True)
        return self._decode(routing)

    def end(self, step: ForwardStep) -> None:
        if len(self._index) != self.arch.layers:
            return  # the step failed
        index, weight = torch.stack(self._index, dim=1), torch.stack(self._weight, dim=1)
        for row, name in enumerate(_row_names(step)):
            self._paths.pop(name, None)
            self._paths[name] = index[row], weight[row]
        while len(self._paths) > _MAX_PATHS:
            del self._paths[next(iter(self._paths))]

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _decode(self, routing: Routing) -> ExpertIterator:
        experts = self.cache.serve(routing.layer, routing.distinct_experts(), ahead=self._overlap)
        for turn, served in enumerate(experts):
            yield served
            if turn == 0 and self._overlap:
                self._fetch_when_predicted(routing.layer)
        if not self._overlap:
            self._fetch_when_predicted(routing.layer)

    def _withdraw(self, layer: int) -> None:
        """Withdraw a layer's prediction and the prefetches that have not begun: its gate has chosen."""
        prediction = self._predictions.pop(layer, None)
        if prediction is not None:
            self.cache.cancel(layer)
            prediction.cancel()

    def _predict(self, layer: int) -> None:
        before, predictor = self._before, self._predictors.get(layer)
        if before is None or predictor is None:
            return
        if self._thread is None:
            device = before.index.device
            self._thread = PredictionThread(device)
            for each in self._predictors.values():
                each.to(device)
        sofar = Paths(torch.stack(self._index, dim=1), torch.stack(self._weight, dim=1))
        self._predictions[layer] = self._thread.start(lambda: predictor.probabilities(sofar, before).tolist())

    def _due(self, layer: int) -> Sequence[int]:
        """Return the layers to predict when the gate of `layer` has chosen.

        The farther one goes first: after the first gate the next layer's prediction may come too late and would delay
        the one behind it; it is withdrawn if it has not begun by then.
        """
        return [later for later in sorted(self._predictors, reverse=True) if known_layers(later) == layer + 1]

    def _fetch_when_predicted(self, layer: int) -> None:
        """Prefetch when the prediction is finished (second synchronisation point); blocks no thread."""
        for later in self._due(layer):
            prediction = self._predictions.get(later)
            if prediction is None:
                continue
            if self._overlap:
                prediction.add_done_callback(partial(self._fetch, later))
            else:
                self._fetch(later, prediction)
                self.cache.quiesce()

    def _fetch(self, layer: int, prediction: "Future[_Probabilities]") -> None:
        """Prefetch the likeliest experts of each token, those that any token is likeliest to need; on either thread.

        One token is the paper's prediction, the union over the tokens of a batch is ours.
        """
        if prediction.cancelled() or self._layer >= layer:
            return
        rows, top_k = prediction.result(), self.arch.top_k
        named = [sorted(range(len(row)), key=row.__getitem__)[-top_k:] for row in rows]
        unneeded = {expert: math.prod(1.0 - row[expert] for row in rows) for experts in named for expert in experts}
        slots, resident = max(1, self.cache.slots // self.arch.layers), self.cache.resident(layer)
        likeliest = sorted(unneeded, key=lambda expert: (unneeded[expert], expert))[:slots]
        # Residents first: they must stay.
        likeliest.sort(key=lambda expert: expert not in resident)
        self.cache.prefetch([ExpertKey(layer, expert) for expert in likeliest])

    def _previous_paths(self, names: Sequence[str]) -> Paths | None:
        """Return the paths of the previous tokens, sentinels for a row without one; None if no row has one."""
        existing = [self._paths[name] for name in names if name in self._paths]
        if not existing:
            return None
        index, weight = existing[0]
        unknown = torch.full_like(index, self.arch.experts), torch.zeros_like(weight)
        paths = [self._paths.get(name, unknown) for name in names]
        return Paths(torch.stack([index for index, _ in paths]), torch.stack([weight for _, weight in paths]))


def _row_names(step: ForwardStep) -> list[str]:
    """Return the keys of the rows' paths: the request, or the place of an anonymous row."""
    return [row.request or f"#{number}" for number, row in enumerate(step.rows)]
