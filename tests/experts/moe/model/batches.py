"""An engine on a tiny random Mixtral, unmodified, so that only the engine is looked at."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from experts.moe.gating import StepRow
from experts.moe.library import transformers as import_transformers
from experts.moe.model.engine import Completion, Engine, EngineRequest, TokenEvent
from experts.moe.model.keys_values import TextMemory, bytes_per_token
from experts.moe.model.text import TextCodec
from experts.moe.policy.schedule import BatchLimits, FirstCome

tokenizers = pytest.importorskip("tokenizers", reason="the extra `moe` is not installed")
pytest.importorskip("transformers", reason="the extra `moe` is not installed")
transformers = import_transformers()

CONTEXT = 64


class Plain:
    """A model with nothing replaced; notes the rows of each step."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.steps: list[tuple[StepRow, ...]] = []

    def step(self, rows: Sequence[StepRow]) -> AbstractContextManager[None]:
        self.steps.append(tuple(rows))
        return nullcontext()


def a_model() -> Any:
    config = transformers.MixtralConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=CONTEXT,
    )
    torch.manual_seed(3)
    return transformers.MixtralForCausalLM(config).eval()


def a_codec(ends: frozenset[int] = frozenset()) -> TextCodec:
    """A token for each byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytewise = tokenizers.models.BPE({letter: number for number, letter in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(bytewise)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return TextCodec(tokenizer, CONTEXT, ends)


MODEL = a_model()
ROOM = BatchLimits(4, 4 * CONTEXT)


def a_memory(tokens: int = ROOM.tokens) -> TextMemory:
    token_bytes = bytes_per_token(MODEL.config, torch.float32)
    return TextMemory(token_bytes, tokens * token_bytes)


class Bench:
    """An engine, its clock and what it said."""

    def __init__(self, *, rows: int = 4, tokens: int = 0, ends: frozenset[int] = frozenset()) -> None:
        self.now = 0.0
        self.said: list[TokenEvent] = []
        self.ended: dict[str, Completion] = {}
        self.runtime = Plain(MODEL)
        self.codec = a_codec(ends)
        self.memory = a_memory(tokens or rows * CONTEXT)
        scheduler = FirstCome(BatchLimits(rows, self.memory.tokens))
        self.engine = Engine(
            self.runtime, self.codec, scheduler, self.memory, on_token=self.said.append, clock=lambda: self.now
        )

    def ask(self, name: str, prompt: str, new: int = 8, **more: Any) -> None:
        tokens = tuple(self.codec.encode(prompt))
        self.engine.enqueue(EngineRequest(name, tokens, new, None, self.now, **more))

    def step(self) -> None:
        self.now += 1.0
        for one in self.engine.step():
            assert one.request not in self.ended, "a request ends once"
            self.ended[one.request] = one
        self.engine.check()

    def run(self) -> None:
        while not self.engine.is_idle:
            self.step()

    def text_of(self, name: str) -> str:
        return "".join(one.text for one in self.said if one.request == name)


def alone(prompt: str, new: int) -> str | None:
    bench = Bench()
    bench.ask("only", prompt, new)
    bench.run()
    return bench.ended["only"].text
