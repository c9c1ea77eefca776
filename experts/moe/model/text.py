"""Prompts into tokens and tokens into text, with a checkpoint's tokenizer; imports neither torch nor transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experts.moe.errors import ModelError
from experts.moe.folder import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer


#: Decoded form of bytes that are not UTF-8.
_REPLACEMENT = "\ufffd"


class PromptError(ValueError):
    """The model cannot continue a prompt: it is empty or longer than the context."""


class TextCodec:
    """The tokenizer of a checkpoint, its context length, and the tokens that end a text. Thread-safe.

    `context`: tokens of prompt and answer together, None if positions are relative; `ends` may be empty.
    """

    def __init__(self, tokenizer: "Tokenizer", context: int | None, ends: frozenset[int]) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.context = context
        self.ends = ends
        self._tokenizer = tokenizer

    @classmethod
    def open(cls, folder: Path) -> "TextCodec":
        """Read `tokenizer.json`, `config.json` and `generation_config.json`. Raises ModelError."""
        from tokenizers import Tokenizer  # noqa: PLC0415  comes with the extra `moe`

        config, generation = read_json(folder / "config.json"), folder / "generation_config.json"
        ends: Any = read_json(generation).get("eos_token_id") if generation.is_file() else None
        if ends is None:
            ends = config.get("eos_token_id")
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(file, "is missing: save the tokenizer in its fast form beside the model")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no other kind
            raise ModelError(file, f"is not a tokenizer: {error}") from error
        numbers = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(isinstance(number, int) for number in numbers):
            raise ModelError(folder, f"eos_token_id is {ends!r}; expected a number, or a list of numbers")
        return cls(tokenizer, config.get("max_position_embeddings"), frozenset(numbers))

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of `prompt`. Raises PromptError for none, or if no new token fits after them."""
        if not prompt.strip():
            raise PromptError("the prompt is empty")
        tokens: list[int] = self._tokenizer.encode(prompt).ids
        if not tokens:
            raise PromptError("the prompt is empty: it has no token")
        if self.context is not None and len(tokens) >= self.context:
            raise PromptError(f"the prompt has {len(tokens)} tokens, at most {self.context - 1} fit its context")
        return tokens

    def max_total_tokens(self, prompt_tokens: int, new_tokens: int) -> int:
        """Return the tokens that prompt and answer may reach, at most the context."""
        total = prompt_tokens + new_tokens
        return total if self.context is None else min(total, self.context)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` without special ones."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


class TextStream:
    """Text as its tokens arrive: `text` is everything emitted so far.

    A piece is the text that the newest tokens add to the few before them. It is held back while it ends in U+FFFD,
    which may be the first part of a character. (The library's own stream raises if an emitted character turns out to be
    part of invalid bytes, as with every tokenizer that falls back to bytes.)
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        #: Tokens of the last piece, and those after it.
        self._tokens: list[int] = []
        self._emitted_tokens = 0
        self.text = ""

    def add(self, token: int) -> str:
        """Return the text that `token` adds; empty while a character is incomplete."""
        self._tokens.append(token)
        piece = self._pending()
        return "" if piece.endswith(_REPLACEMENT) else self._emit(piece)

    def end(self) -> str:
        """Return the text that was held back."""
        return self._emit(self._pending())

    def _pending(self) -> str:
        return self._decode(self._tokens)[len(self._decode(self._tokens[: self._emitted_tokens])) :]

    def _emit(self, piece: str) -> str:
        if piece:
            self._tokens = self._tokens[self._emitted_tokens :]
            self._emitted_tokens = len(self._tokens)
            self.text += piece
        return piece
