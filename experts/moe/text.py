"""Prompts into tokens and tokens into text: what of a checkpoint a request for text meets before any weight is read."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experts.moe.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class PromptError(ValueError):
    """A prompt that this model cannot continue: empty, or longer than its context."""


class TextCodec:
    """The tokenizer of a checkpoint, with its context's length and the tokens that end a text. Any thread."""

    def __init__(self, tokenizer: "Tokenizer", context: int | None, ends: frozenset[int]) -> None:
        """`context`: tokens of prompt and answer together, None where positions are relative; `ends` may be empty."""
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.context = context
        self.ends = ends
        self._tokenizer = tokenizer

    @classmethod
    def open(cls, folder: Path) -> "TextCodec":
        """Read `tokenizer.json`, `config.json` and `generation_config.json`; ModelError names what is wrong."""
        from tokenizers import Tokenizer  # noqa: PLC0415  comes with the extra `moe`

        config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        ends: Any = None
        if generation.is_file():
            ends = read_json(generation).get("eos_token_id")
        if ends is None:
            ends = config.get("eos_token_id")
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(file, "is missing: save the tokenizer in its fast form beside the model")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no other kind
            raise ModelError(file, f"is no tokenizer: {error}") from error
        numbers = ends if isinstance(ends, list) else [] if ends is None else [ends]
        return cls(tokenizer, config.get("max_position_embeddings"), frozenset(numbers))

    def encode(self, prompt: str) -> list[int]:
        """The tokens of `prompt`. PromptError where there are none, or no room for one more after them."""
        if not prompt.strip():
            raise PromptError("the prompt is empty")
        tokens: list[int] = self._tokenizer.encode(prompt).ids
        if not tokens:
            raise PromptError("the prompt is empty: the tokenizer makes no token of it")
        if self.context is not None and len(tokens) >= self.context:
            raise PromptError(f"the prompt has {len(tokens)} tokens, at most {self.context - 1} fit its context")
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, special ones left out."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def stream(self) -> "TextStream":
        return TextStream(self._tokenizer)


class TextStream:
    """Text as its tokens come: pieces that add up to what `decode` makes of all of them."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        from tokenizers.decoders import DecodeStream  # noqa: PLC0415

        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._said = ""

    def add(self, token: int) -> str:
        """What `token` adds; empty while a character is not whole."""
        piece = self._stream.step(self._tokenizer, token) or ""
        self._said += piece
        return piece

    def end(self, text: str) -> str:
        """What `text`, the whole, has beyond the pieces so far."""
        return text[len(self._said) :] if text.startswith(self._said) else ""


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; ModelError where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(file, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(file, f"is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(file, "expected a JSON object")
    return found
