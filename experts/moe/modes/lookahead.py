"""Prediction without training: the next layer's gate, asked early, of what this layer's experts are about to see."""

import torch

from experts.moe.gating import ExpertKey, Routing
from experts.moe.modes.mode import BaseMode


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
            real = (routing.index < self.arch.experts).any(dim=-1)
            self.cache.prefetch(self._keys(following, guess[real]), after=layer)
        return routing

    def _keys(self, layer: int, guess: torch.Tensor) -> list[ExpertKey]:
        """The experts that most tokens are guessed to want, as many as the layer has slots for."""
        counts = torch.bincount(guess.flatten(), minlength=self.arch.experts).tolist()
        order = sorted((one for one in range(self.arch.experts) if counts[one]), key=lambda one: (-counts[one], one))
        room = max(1, self.cache.slots // self.arch.layers)
        return [ExpertKey(layer, expert) for expert in order[:room]]
