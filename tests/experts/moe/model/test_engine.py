"""Continuous batching: who is beside whom changes nothing; what is streamed, ended, counted and held is right."""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.moe.gating import StepRow
from experts.moe.model.engine import Engine
from experts.moe.model.keys_values import KeyValues, bytes_per_token
from experts.moe.model.text import TextCodec, TextStream
from experts.moe.policy.schedule import BatchLimits, SloSlack, StepCosts, TextRequest

pytest.importorskip("transformers", reason="the extra `moe` is not installed")
import tokenizers

from tests.experts.moe.tiny import CONTEXT, EACH_FAMILY, build_tiny
from tests.tiny_text import a_byte_tokenizer


class Plain:
    """A model with nothing replaced, so that only the engine is looked at; notes the rows of each step."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.steps: list[tuple[StepRow, ...]] = []

    def step(self, rows: Sequence[StepRow]) -> AbstractContextManager[None]:
        self.steps.append(tuple(rows))
        return nullcontext()


def a_codec(ends: frozenset[int] = frozenset()) -> TextCodec:
    """A token for each byte."""
    return TextCodec(a_byte_tokenizer(), CONTEXT, ends)


MODEL = build_tiny(vocab_size=256, num_hidden_layers=2, num_local_experts=4, seed=3)


class Bench:
    """An engine, its clock and its reports; its memory is checked after each step."""

    def __init__(
        self, runtime: Plain | None = None, *, rows: int = 4, tokens: int = 0, ends: frozenset[int] = frozenset()
    ) -> None:
        self.now = 0.0
        self.pieces: dict[str, list[str]] = {}
        self.ended: dict[str, TextRequest] = {}
        self.runtime = runtime or Plain(MODEL)
        self.codec = a_codec(ends)
        self.token_bytes = bytes_per_token(MODEL.config, torch.float32)
        limits = BatchLimits(rows, tokens or rows * CONTEXT)
        scheduler = SloSlack(limits, StepCosts(0, 0), patience_s=math.inf)
        self.engine = Engine(
            self.runtime, self.codec, scheduler, self.token_bytes, on_token=self.on_token, clock=lambda: self.now
        )

    def on_token(self, text: TextRequest, piece: str, _since_s: float) -> None:
        self.pieces.setdefault(text.request, []).append(piece)
        assert len(text.new) == len(self.pieces[text.request])

    def ask(self, name: str, prompt: str | Sequence[int], new: int = 8, **more: Any) -> None:
        tokens = tuple(self.codec.encode(prompt) if isinstance(prompt, str) else prompt)
        self.engine.enqueue(TextRequest(name, tokens, new, None, self.now, **more))

    def step(self) -> None:
        self.now += 1.0
        for text in self.engine.step():
            assert text.request not in self.ended, "a request ends once"
            assert text.text in (None, self.text_of(text.request)), "what was streamed adds up to the text"
            self.ended[text.request] = text
        self.engine.check()

    def run(self) -> None:
        while not self.engine.is_idle:
            self.step()

    def reasons(self) -> dict[str, str | None]:
        return {name: text.reason for name, text in self.ended.items()}

    def text_of(self, name: str) -> str:
        return "".join(self.pieces.get(name, ()))


def alone(prompt: str, new: int) -> str | None:
    bench = Bench()
    bench.ask("only", prompt, new)
    bench.run()
    return bench.ended["only"].text


def generated(prompt: str, new: int) -> list[int]:
    """The tokens that transformers itself adds."""
    tokens = torch.tensor([a_codec().encode(prompt)])
    with torch.no_grad():
        out = MODEL.generate(tokens, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, tokens.shape[1] :].tolist()


PROMPTS = {"a": ("hello", 12), "b": ("a much longer prompt than that", 5), "c": ("x", 20), "d": ("of the board", 9)}


@pytest.mark.promise("Language models", "A text is the same whether it runs alone or beside others that join and leave")
@pytest.mark.parametrize("order", list(itertools.permutations(PROMPTS))[::5])
def test_a_request_gets_the_same_text_alone_and_beside_others_that_join_and_leave(order: tuple[str, ...]) -> None:
    bench = Bench(rows=3)
    for name in order:
        bench.ask(name, *PROMPTS[name])
        bench.step()
    bench.run()
    assert {name: ended.text for name, ended in bench.ended.items()} == {
        name: alone(*PROMPTS[name]) for name in PROMPTS
    }


def a_codec_that_falls_back_to_bytes() -> TextCodec:
    """As Mixtral's: words, and a token for each byte of what is no word."""
    words = ["?", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581the", "a", "b"]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, [], byte_fallback=True))
    of = tokenizers.decoders
    tokenizer.decoder = of.Sequence([of.Replace("\u2581", " "), of.ByteFallback(), of.Fuse(), of.Strip(" ", 1, 0)])
    return TextCodec(tokenizer, None, frozenset())


@pytest.mark.parametrize("codec", [a_codec(), a_codec_that_falls_back_to_bytes()], ids=["bytes", "fallback"])
def test_whatever_tokens_come_the_text_is_what_was_streamed(codec: TextCodec) -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(300):
        tokens = torch.randint(1, 256, (20,), generator=generator).tolist()
        stream = TextStream(codec.decode)
        pieces = [*map(stream.add, tokens), stream.end()]
        assert "".join(pieces) == stream.text


def test_a_character_is_streamed_whole_and_in_front_of_bytes_that_are_none() -> None:
    codec = a_codec_that_falls_back_to_bytes()
    stream = TextStream(codec.decode)
    # "the", two bytes of an "e" with an accent, a byte that begins nothing, "a".
    pieces = [stream.add(token) for token in (258, 1 + 0xC3, 1 + 0xA9, 1 + 0xFF, 259)]
    assert pieces[:4] == ["the", "", "\u00e9", ""]
    assert stream.text.startswith("the\u00e9")
    assert stream.text.endswith("\ufffda")
    whole = [258, 257, 1 + 0xC3, 1 + 0xA9, 260]
    stream = TextStream(codec.decode)
    assert "".join(map(stream.add, whole)) + stream.end() == codec.decode(whole)


def test_a_prefill_is_alone_and_others_get_a_token_between_two() -> None:
    bench = Bench(rows=4)
    bench.ask("a", "hello", 20)
    bench.step()
    for name in "bcd":
        bench.ask(name, "prompt of " + name, 20)
    for _ in range(6):
        bench.step()
    kinds = ["".join(row.request for row in rows) for rows in bench.runtime.steps]
    assert kinds == ["a", "b", "ab", "c", "abc", "d", "abcd"]
    assert [row.tokens for row in bench.runtime.steps[1]] == [len("prompt of b")]


def test_a_text_ends_at_its_end_token_which_is_no_part_of_it() -> None:
    tokens = generated("hello", 12)
    end = tokens[4]
    bench = Bench(ends=frozenset({end}))
    bench.ask("a", "hello", 12)
    bench.run()
    count = tokens.index(end)
    assert len(bench.ended["a"].new) == count
    # An incomplete character at the end is not part of the text, and was not streamed either.
    assert bench.ended["a"].text == bench.text_of("a") == a_codec().decode(tokens[:count]).rstrip("\ufffd")
    assert len(bench.pieces["a"]) == count


def test_a_text_ends_where_the_context_is_full() -> None:
    bench = Bench()
    bench.ask("a", "x" * 60, 50)
    bench.run()
    assert (len(bench.ended["a"].new), bench.ended["a"].reason) == (4, None)


def test_a_deadline_ends_what_waits_and_what_runs_and_nobody_else() -> None:
    bench = Bench(rows=2)
    bench.ask("runs", "hello", 30, deadline_s=5.5)
    bench.ask("goes on", "hello", 12)
    bench.ask("waits", "hello", 30, deadline_s=3.5)
    bench.run()
    assert {name: (ended.reason, ended.text is None) for name, ended in bench.ended.items()} == {
        "runs": ("deadline", True),
        "waits": ("deadline", True),
        "goes on": (None, False),
    }
    assert bench.ended["goes on"].text == alone("hello", 12)
    assert bench.ended["waits"].ttft_s is None


# Memory of texts: counted to the byte, and free again at their end


def seen(model: Any, tokens: Sequence[int]) -> Any:
    """The cache of a row that has seen `tokens`."""
    cache = KeyValues().fresh()
    with torch.inference_mode():
        model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("family", EACH_FAMILY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_takes_what_its_architecture_says(family: str, dtype: torch.dtype) -> None:
    model = build_tiny(family, dtype=dtype)
    batch = KeyValues()
    assert batch.held_bytes == 0
    layers = model.config.num_hidden_layers
    # One layer more is counted: the copy of one while it grows.
    of_layers = bytes_per_token(model.config, dtype) * layers // (layers + 1)
    for rows, tokens in enumerate((7, 30, 11), 1):
        batch.join(seen(model, range(1, tokens + 1)), tokens)
        assert batch.held_bytes == rows * (7 if rows == 1 else 30) * of_layers
    batch.keep([0, 2])
    assert batch.held_bytes == 2 * 11 * of_layers
    batch.keep([])
    assert batch.held_bytes == 0


class Fails(Plain):
    """A model of which a step fails amid its layers, or gives no numbers, for one request at one place of its text."""

    def __init__(self, model: Any, plans: dict[str, tuple[str, int]]) -> None:
        super().__init__(model)
        self.plans = plans
        self.count: dict[str, int] = {}
        self.armed: list[tuple[int, str]] = []

    def step(self, rows: Sequence[StepRow]) -> AbstractContextManager[None]:
        self.armed = []
        for place, row in enumerate(rows):
            at = self.count[row.request] = self.count.get(row.request, -1) + 1
            kind, when = self.plans.get(row.request, ("", -1))
            if when == at:
                self.armed.append((place, kind))
        return super().step(rows)

    def breaks(self, *_: Any) -> None:
        if any(kind == "breaks" for _, kind in self.armed):
            torch.empty(1 << 60)  # really no memory, after the layers before have grown

    def blurs(self, _module: Any, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        for place, kind in self.armed:
            if kind == "no number":
                logits = logits.index_fill(0, torch.tensor([place]), float("nan"))
        return logits


@contextmanager
def failing(plans: dict[str, tuple[str, int]]) -> Iterator[Fails]:
    runtime = Fails(MODEL, plans)
    last, head = MODEL.model.layers[-1].self_attn, MODEL.lm_head
    hooks = [last.register_forward_hook(runtime.breaks), head.register_forward_hook(runtime.blurs)]
    try:
        yield runtime
    finally:
        for hook in hooks:
            hook.remove()


#: Tokens of the prompt and new ones, the deadline in seconds, a failure, and the number of the token that fails.
TEXTS = st.tuples(
    st.integers(1, 40),
    st.integers(1, 12),
    st.none() | st.integers(0, 6),
    st.sampled_from(["", "", "", "breaks", "no number"]),
    st.integers(0, 5),
)


@pytest.mark.promise(
    "Language models",
    "Memory held by texts is counted, never exceeds `text_memory`, and is freed however they end",
)
@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=8),
    steps=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    room=st.integers(52, 160),
)
def test_the_books_are_right_after_any_sequence_of_beginnings_steps_ends_and_failures(
    texts: list[tuple[int, int, int | None, str, int]], steps: list[int], room: int
) -> None:
    plans = {str(number): (kind, at) for number, (_, _, _, kind, at) in enumerate(texts) if kind}
    with failing(plans) as runtime:
        bench = Bench(runtime, rows=3, tokens=room)
        for number, (prompt, new, deadline, _, _) in enumerate(texts):
            deadline_s = None if deadline is None else bench.now + deadline
            bench.ask(str(number), range(1, prompt + 1), new, deadline_s=deadline_s)
            for _ in range(steps[number]):
                bench.step()
        bench.run()
    assert set(bench.ended) == {str(number) for number in range(len(texts))}
    assert bench.engine.used_bytes == 0
    for name, ended in bench.ended.items():
        prompt, new, deadline, kind, at = texts[int(name)]
        new = min(new, CONTEXT - prompt)
        assert ended.reason is not None or len(ended.new) == new
        assert ended.reason != "deadline" or deadline is not None
        assert ended.reason != "model_failed" or kind or any(plan == "breaks" for plan, _ in plans.values())
        assert ended.reason is not None or kind != "no number" or at >= new


def logits_of(runtime: Plain, later: str | None) -> tuple[list[torch.Tensor], dict[str, str | None]]:
    """Return all logits of two texts, and of one that comes while they run, and the reasons of their ends."""
    bench, logits = Bench(runtime, rows=3), list[torch.Tensor]()
    watch = MODEL.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output.clone()))
    for name, tokens in (("a", 9), ("b", 30)):
        bench.ask(name, range(1, tokens), 20)
    while not (bench.engine.is_idle and later is None):
        bench.step()
        if later is not None and len(logits) == 5:
            bench.ask(later, range(1, 40), 20)
            later = None
    watch.remove()
    return logits, bench.reasons()


@pytest.mark.promise(
    "Language models",
    "A text that cannot be computed does not change any other text by a bit; the model is closed only if its "
    "state is lost",
)
@pytest.mark.parametrize("kind", ["breaks", "no number"])
def test_a_prefill_that_fails_leaves_the_texts_beside_it_bit_identical(kind: str) -> None:
    without, _ = logits_of(Plain(MODEL), None)
    with failing({"bad": (kind, 0)}) as runtime:
        beside, reasons = logits_of(runtime, "bad")
    assert reasons == {"bad": "model_failed", "a": None, "b": None}
    numbers = [logits for logits in beside if bool(logits.isfinite().all())]
    assert len(beside) - len(numbers) == (kind == "no number")
    assert len(numbers) == len(without) > 20
    assert all(torch.equal(*pair) for pair in zip(numbers, without, strict=True))
