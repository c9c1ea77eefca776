"""The runtime gives what the unmodified model gives, to the bit, however few experts are in memory."""

import pytest
import torch

from experts.moe.model.runtime import MoeRuntime, read_model
from experts.moe.modes.baselines import OnDemand
from tests.experts.moe.tiny import (
    EACH_FAMILY,
    FAMILIES,
    build_tiny,
    edit_config,
    load_unmodified,
    prompts,
    write_tiny,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return {family: write_tiny(root / family, family) for family in FAMILIES}


def open_runtime(folder, slots=None, mode=None):
    """Open a model on demand, with this many slots for each layer (None: for all experts)."""
    _, arch, _ = read_model(folder)
    budget_bytes = (slots or arch.experts) * arch.layers * arch.expert_bytes
    return MoeRuntime.open(folder, mode or OnDemand(), budget_bytes)


def answers(model, batch, tokens=9):
    """Return the logits of a prefill of left-padded prompts, and a text written from them."""
    inputs = prompts(batch, tokens)
    with torch.inference_mode():
        return model(**inputs).logits, model.generate(**inputs, max_new_tokens=8, do_sample=False)


def are_equal(tensors, expected):
    return all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))


def assert_same(runtime, folder, batch=2, tokens=9, **options):
    """Compare answers with those of the unmodified model, to the bit."""
    assert are_equal(answers(runtime.model, batch, tokens), answers(load_unmodified(folder, **options), batch, tokens))
    runtime.cache.check()


@pytest.mark.parametrize("slots", [1, 4, None])
@pytest.mark.parametrize("way", ["grouped_mm", "eager"])
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_logits_and_text_are_those_of_the_unmodified_model(folders, family, way, slots):
    runtime = open_runtime(folders[family], slots)
    runtime.model.set_experts_implementation(way)
    for batch in (1, 3):
        assert_same(runtime, folders[family], batch, experts_implementation=way)


@pytest.mark.parametrize("shards", ["1GB", "40KB"])
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_the_fused_layout_gives_the_same_in_one_file_and_in_many(tmp_path, folders, family, shards):
    write_tiny(tmp_path, family, layout="fused", shards=shards)
    assert_same(open_runtime(tmp_path, 2), folders[family])


def test_prefill_is_a_forward_without_a_past_whatever_its_length(folders):
    runtime, steps = open_runtime(folders["mixtral"]), []
    runtime.observers.append(lambda step, gate, _done: steps.append(step) if gate.layer == 0 else None)
    ids = prompts(tokens=12)["input_ids"]
    with torch.inference_mode():
        past = runtime.model(input_ids=ids[:, :1], use_cache=True).past_key_values
        runtime.model(input_ids=ids[:, 1:], past_key_values=past)
    assert [step.phase for step in steps] == ["prefill", "decode"]
    assert [step.tokens for step in steps] == [1, 11]


@pytest.mark.parametrize("way", ["grouped_mm", "eager"])
def test_tokens_with_the_sentinel_are_not_computed(folders, way):
    class Dropping(OnDemand):
        """The second choice of every other token is dropped."""

        def route(self, routing):
            routing.index[::2, 1] = routing.logits.shape[-1]
            return routing

    runtime = open_runtime(folders["mixtral"], 2, Dropping())
    runtime.model.set_experts_implementation(way)
    unmodified = build_tiny("mixtral").model.layers[0].mlp
    states = torch.randn(7, 32, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        output = runtime.model.model.layers[0].mlp(states.unsqueeze(0))[0]
        _, weights, index = unmodified.gate(states)
        index[::2, 1] = 8
        expected = type(unmodified.experts).forward.__wrapped__(unmodified.experts, states, index, weights)
    assert torch.equal(output, expected)


SCALED = [
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
]


@pytest.mark.parametrize("rope", SCALED, ids=lambda rope: rope["rope_type"])
def test_scaled_positions_are_rebuilt_as_the_unmodified_model_has_them(tmp_path, rope):
    write_tiny(tmp_path, "qwen3_moe", rope_parameters=rope)
    runtime = open_runtime(tmp_path, 4)
    for tokens in (50, 9):
        assert_same(runtime, tmp_path, tokens=tokens)


@pytest.mark.parametrize(("stored", "configured"), [("float16", None), ("float16", "float32"), ("float32", "bfloat16")])
def test_the_type_is_what_config_says_and_else_that_of_the_weights(tmp_path, stored, configured):
    write_tiny(tmp_path, dtype=getattr(torch, stored))
    edit_config(tmp_path, dtype=configured)
    runtime = open_runtime(tmp_path, 2)
    assert runtime.arch.dtype == load_unmodified(tmp_path).dtype == getattr(torch, configured or stored)
    assert_same(runtime, tmp_path)


def test_nothing_is_asked_of_the_network(folders, monkeypatch):
    def connect(*_):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr("socket.socket.connect", connect)
    monkeypatch.setattr("socket.getaddrinfo", connect)
    runtime = open_runtime(folders["mixtral"])
    answers(runtime.model, 1)
