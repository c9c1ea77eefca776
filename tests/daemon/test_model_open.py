"""A language model in service, without its thread: requests that it cannot do end, and are named."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from daemon.config import Model
from daemon.records import AcceptedText, TextRequest

pytest.importorskip("transformers", reason="language models need the extra `moe`")
from daemon.model_open import ServedModel
from tests.tiny_text import EXPERT_BYTES, EXPERTS, a_text_model


@contextmanager
def served(checkpoint: Path) -> Iterator[ServedModel]:
    memory = EXPERTS * EXPERT_BYTES
    model = Model(checkpoint=checkpoint, memory=memory, mode="ondemand", rows=1)
    found = ServedModel(model, memory, lambda: None, lambda _text, _index, _piece: None)
    yield found
    found.close()


def reason(model: ServedModel, prompt: str) -> str | None:
    """How a request ended: at its beginning, or within some steps."""
    text = AcceptedText(1, TextRequest("s", "1", "m", prompt, max_new_tokens=2), time.time(), time.monotonic())
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


def test_a_token_that_the_model_does_not_have_costs_its_own_request_only(tmp_path: Path) -> None:
    with served(a_text_model(tmp_path / "model", vocab_size=100)) as model:
        assert reason(model, "\u00e9") == "bad_prompt"
        assert reason(model, "a") is None
