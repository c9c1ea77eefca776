"""What texts hold beside a model's experts: counted to the byte, claimed before a prefill, free again at their end."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.moe.gating import StepRow
from experts.moe.model.keys_values import KeyValues, bytes_per_token

pytest.importorskip("transformers", reason="language models need the extra `moe`")
from tests.experts.moe.model.batches import MODEL, Bench, Plain, alone
from tests.experts.moe.tiny import CONTEXT, EACH_FAMILY, build_tiny


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


def test_what_does_not_fit_beside_others_waits_its_turn_and_says_the_same() -> None:
    bench = Bench(rows=4, tokens=60)
    for name, prompt, new in (("a", "hello", 20), ("b", "a much longer prompt than that", 25), ("c", "x", 20)):
        bench.ask(name, prompt, new)
    steps: list[str] = []
    used: list[int] = []
    while not bench.engine.is_idle:
        bench.step()
        steps.append("".join(row.request for row in bench.runtime.steps[-1]))
        used.append(bench.memory.used_bytes // bench.memory.token_bytes)
    # "b" may come to 55 tokens: alone; "c" may pass it by.
    assert {step for step in steps if "b" in step} == {"b"}
    assert max(used) == 55
    assert used[-1] == 0
    assert bench.ended["b"].text == alone("a much longer prompt than that", 25)
    assert set(bench.reasons().values()) == {None}


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
    assert bench.memory.used_bytes == 0
    for name, ended in bench.ended.items():
        prompt, new, deadline, kind, at = texts[int(name)]
        new = min(new, CONTEXT - prompt)
        assert ended.reason is not None or ended.new_tokens == new
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
