"""Keys and values of a running batch: rows of several lengths in one cache, padded on the left, in counted bytes.

Rows join and leave between steps; the cache is cut to its longest row. Padding is masked and each row counts its own
positions, so a row's tokens do not depend on those beside it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experts.moe.errors import ModelError
from experts.moe.library import transformers


class KeyValues:
    """A `DynamicCache` of transformers, edited as rows join and leave."""

    def __init__(self) -> None:
        self._cache: Any = None
        self._lengths: list[int] = []

    @property
    def held_bytes(self) -> int:
        """Bytes of its tensors, including padding."""
        layers = () if self._cache is None else self._cache.layers
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    def fresh(self) -> Any:
        """Return an empty cache for a prefill. Every layer keeps all tokens: a sliding window is left to the mask."""
        return transformers().DynamicCache()

    def join(self, row: Any, tokens: int) -> None:
        """Add a row's cache after `tokens`, and empty that cache. If memory runs out, the other rows stay unchanged."""
        if not self._lengths:
            self._cache = row
            self._lengths.append(tokens)
            return
        longest = max(*self._lengths, tokens)
        try:
            for layer, added in zip(self._cache.layers, row.layers, strict=True):
                # Layer by layer, each released when it was copied: never a second copy of the whole.
                layer.keys, added.keys = _joined(layer.keys, added.keys, longest), None
                layer.values, added.values = _joined(layer.values, added.values, longest), None
        except BaseException:
            self._cut(slice(len(self._lengths)), max(self._lengths))
            raise
        self._lengths.append(tokens)

    def keep(self, rows: Sequence[int]) -> None:
        self._lengths = [self._lengths[row] for row in rows]
        if rows:
            self._cut(list(rows), max(self._lengths))
        else:
            self._cache = None

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Return the arguments, beside the tokens, of a forward of one token per row."""
        lengths = torch.tensor(self._lengths, device=device)
        longest = max(self._lengths)
        places = torch.arange(longest + 1, device=device)
        mask = (places >= (longest - lengths)[:, None]).long()
        return {"past_key_values": self._cache, "position_ids": lengths[:, None], "attention_mask": mask}

    def count_token(self) -> None:
        self._lengths = [length + 1 for length in self._lengths]

    def _cut(self, rows: slice | list[int], longest: int) -> None:
        for layer in self._cache.layers:
            layer.keys = layer.keys[:, :, -longest:][rows]
            layer.values = layer.values[:, :, -longest:][rows]


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of a row's token: keys and values of each layer and one more, as a growing layer is copied."""
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = config.num_key_value_heads or config.num_attention_heads
    return (config.num_hidden_layers + 1) * 2 * heads * head_width * dtype.itemsize


def text_tokens(folder: Path, token_bytes: int, budget_bytes: int, context: int | None, new_tokens: int) -> int:
    """Return the tokens of one text alone that a budget holds. Raises ModelError if the longest answer does not fit."""
    tokens = budget_bytes // token_bytes
    min_tokens = new_tokens + 1 if context is None else min(new_tokens + 1, context)
    if tokens < min_tokens:
        message = f"text_memory (a quarter of memory where it is not set) of {budget_bytes} bytes holds"
        message += f" {tokens} tokens of {token_bytes} bytes, a text may come to {min_tokens}"
        message += f": give at least {min_tokens * token_bytes}, or lower max_new_tokens"
        raise ModelError(folder, message)
    return tokens


def _joined(batch: torch.Tensor, row: torch.Tensor, longest: int) -> torch.Tensor:
    """Join (B, heads, T, D) and (1, heads, T', D) to (B + 1, heads, longest, D), with zeros on the left."""
    rows, heads, length, width = batch.shape
    joined = batch.new_zeros((rows + 1, heads, longest, width))
    joined[:rows, :, longest - length :] = batch
    joined[rows:, :, longest - row.shape[2] :] = row
    return joined
