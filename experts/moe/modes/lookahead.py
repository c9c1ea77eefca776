"""Prediction without training: the next layer's gate, asked early, of what this layer's experts are about to see."""

from collections import Counter

import torch

from experts.moe.gating import ExpertKey, Routing
from experts.moe.model.mode import BaseMode


class Lookahead(BaseMode):
    """What the next layer's gate would choose now is fetched while this layer and the next attention run.

    Hidden states change little from layer to layer, so the guess is good; every trained predictor stands beside it.
    """

    name = "lookahead"

    def route(self, routing: Routing) -> Routing:
        layer, following = routing.layer, routing.layer + 1
        self.cache.metrics.predictions.check(routing)
        self.cache.cancel(layer)  # the gate has spoken: what is still missing is loaded as a demand
        # The decoder's first gate sees other tokens than the encoder's last.
        if following < self.arch.layers and following != self.arch.encoder_layers:
            guess = torch.topk(self.gates[following](routing.hidden), self.arch.top_k, dim=-1).indices
            self.cache.metrics.predictions.predict(following, guess)
            self.cache.prefetch(self._keys(following, guess, routing.index), after=layer)
        return routing

    def _keys(self, layer: int, guess: torch.Tensor, chosen: torch.Tensor) -> list[ExpertKey]:
        """The experts that most tokens are guessed to want, as many as the layer has slots for; padding has no say."""
        rows = zip(guess.tolist(), chosen.tolist(), strict=True)
        counts = Counter(expert for guessed, taken in rows if min(taken) < self.arch.experts for expert in guessed)
        room = max(1, self.cache.slots // self.arch.layers)
        return [ExpertKey(layer, expert) for expert, _ in counts.most_common(room)]
