"""The keys and values of a running batch: rows of several lengths in one cache, padded on the left, in counted bytes.

Rows come and go between steps; what is left is cut to its longest row. Padding is masked, and each row counts its own
positions, so a row's tokens do not depend on who is beside it. What a text may come to hold is known before its
prefill, and claimed then.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experts.ledger import LedgerError
from experts.moe.errors import ModelError
from experts.moe.library import transformers


class KeyValues:
    """One cache of transformers (`DynamicCache`), edited as rows join and leave. `config` is the model's."""

    def __init__(self, config: Any) -> None:
        _require_decoder(config)
        self._cache: Any = None
        self._lengths: list[int] = []

    @property
    def held_bytes(self) -> int:
        """Bytes of its tensors, padding included."""
        layers = () if self._cache is None else self._cache.layers
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    def fresh(self) -> Any:
        """An empty cache for a prefill. Every layer keeps all it has seen: a sliding window is left to the mask."""
        return transformers().DynamicCache()

    def join(self, one: Any, tokens: int) -> None:
        """Add the cache of one row that has seen `tokens`, and that is empty then.

        Where memory runs out amid it, the others stay as they were.
        """
        if not self._lengths:
            self._cache = one
            self._lengths.append(tokens)
            return
        longest = max(*self._lengths, tokens)
        try:
            for mine, its in zip(self._cache.layers, one.layers, strict=True):
                # Layer by layer, and what was taken over is let go: never a second copy of the whole.
                mine.keys, its.keys = _joined(mine.keys, its.keys, longest), None
                mine.values, its.values = _joined(mine.values, its.values, longest), None
        except BaseException:
            self._cut(slice(len(self._lengths)), max(self._lengths))
            raise
        self._lengths.append(tokens)

    def keep(self, rows: Sequence[int]) -> None:
        """Only `rows` go on, in this order."""
        if not rows:
            self.clear()
            return
        self._lengths = [self._lengths[row] for row in rows]
        self._cut(list(rows), max(self._lengths))

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

    def _cut(self, rows: slice | list[int], longest: int) -> None:
        for layer in self._cache.layers:
            layer.keys = layer.keys[:, :, -longest:][rows]
            layer.values = layer.values[:, :, -longest:][rows]


class TextMemory:
    """The books of what the texts that run may come to hold, in tokens: never more than fit into `budget_bytes`.

    A row is padded to the longest beside it, so each counts as the longest that any of them may become. `token_bytes`
    is what a token of a row takes (`bytes_per_token`).
    """

    def __init__(self, token_bytes: int, budget_bytes: int) -> None:
        self.token_bytes = token_bytes
        self.budget_bytes = budget_bytes
        self._claims: dict[str, int] = {}

    @property
    def tokens(self) -> int:
        """Tokens that fit, padding included; of one text alone, prompt and answer together."""
        return self.budget_bytes // self.token_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that are claimed."""
        return len(self._claims) * max(self._claims.values(), default=0) * self.token_bytes

    def claim(self, request: str, tokens: int) -> None:
        """A text may come to hold `tokens`. LedgerError where the others leave no room: nobody should have asked."""
        if request in self._claims:
            raise LedgerError(f"text {request} has its memory already")
        self._claims[request] = tokens
        if self.used_bytes > self.budget_bytes:
            del self._claims[request]
            free_bytes = self.budget_bytes - self.used_bytes
            raise LedgerError(f"text {request} of up to {tokens} tokens is too much for {free_bytes} free bytes")

    def release(self, request: str) -> None:
        """The text has ended, well or not."""
        if self._claims.pop(request, None) is None:
            raise LedgerError(f"text {request} has no memory to give back")

    def check(self, running: Sequence[str], held_bytes: int) -> None:
        """Raise LedgerError where the books are not those of the texts that run and of the bytes that they hold."""
        if list(self._claims) != list(running):
            raise LedgerError(f"texts {', '.join(self._claims)} have memory, {', '.join(running)} run")
        if not held_bytes <= self.used_bytes <= self.budget_bytes:
            raise LedgerError(f"{held_bytes} bytes are held, {self.used_bytes} claimed of {self.budget_bytes}")


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """What a token of a row takes: keys and values in each layer, and in one more, for a layer is copied as it grows.

    `config` is the model's, `dtype` what it computes in. ModelError where it is an encoder-decoder.
    """
    _require_decoder(config)
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = config.num_key_value_heads or config.num_attention_heads
    return (config.num_hidden_layers + 1) * 2 * heads * head_width * dtype.itemsize


def require_text_memory(folder: Path, memory: TextMemory, context: int | None, new_tokens: int) -> None:
    """Raise ModelError where there is not even room for a prompt of one token with the longest answer."""
    least = new_tokens + 1 if context is None else min(new_tokens + 1, context)
    if memory.tokens < least:
        message = f"text_memory (a quarter of memory where it is not set) of {memory.budget_bytes} bytes holds"
        message += f" {memory.tokens} tokens of {memory.token_bytes} bytes, a text may come to {least}"
        raise ModelError(folder, f"{message}: give at least {least * memory.token_bytes}, or lower max_new_tokens")


def _require_decoder(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        folder = Path(getattr(config, "name_or_path", "") or ".")
        message = "an encoder-decoder model is not served: name a decoder (Mixtral, Qwen2-MoE, OLMoE, Qwen3-MoE)"
        raise ModelError(folder, message)


def _joined(mine: torch.Tensor, its: torch.Tensor, longest: int) -> torch.Tensor:
    """(B, heads, T, D) and (1, heads, T', D) as (B + 1, heads, longest, D), zeros on the left."""
    rows, heads, length, width = mine.shape
    both = mine.new_zeros((rows + 1, heads, longest, width))
    both[:rows, :, longest - length :] = mine
    both[rows:, :, longest - its.shape[2] :] = its
    return both
