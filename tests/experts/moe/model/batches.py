"""An engine on a tiny random Mixtral, unmodified, so that only the engine is looked at."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from experts.moe.gating import StepRow
from experts.moe.model.engine import Completion, Engine, EngineRequest, TokenEvent
from experts.moe.model.keys_values import TextMemory, bytes_per_token
from experts.moe.model.text import TextCodec
from experts.moe.policy.schedule import BatchLimits, SloSlack, StepCosts, TaskProfiles
from tests.experts.moe.tiny import CONTEXT, build_tiny
from tests.tiny_text import a_byte_tokenizer


class Plain:
    """A model with nothing replaced; notes the rows of each step."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.steps: list[tuple[StepRow, ...]] = []

    def step(self, rows: Sequence[StepRow]) -> AbstractContextManager[None]:
        self.steps.append(tuple(rows))
        return nullcontext()


def a_model() -> Any:
    return build_tiny(vocab_size=256, num_hidden_layers=2, num_local_experts=4, seed=3)


def a_codec(ends: frozenset[int] = frozenset()) -> TextCodec:
    """A token for each byte."""
    return TextCodec(a_byte_tokenizer(), CONTEXT, ends)


MODEL = a_model()
ROOM = BatchLimits(4, 4 * CONTEXT)


def a_memory(tokens: int = ROOM.tokens) -> TextMemory:
    token_bytes = bytes_per_token(MODEL.config, torch.float32)
    return TextMemory(token_bytes, tokens * token_bytes)


class Bench:
    """An engine, its clock and its reports; its ledger is checked after each step."""

    def __init__(
        self,
        runtime: Plain | None = None,
        *,
        rows: int = 4,
        tokens: int = 0,
        ends: frozenset[int] = frozenset(),
        profiles: TaskProfiles | None = None,
        **options: Any,
    ) -> None:
        self.now = 0.0
        self.tokens: list[TokenEvent] = []
        self.ended: dict[str, Completion] = {}
        self.runtime = runtime or Plain(MODEL)
        self.codec = a_codec(ends)
        self.memory = a_memory(tokens or rows * CONTEXT)
        self.profiles = profiles or TaskProfiles()
        self.engine = Engine(
            self.runtime,
            self.codec,
            SloSlack(BatchLimits(rows, self.memory.tokens), StepCosts(0, 0, 0), self.profiles, patience_s=math.inf),
            self.memory,
            profiles=self.profiles,
            on_token=self.tokens.append,
            clock=lambda: self.now,
            **options,
        )

    def ask(self, name: str, prompt: str | Sequence[int], new: int = 8, **more: Any) -> None:
        tokens = tuple(self.codec.encode(prompt) if isinstance(prompt, str) else prompt)
        self.engine.enqueue(EngineRequest(name, tokens, new, None, self.now, **more))

    def step(self) -> None:
        self.now += 1.0
        for completion in self.engine.step():
            assert completion.request not in self.ended, "a request ends once"
            self.ended[completion.request] = completion
        self.engine.check()

    def run(self) -> None:
        while not self.engine.is_idle:
            self.step()

    def reasons(self) -> dict[str, str | None]:
        return {name: completion.reason for name, completion in self.ended.items()}

    def text_of(self, name: str) -> str:
        return "".join(event.text for event in self.tokens if event.request == name)


def alone(prompt: str, new: int) -> str | None:
    bench = Bench()
    bench.ask("only", prompt, new)
    bench.run()
    return bench.ended["only"].text
