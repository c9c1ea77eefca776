"""A language model in service, without its thread: requests that it cannot do end, and are named."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from daemon.config import Model
from daemon.records import AcceptedText, TextOutcome, TextRequest

pytest.importorskip("transformers", reason="language models need the extra `moe`")
from daemon.model_open import ServedModel, learned
from daemon.model_thread import ModelThread
from experts.moe.engine import Took
from experts.moe.errors import ModelError
from experts.moe.policy.schedule import Costs
from experts.transfer import Place
from tests.tiny_text import EXPERT_BYTES, EXPERTS, a_text_model


@contextmanager
def served(checkpoint: Path) -> Iterator[ServedModel]:
    memory = EXPERTS * EXPERT_BYTES
    model = Model(checkpoint=checkpoint, memory=memory, mode="ondemand", rows=1)
    found = ServedModel(model, memory, lambda: None, lambda _text, _index, _piece: None)
    yield found
    found.close()


def a_text(prompt: str) -> AcceptedText:
    return AcceptedText(1, TextRequest("s", "1", "m", prompt, max_new_tokens=2), time.time(), time.monotonic())


def reason(model: ServedModel, prompt: str) -> str | None:
    """How a request ended: at its beginning, or within some steps."""
    text = a_text(prompt)
    refused = model.begin(text, time.monotonic())
    if refused is not None:
        return refused.reason
    for _ in range(10):
        ended, error = model.step()
        if ended:
            assert error is None
            return ended[0][1].reason
    raise AssertionError("it never ended")


def test_a_prompt_beyond_a_context_that_the_configuration_leaves_to_the_library_is_refused(tmp_path: Path) -> None:
    checkpoint = a_text_model(tmp_path / "model")
    file = checkpoint / "config.json"
    config = json.loads(file.read_text())
    del config["max_position_embeddings"]
    file.write_text(json.dumps(config))
    with served(checkpoint) as model:
        assert reason(model, "a" * 300_000) == "bad_prompt"
        assert reason(model, "a" * 5_000) is None


def test_a_model_whose_memory_cannot_grow_holds_what_it_held(tmp_path: Path) -> None:
    little = 8 * EXPERT_BYTES
    model = Model(checkpoint=a_text_model(tmp_path / "model"), memory=little, mode="ondemand", rows=1)
    opened: list[ServedModel] = []
    outcomes: list[TextOutcome] = []

    def opener(budget_bytes: int, gets_on: Callable[[], None]) -> ServedModel:
        opened.append(ServedModel(model, budget_bytes, gets_on, lambda _text, _index, _piece: None))
        return opened[-1]

    thread = ModelThread("m", opener, little, on_outcome=outcomes.append)
    thread.start()
    assert thread.resize(little).result(60) == little
    carrier = opened[0]._runtime.cache._books._carrier
    allocate, left = carrier.allocate, iter(range(3))

    def allocate_some() -> Place:
        if next(left, None) is None:
            raise MemoryError("the machine has no more")
        return allocate()

    carrier.allocate = allocate_some
    with pytest.raises(ModelError, match="there is no memory for 24 experts"):
        thread.resize(EXPERTS * EXPERT_BYTES).result(60)
    assert thread.held_bytes == thread.status()["used_bytes"] == little
    thread.submit(a_text("hello"))
    until_s = time.monotonic() + 60
    while not outcomes and time.monotonic() < until_s:
        time.sleep(0.005)
    assert [outcome.reason for outcome in outcomes] == [None]
    carrier.allocate = allocate
    assert thread.resize(EXPERTS * EXPERT_BYTES).result(60) == EXPERTS * EXPERT_BYTES
    assert thread.status()["used_bytes"] == EXPERTS * EXPERT_BYTES
    assert thread.stop(5.0)


def test_a_task_that_enters_is_profiled_with_its_waiting_and_the_prompts_costs_are_without_it(tmp_path: Path) -> None:
    checkpoint = a_text_model(tmp_path / "model")
    with served(checkpoint) as model:
        assert reason(model, "hello") is None
        counts = model._runtime.cache.metrics.of_phase["prefill"]
        assert model._profiles.loading_s(None) == counts.wait_s > 0.0


def test_a_step_teaches_what_computing_costs() -> None:
    before = Costs(prefill_token_s=0.0, step_s=0.0, row_s=0.0)
    assert learned(before, Took("prefill", 10, 1.0, loading_s=0.5)).prefill_token_s == 0.05 / 32
    assert learned(before, Took("prefill", 10, 1.0)).prefill_token_s == 0.1 / 32
    assert learned(before, Took("decode", 2, 1.0)).step_s == 1.0 / 32


def test_a_token_that_the_model_does_not_have_costs_its_own_request_only(tmp_path: Path) -> None:
    with served(a_text_model(tmp_path / "model", vocab_size=100)) as model:
        assert reason(model, "\u00e9") == "bad_prompt"
        assert reason(model, "a") is None
