"""The runtime gives what the unmodified model gives, to the bit, however few experts are in memory."""

import threading

import pytest
import torch
from safetensors.torch import load_file

from experts.moe.gating import StepRow
from experts.moe.model.runtime import MoeRuntime, read_model
from experts.moe.modes import open_mode
from experts.moe.modes.baselines import OnDemand
from tests.experts.moe.tiny import (
    FAMILIES,
    VOCABULARY,
    build_tiny,
    edit_config,
    edit_tensors,
    load_unmodified,
    prompts,
    write_tiny,
)

#: Families with transformers' choice of how experts are added up; Switch Transformers has one way only.
WAYS = [(family, way) for family in FAMILIES if family != "switch_transformers" for way in ("grouped_mm", "eager")]
CAUSAL = [family for family in FAMILIES if family != "switch_transformers"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return {family: write_tiny(root / family, family) for family in FAMILIES}


def open_runtime(folder, slots=None, mode=None):
    """On demand, with this many slots for each layer (None: for all experts)."""
    _, arch, _ = read_model(folder)
    budget_bytes = (slots or arch.experts) * arch.layers * arch.expert_bytes
    return MoeRuntime.open(folder, mode or open_mode("ondemand", folder), budget_bytes)


def answers(model, batch, family="mixtral", tokens=9):
    """Logits of a prefill and a text written from it, of left-padded prompts."""
    given = prompts(batch, tokens)
    more = {"decoder_input_ids": given["input_ids"][:, :4]} if family == "switch_transformers" else {}
    with torch.inference_mode():
        return model(**given, **more).logits, model.generate(**given, max_new_tokens=8, do_sample=False)


def are_equal(found, expected):
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("slots", [1, 4, None])
@pytest.mark.parametrize(("family", "way"), [*WAYS, ("switch_transformers", "eager")])
def test_logits_and_text_are_those_of_the_unmodified_model(folders, family, way, slots):
    expected = load_unmodified(folders[family], experts_implementation=way)
    runtime = open_runtime(folders[family], slots)
    if family in CAUSAL:
        runtime.model.set_experts_implementation(way)
    for batch in (1, 3):
        assert are_equal(answers(runtime.model, batch, family), answers(expected, batch, family))
    runtime.cache.check()
    runtime.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_choice_of_ours_the_sum_is_transformers_own(folders, family):
    runtime = open_runtime(folders[family], 4)
    expected = answers(load_unmodified(folders[family]), 3, family)
    assert are_equal(answers(runtime.model, 3, family), expected)
    runtime.close()


@pytest.mark.parametrize("shards", ["1GB", "40KB"])
@pytest.mark.parametrize("family", CAUSAL)
def test_the_fused_layout_gives_the_same_in_one_file_and_in_many(tmp_path, folders, family, shards):
    write_tiny(tmp_path, family, layout="fused", shards=shards)
    runtime = open_runtime(tmp_path, 2)
    assert are_equal(answers(runtime.model, 2), answers(load_unmodified(folders[family]), 2))
    runtime.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_checkpoints_give_the_same_too(tmp_path, family):
    write_tiny(tmp_path, family, dtype=torch.bfloat16)
    runtime = open_runtime(tmp_path, 2)
    assert runtime.arch.dtype == torch.bfloat16
    assert are_equal(answers(runtime.model, 2, family), answers(load_unmodified(tmp_path), 2, family))
    runtime.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_parameter_is_an_expert_and_nothing_is_left_on_meta(folders, family):
    runtime = open_runtime(folders[family], 1)
    gates = [f"{block}.{runtime.arch.naming.gate}" for block in runtime.arch.blocks]
    assert not any(value.is_meta for value in (*runtime.model.parameters(), *runtime.model.buffers()))
    for name, value in runtime.model.named_parameters():
        assert ".experts." not in name
        assert value.shape[0] != runtime.arch.experts or name.startswith(tuple(gates))
    runtime.close()


def test_tied_weights_are_one_tensor(folders):
    runtime = open_runtime(folders["olmoe"])
    assert runtime.model.lm_head.weight is runtime.model.model.embed_tokens.weight
    runtime.close()
    switch = open_runtime(folders["switch_transformers"]).model
    assert switch.decoder.embed_tokens.weight is switch.shared.weight


def test_prompts_longer_than_the_slots_hold_are_served_in_waves(folders):
    runtime = open_runtime(folders["qwen3_moe"], 2)
    expected = load_unmodified(folders["qwen3_moe"])
    assert are_equal(answers(runtime.model, 3, tokens=40), answers(expected, 3, tokens=40))
    runtime.close()


class Watching(OnDemand):
    """On demand, and remembers its steps and what it was asked to route."""

    def __init__(self):
        super().__init__()
        self.steps = []
        self.routings = []

    def begin(self, step):
        super().begin(step)
        self.steps.append(step)

    def route(self, routing):
        self.routings.append(routing)
        return routing


def test_prefill_is_a_forward_without_a_past_whatever_its_length(folders):
    runtime = open_runtime(folders["mixtral"], mode=Watching())
    ids = prompts(tokens=12)["input_ids"]
    with torch.inference_mode():
        past = runtime.model(input_ids=ids[:, :1], use_cache=True).past_key_values
        runtime.model(input_ids=ids[:, 1:], past_key_values=past)
    assert [step.phase for step in runtime.mode.steps] == ["prefill", "decode"]
    assert [step.tokens for step in runtime.mode.steps] == [1, 11]
    runtime.close()


def test_a_text_of_an_encoder_and_a_decoder_is_two_prefills_and_then_decoding(folders):
    runtime = open_runtime(folders["switch_transformers"], mode=Watching())
    runtime.model.generate(**prompts(2), max_new_tokens=3, do_sample=False)
    assert [step.phase for step in runtime.mode.steps] == ["prefill", "prefill", "decode", "decode"]
    assert [step.tokens for step in runtime.mode.steps] == [18, 2, 2, 2]
    layers = [routing.layer for routing in runtime.mode.routings]
    assert (runtime.arch.encoder_layers, layers) == (2, [0, 1, 2, 2, 2])
    runtime.close()


def test_the_routing_is_the_gates_own(folders):
    runtime = open_runtime(folders["qwen2_moe"], mode=Watching())
    seen = []
    runtime.observers.append(lambda step, said, done: seen.append((step.number, said.layer, said is done)))
    runtime.model(**prompts())
    assert seen == [(1, 0, True), (1, 1, True)]
    for routing, gate in zip(runtime.mode.routings, runtime.mode.gates, strict=True):
        assert routing.hidden.shape == (9, 32)
        assert torch.equal(routing.logits, gate(routing.hidden))
        best = routing.logits.softmax(dim=-1).topk(4)
        assert torch.equal(routing.index, best.indices)
        assert torch.equal(routing.weight, best.values)
    runtime.close()


def test_a_named_step_carries_its_rows(folders):
    runtime = open_runtime(folders["mixtral"], mode=Watching())
    rows = (StepRow("r-1", "python", 9), StepRow("r-2", None, 9))
    with runtime.step(rows):
        runtime.model(**prompts(2))
    runtime.model(**prompts(2))
    assert runtime.mode.steps[0].rows == rows
    assert runtime.mode.steps[1].rows == (StepRow("", None, 9),) * 2
    runtime.close()


@pytest.mark.parametrize("way", ["grouped_mm", "eager"])
def test_tokens_with_the_sentinel_are_computed_by_nobody(folders, way):
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
        found = runtime.model.model.layers[0].mlp(states.unsqueeze(0))[0]
        _, weights, index = unmodified.gate(states)
        index[::2, 1] = 8
        expected = type(unmodified.experts).forward.__wrapped__(unmodified.experts, states, index, weights)
    assert torch.equal(found, expected)
    runtime.close()


def test_threads_that_use_one_model_wait_for_each_other(folders):
    runtime = open_runtime(folders["mixtral"], 1)
    expected = answers(load_unmodified(folders["mixtral"]), 2)
    found = []
    threads = [threading.Thread(target=lambda: found.append(answers(runtime.model, 2))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert all(are_equal(one, expected) for one in found)
    runtime.close()


def test_a_step_that_failed_leaves_the_model_fit_for_the_next(folders):
    class Failing(Watching):
        """Fails in its second layer, once."""

        def route(self, routing):
            if routing.layer == 1 and len(self.steps) == 1:
                raise ValueError("this once")
            return super().route(routing)

    runtime = open_runtime(folders["mixtral"], 2, Failing())
    with pytest.raises(ValueError, match="this once"):
        runtime.model(**prompts())
    expected = answers(load_unmodified(folders["mixtral"]), 1)
    assert are_equal(answers(runtime.model, 1), expected)
    runtime.cache.check()
    runtime.close()


WAYS_TO_WRITE = [
    {"num_beams": 3, "do_sample": False},
    {"use_cache": False, "do_sample": False},
    {"do_sample": True, "top_k": 7},
    {"cache_implementation": "static", "disable_compile": True, "do_sample": False},
]


@pytest.mark.parametrize("options", WAYS_TO_WRITE, ids=lambda options: next(iter(options)))
def test_every_way_of_generate_writes_the_same(folders, options):
    runtime = open_runtime(folders["mixtral"], 2)
    texts = []
    for model in (runtime.model, load_unmodified(folders["mixtral"])):
        torch.manual_seed(5)
        texts.append(model.generate(**prompts(3), max_new_tokens=6, **options))
    assert torch.equal(*texts)
    runtime.close()


def test_what_training_asks_of_a_forward_is_there(folders):
    runtime = open_runtime(folders["mixtral"], 2)
    given = {**prompts(2), "output_router_logits": True, "output_hidden_states": True}
    found, expected = (
        model(**given, labels=given["input_ids"]) for model in (runtime.model, load_unmodified(folders["mixtral"]))
    )
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.aux_loss, expected.aux_loss)
    assert are_equal(found.router_logits, expected.router_logits)
    assert are_equal(found.hidden_states, expected.hidden_states)
    runtime.close()


SCALED = [
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
]


@pytest.mark.parametrize("rope", SCALED, ids=lambda rope: rope["rope_type"])
def test_scaled_positions_are_rebuilt_as_the_unmodified_model_has_them(tmp_path, rope):
    write_tiny(tmp_path, "qwen3_moe", rope_parameters=rope)
    runtime = open_runtime(tmp_path, 4)
    expected = load_unmodified(tmp_path)
    for tokens in (50, 9):
        assert are_equal(answers(runtime.model, 2, tokens=tokens), answers(expected, 2, tokens=tokens))
    runtime.close()


@pytest.mark.parametrize("held", ["both", "both, and different", "head only"])
def test_tied_weights_in_a_checkpoint_are_taken_as_transformers_takes_them(tmp_path, held):
    write_tiny(tmp_path, "olmoe")
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    head = table + 1 if "different" in held else table.clone()
    edit_tensors(
        tmp_path, {"lm_head.weight": head, "model.embed_tokens.weight": None if held == "head only" else table}
    )
    runtime = open_runtime(tmp_path, 4)
    assert are_equal(answers(runtime.model, 1), answers(load_unmodified(tmp_path), 1))
    runtime.close()


@pytest.mark.parametrize(("stored", "said"), [("float16", None), ("float16", "float32"), ("float32", "bfloat16")])
def test_the_type_is_what_config_says_and_else_that_of_the_weights(tmp_path, stored, said):
    write_tiny(tmp_path, dtype=getattr(torch, stored))
    edit_config(tmp_path, dtype=said)
    runtime = open_runtime(tmp_path, 2)
    expected = load_unmodified(tmp_path)
    assert runtime.arch.dtype == expected.dtype == getattr(torch, said or stored)
    assert are_equal(answers(runtime.model, 2), answers(expected, 2))
    runtime.close()


def test_layers_may_differ_in_their_layout_on_disk(tmp_path):
    write_tiny(tmp_path / "single", "qwen2_moe")
    write_tiny(tmp_path / "fused", "qwen2_moe", layout="fused")
    fused = load_file(tmp_path / "fused" / "model.safetensors")
    first = "model.layers.0.mlp.experts."
    single = dict.fromkeys(load_file(tmp_path / "single" / "model.safetensors"))
    changes = {name: None for name in single if name.startswith(first)}
    edit_tensors(tmp_path / "single", changes | {name: fused[name] for name in fused if name.startswith(first)})
    runtime = open_runtime(tmp_path / "single", 4)
    assert are_equal(answers(runtime.model, 1), answers(load_unmodified(tmp_path / "fused"), 1))
    runtime.close()


SPARSE = [
    {"num_sparse_encoder_layers": 9},  # more than layers: none is sparse
    {"num_sparse_encoder_layers": 4, "num_sparse_decoder_layers": 2, "router_bias": True, "dense_act_fn": "gelu"},
]


@pytest.mark.parametrize("changes", SPARSE, ids=lambda changes: str(changes["num_sparse_encoder_layers"]))
def test_switch_transformers_with_other_sparse_layers_give_the_same(tmp_path, changes):
    write_tiny(tmp_path, "switch_transformers", **changes)
    runtime = open_runtime(tmp_path, 2)
    expected = load_unmodified(tmp_path)
    family = "switch_transformers"
    assert are_equal(answers(runtime.model, 3, family), answers(expected, 3, family))
    runtime.close()


def test_nothing_is_asked_of_the_network(folders, monkeypatch):
    def connect(*_):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr("socket.socket.connect", connect)
    monkeypatch.setattr("socket.getaddrinfo", connect)
    runtime = open_runtime(folders["mixtral"])
    answers(runtime.model, 1)
    runtime.close()


def test_what_the_unmodified_model_reads_beside_its_weights_is_read_too(tmp_path):
    write_tiny(tmp_path)
    unmodified = load_unmodified(tmp_path)
    unmodified.generation_config.max_new_tokens = 5
    unmodified.generation_config.repetition_penalty = 1.4
    unmodified.generation_config.save_pretrained(tmp_path)
    runtime = open_runtime(tmp_path, 4)
    texts = [model.generate(**prompts()) for model in (runtime.model, load_unmodified(tmp_path))]
    assert texts[0].shape[1] == 14
    assert are_equal(*[[text] for text in texts])
    assert int(texts[0].max()) < VOCABULARY
    runtime.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_building_a_model_of_another_type_changes_nothing_for_other_threads(tmp_path, monkeypatch, family):
    """One default type holds for all threads of torch, and images are judged meanwhile."""
    write_tiny(tmp_path, family, dtype=torch.bfloat16)
    expected = load_unmodified(tmp_path)
    defaults = []
    set_default = torch.set_default_dtype
    monkeypatch.setattr(torch, "set_default_dtype", lambda dtype: (defaults.append(dtype), set_default(dtype)))
    model, arch, _ = read_model(tmp_path)
    assert set(defaults) <= {torch.float32}
    assert (model.dtype, model.config.dtype, arch.dtype) == (torch.bfloat16,) * 3
    types = [
        {name: each.dtype for name, each in (*one.named_parameters(), *one.named_buffers())}
        for one in (model, expected)
    ]
    assert types[0] == types[1]
