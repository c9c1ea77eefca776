"""Prompts into tokens and tokens into text: what of a checkpoint a request for text meets before any weight is read."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experts.moe.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


#: What bytes that are no UTF-8 read as.
_REPLACEMENT = "\ufffd"


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
        if not all(isinstance(number, int) for number in numbers):
            raise ModelError(folder, f"eos_token_id is {ends!r}; expected a number, or a list of numbers")
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

    def max_total_tokens(self, prompt_tokens: int, new_tokens: int) -> int:
        """Tokens that a text may come to, prompt and answer: what its context holds, at most."""
        wanted = prompt_tokens + new_tokens
        return wanted if self.context is None else min(wanted, self.context)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, special ones left out."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def stream(self) -> "TextStream":
        return TextStream(self.decode)


class TextStream:
    """Text as its tokens come: `text` is all that was said so far.

    A piece is what the newest tokens add to the few before them. It waits while it ends in U+FFFD: so reads the first
    part of a character. (The library's own stream raises where a character that it gave out turns out to be part of
    bytes that are none, as with every tokenizer that falls back to bytes.)
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        #: Tokens of the last piece, and those after it.
        self._tokens: list[int] = []
        self._said_tokens = 0
        self.text = ""

    def add(self, token: int) -> str:
        """What `token` adds; empty while a character is not whole."""
        self._tokens.append(token)
        piece = self._unsaid()
        return "" if piece.endswith(_REPLACEMENT) else self._say(piece)

    def end(self) -> str:
        """What waited for more."""
        return self._say(self._unsaid())

    def _unsaid(self) -> str:
        return self._decode(self._tokens)[len(self._decode(self._tokens[: self._said_tokens])) :]

    def _say(self, piece: str) -> str:
        if piece:
            self._tokens = self._tokens[self._said_tokens :]
            self._said_tokens = len(self._tokens)
            self.text += piece
        return piece


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
