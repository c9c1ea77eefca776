"""A language model in service, without its thread: requests that it cannot do end, and are named."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from daemon.config.settings import Model
from daemon.records import Generation

pytest.importorskip("transformers", reason="language models need the extra `moe`")
from daemon.language.model_thread import ModelThread
from daemon.language.served_model import ServedModel
from experts.moe.errors import ModelError
from experts.moe.gating import ForwardStep
from experts.transfer import SlotMemory
from tests.tiny_text import EXPERT_BYTES, EXPERTS, a_text_model
from tests.waiting import until


@contextmanager
def served(checkpoint: Path, **settings: Any) -> Iterator[ServedModel]:
    memory = EXPERTS * EXPERT_BYTES
    model = Model(checkpoint=checkpoint, **{"memory": memory, "mode": "ondemand", "rows": 1, **settings})
    opened = ServedModel(model, memory, lambda: None, lambda _text, _index, _piece: None)
    yield opened
    opened.close()


def a_text(prompt: str, number: int = 1, new_tokens: int = 2) -> Generation:
    at = {"accepted_s": time.monotonic()}
    return Generation("s", str(number), "m", prompt, max_new_tokens=new_tokens, generation_id=number, **at)


def reason(model: ServedModel, prompt: str) -> str | None:
    """Return how a request ended: at its beginning, or within some steps."""
    refused = model.begin(a_text(prompt), time.monotonic())
    if refused is not None:
        return refused.reason
    for _ in range(10):
        ended, error = model.step()
        if ended:
            assert error is None
            return ended[0][0].reason
    raise AssertionError("it never ended")


def test_a_prompt_beyond_a_context_that_the_configuration_leaves_to_the_library_is_refused(tmp_path: Path) -> None:
    checkpoint = a_text_model(tmp_path / "model")
    file = checkpoint / "config.json"
    config = json.loads(file.read_text())
    del config["max_position_embeddings"]
    file.write_text(json.dumps(config))
    with served(checkpoint, text_memory=3_000_000) as model:
        assert reason(model, "a" * 300_000) == "bad_prompt"
        assert reason(model, "a" * 5_000) is None


def test_a_token_that_the_model_does_not_have_costs_its_own_request_only(tmp_path: Path) -> None:
    with served(a_text_model(tmp_path / "model", vocab_size=100)) as model:
        assert reason(model, "\u00e9") == "bad_prompt"
        assert reason(model, "a") is None


def test_a_text_that_its_memory_can_never_hold_is_refused_although_it_was_let_in(tmp_path: Path) -> None:
    with served(a_text_model(tmp_path / "model"), text_memory=50 * 512, max_new_tokens=20) as model:
        assert model.text_tokens == 50
        assert reason(model, "a" * 49) == "bad_prompt"
        assert reason(model, "a" * 48) is None


class Line:
    """A model's thread with a real model, that a test breaks amid a layer."""

    def __init__(self, folder: Path, memory: int = EXPERTS * EXPERT_BYTES, **settings: Any) -> None:
        checkpoint = a_text_model(folder / "model")
        self.model = Model(checkpoint=checkpoint, memory=memory, **{"mode": "ondemand"} | settings)
        self.opened: list[ServedModel] = []
        self.outcomes: dict[int, Generation] = {}
        #: Called with the rows of each layer of each step.
        self.breaks: Callable[[ForwardStep], None] = lambda _step: None
        self.thread = ModelThread("m", self.open, memory, on_outcome=self.ended)
        self.thread.start()

    def open(self, budget_bytes: int, gets_on: Callable[[], None]) -> ServedModel:
        model = ServedModel(self.model, budget_bytes, gets_on, lambda _text, _index, _piece: None)
        model._runtime.observers.append(lambda step, routing, _done: self.breaks(step) if routing.layer == 1 else None)
        self.opened.append(model)
        return model

    def ended(self, outcome: Generation) -> None:
        self.outcomes[outcome.generation_id] = outcome

    def ask(self, prompts: dict[int, str]) -> None:
        for number, prompt in prompts.items():
            self.thread.generate(a_text(prompt, number, 20))

    def texts(self, *numbers: int) -> dict[int, str | None]:
        """Return the text of each request, or the reason why there is none."""
        until(lambda: all(number in self.outcomes for number in numbers))
        outcomes = {number: self.outcomes.pop(number) for number in numbers}
        return {number: end.text if end.reason is None else end.reason for number, end in outcomes.items()}


PROMPTS = {1: "hello", 2: "of the board", 4: "x"}


def no_memory(step: ForwardStep) -> None:
    """Really no memory, amid the prefill of the third request."""
    if step.rows[0].request == "3" and step.phase == "prefill":
        torch.empty(1 << 60)


@pytest.mark.parametrize("mode", ["resident", "ondemand", "lookahead"])
def test_a_prefill_that_finds_no_memory_costs_its_own_text_and_the_model_stays_open(tmp_path: Path, mode: str) -> None:
    line = Line(tmp_path, mode=mode)
    line.ask(PROMPTS)
    expected = line.texts(1, 2, 4)
    assert all(isinstance(text, str) for text in expected.values())
    line.breaks = no_memory
    line.ask({1: PROMPTS[1], 2: PROMPTS[2], 3: "y" * 20, 4: PROMPTS[4]})
    assert line.texts(1, 2, 3, 4) == expected | {3: "model_failed"}
    status = line.thread.status()
    assert (status["state"], status["text_used_bytes"], line.thread.is_failing) == ("ready", 0, False)
    assert "RuntimeError" in status["last_error"]
    line.breaks = lambda _step: None
    line.ask({3: "y" * 20})
    assert line.texts(3)[3] not in (None, "model_failed")
    assert line.thread.stop(60.0)
    assert len(line.opened) == 1


def test_a_decoding_step_that_fails_costs_the_texts_that_run_and_none_that_wait(tmp_path: Path) -> None:
    line = Line(tmp_path, rows=2)
    line.ask(PROMPTS)
    expected = line.texts(1, 2, 4)
    failed: list[ForwardStep] = []

    def once(step: ForwardStep) -> None:
        if len(step.rows) == 2 and not failed:
            failed.append(step)
            raise MemoryError("no memory for this step")

    line.breaks = once
    line.ask(PROMPTS)
    assert line.texts(1, 2, 4) == {1: "model_failed", 2: "model_failed", 4: expected[4]}
    line.ask(PROMPTS)
    assert line.texts(1, 2, 4) == expected
    assert line.thread.stop(60.0)
    assert len(line.opened) == 1


def test_a_model_whose_memory_cannot_grow_keeps_its_memory(tmp_path: Path) -> None:
    small, large = 8 * EXPERT_BYTES, EXPERTS * EXPERT_BYTES
    line = Line(tmp_path, small, text_memory=64 * 512, rows=1)
    assert line.thread.resize(small).result(60) == small
    transfer: Any = line.opened[0]._runtime.cache._transfer
    allocate, available = transfer.allocate, iter(range(3))

    def allocate_some() -> SlotMemory:
        if next(available, None) is None:
            raise MemoryError("the machine has no more")
        return allocate()

    transfer.allocate = allocate_some
    with pytest.raises(ModelError, match="there is no memory for 24 experts"):
        line.thread.resize(large).result(60)
    assert line.thread.held_bytes == line.thread.status()["used_bytes"] == small
    line.ask({1: "hello"})
    assert line.texts(1)[1] != "model_failed"
    transfer.allocate = allocate
    assert line.thread.resize(large).result(60) == large == line.thread.status()["used_bytes"]
    assert line.thread.stop(60.0)


@pytest.mark.parametrize("what", ["nothing but failures", "wrong books", "a damaged file"])
def test_a_model_whose_state_is_lost_is_closed_and_the_next_text_opens_it(tmp_path: Path, what: str) -> None:
    line = Line(tmp_path)
    line.ask(PROMPTS)
    expected = line.texts(1, 2, 4)

    def fail(_step: ForwardStep) -> None:
        if what == "wrong books":
            line.opened[-1]._runtime.cache._ledger.count += 1
        if what == "a damaged file":
            raise ModelError(tmp_path, "an expert is not what it was")
        raise ValueError("this text")

    line.breaks = fail
    for number in (1, 2, 4) if what == "nothing but failures" else (1,):
        line.ask({number: PROMPTS[number]})
        assert line.texts(number) == {number: "model_failed"}
    until(lambda: line.thread.is_failing)
    line.breaks = lambda _step: None
    line.ask(PROMPTS)
    assert line.texts(1, 2, 4) == expected
    assert line.thread.stop(60.0)
    assert len(line.opened) == 2
