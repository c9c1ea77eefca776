"""Keys and values of a running batch: rows of several lengths in one cache, padded on the left, in counted bytes.

Rows join and leave between steps; the cache is cut to its longest row. Padding is masked and each row counts its own
positions, so a row's tokens do not depend on those beside it. A text's memory is claimed before its prefill.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experts.ledger import LedgerError
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
        if not rows:
            self.clear()
            return
        self._lengths = [self._lengths[row] for row in rows]
        self._cut(list(rows), max(self._lengths))

    def clear(self) -> None:
        self._cache = None
        self._lengths = []

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


class TextMemory:
    """Ledger of the tokens that running texts may come to hold, never more than fit into `budget_bytes`.

    Rows are padded to the longest, so each counts as the longest that any may become. `token_bytes`: see
    `bytes_per_token`.
    """

    def __init__(self, token_bytes: int, budget_bytes: int) -> None:
        self.token_bytes = token_bytes
        self.budget_bytes = budget_bytes
        self._claims: dict[str, int] = {}

    @property
    def tokens(self) -> int:
        """Tokens that fit, including padding: prompt and answer of one text alone."""
        return self.budget_bytes // self.token_bytes

    @property
    def used_bytes(self) -> int:
        return len(self._claims) * max(self._claims.values(), default=0) * self.token_bytes

    def claim(self, request: str, tokens: int) -> None:
        """Claim memory for the `tokens` that a text may reach. LedgerError if it does not fit: a caller's defect."""
        if request in self._claims:
            raise LedgerError(f"text {request} has its memory already")
        self._claims[request] = tokens
        if self.used_bytes > self.budget_bytes:
            del self._claims[request]
            free_bytes = self.budget_bytes - self.used_bytes
            raise LedgerError(f"text {request} of up to {tokens} tokens is too much for {free_bytes} free bytes")

    def release(self, request: str) -> None:
        if self._claims.pop(request, None) is None:
            raise LedgerError(f"text {request} has no memory to give back")

    def check(self, running: Sequence[str], held_bytes: int) -> None:
        """Raise LedgerError unless the claims are those of the running texts and cover the bytes that they hold."""
        if list(self._claims) != list(running):
            raise LedgerError(f"texts {', '.join(self._claims)} have memory, {', '.join(running)} run")
        if not held_bytes <= self.used_bytes <= self.budget_bytes:
            raise LedgerError(f"{held_bytes} bytes are held, {self.used_bytes} claimed of {self.budget_bytes}")


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of a row's token: keys and values of each layer and one more, as a growing layer is copied."""
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = config.num_key_value_heads or config.num_attention_heads
    return (config.num_hidden_layers + 1) * 2 * heads * head_width * dtype.itemsize


def require_text_memory(folder: Path, memory: TextMemory, context: int | None, new_tokens: int) -> None:
    """Raise ModelError if not even a prompt of one token fits with the longest answer."""
    min_tokens = new_tokens + 1 if context is None else min(new_tokens + 1, context)
    if memory.tokens < min_tokens:
        message = f"text_memory (a quarter of memory where it is not set) of {memory.budget_bytes} bytes holds"
        message += f" {memory.tokens} tokens of {memory.token_bytes} bytes, a text may come to {min_tokens}"
        message += f": give at least {min_tokens * memory.token_bytes}, or lower max_new_tokens"
        raise ModelError(folder, message)


def _joined(batch: torch.Tensor, row: torch.Tensor, longest: int) -> torch.Tensor:
    """Join (B, heads, T, D) and (1, heads, T', D) to (B + 1, heads, longest, D), with zeros on the left."""
    rows, heads, length, width = batch.shape
    joined = batch.new_zeros((rows + 1, heads, longest, width))
    joined[:rows, :, longest - length :] = batch
    joined[rows:, :, longest - row.shape[2] :] = row
    return joined
