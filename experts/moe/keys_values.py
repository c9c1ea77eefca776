"""The keys and values of a running batch: rows of several lengths in one cache, padded on the left.

Rows come and go between steps; what is left is cut to its longest row. Padding is masked, and each row counts its own
positions, so a row's tokens do not depend on who is beside it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experts.moe.errors import ModelError
from experts.moe.library import transformers


class KeyValues:
    """One cache of transformers (`DynamicCache`), edited as rows join and leave. `config` is the model's."""

    def __init__(self, config: Any) -> None:
        if getattr(config, "is_encoder_decoder", False):
            folder = Path(getattr(config, "name_or_path", "") or ".")
            message = "an encoder-decoder model is not served: name a decoder (Mixtral, Qwen2-MoE, OLMoE, Qwen3-MoE)"
            raise ModelError(folder, message)
        self._cache: Any = None
        self._lengths: list[int] = []

    def fresh(self) -> Any:
        """An empty cache for a prefill. Every layer keeps all it has seen: a sliding window is left to the mask."""
        return transformers().DynamicCache()

    def join(self, one: Any, tokens: int) -> None:
        """Add the cache of one row that has seen `tokens`."""
        if not self._lengths:
            self._cache = one
        else:
            longest = max(*self._lengths, tokens)
            for mine, its in zip(self._cache.layers, one.layers, strict=True):
                mine.keys = torch.cat((_padded(mine.keys, longest), _padded(its.keys, longest)))
                mine.values = torch.cat((_padded(mine.values, longest), _padded(its.values, longest)))
        self._lengths.append(tokens)

    def keep(self, rows: Sequence[int]) -> None:
        """Only `rows` go on, in this order."""
        if not rows:
            self.clear()
            return
        self._lengths = [self._lengths[row] for row in rows]
        longest = max(self._lengths)
        for layer in self._cache.layers:
            index = torch.tensor(rows, device=layer.keys.device)
            layer.keys = layer.keys[..., -longest:, :].index_select(0, index)
            layer.values = layer.values[..., -longest:, :].index_select(0, index)

    def clear(self) -> None:
        self._cache = None
        self._lengths = []

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """What a forward of one token per row takes beside the tokens."""
        lengths = torch.tensor(self._lengths, device=device)
        longest = max(self._lengths)
        places = torch.arange(longest + 1, device=device)
        mask = (places >= (longest - lengths)[:, None]).long()
        return {"past_key_values": self._cache, "position_ids": lengths[:, None], "attention_mask": mask}

    def grew(self) -> None:
        """Each row has one more token."""
        self._lengths = [length + 1 for length in self._lengths]


def _padded(states: torch.Tensor, length: int) -> torch.Tensor:
    """(B, heads, T, D) with zeros on the left up to `length`."""
    return torch.nn.functional.pad(states, (0, 0, length - states.shape[-2], 0))
