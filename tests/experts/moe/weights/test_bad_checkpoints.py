"""A checkpoint that is not right, or a request that cannot be served, ends in one sentence that says what to do."""

import json
import re
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey
from experts.moe.model.runtime import MoeRuntime, read_model
from experts.moe.modes import open_mode
from experts.moe.weights.expert_store import CheckpointStore
from tests.experts.moe.tiny import CONTEXT, edit_config, edit_tensors, prompts, write_tiny

EXPERT = "model.layers.1.block_sparse_moe.experts.5.w2.weight"
EXPERT_NOW = "model.layers.1.mlp.experts.5.w2.weight"
NORM = "model.layers.0.input_layernorm.weight"


def says(*words):
    """The message has these, in this order."""
    return "(?s)" + ".*".join(map(re.escape, words))


@pytest.fixture
def folder(tmp_path):
    return write_tiny(tmp_path / "model")


def open_runtime(folder, budget_bytes=1 << 20, mode="ondemand"):
    return MoeRuntime.open(folder, open_mode(mode, folder), budget_bytes)


@pytest.mark.parametrize("name", [EXPERT, NORM, "model.layers.2.block_sparse_moe.gate.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named_with_its_shape(folder, name):
    edit_tensors(folder, {name: None})
    with pytest.raises(ModelError, match=says(str(folder), "lacks tensor", name.split(".")[-2], "of shape [")):
        open_runtime(folder)


def test_a_missing_expert_says_what_lies_beside_it(folder):
    edit_tensors(folder, {EXPERT: None})
    beside = EXPERT.replace("w2", "w1")
    with pytest.raises(ModelError, match=says(f"lacks tensor {EXPERT_NOW} of shape [32, 24]", beside, "fetch")):
        open_runtime(folder)


def test_more_missing_tensors_are_counted(folder):
    edit_config(folder, num_hidden_layers=4)
    with pytest.raises(ModelError, match=says("lacks tensor model.layers.3.", "more)", "config.json")):
        open_runtime(folder)


def test_a_tensor_too_many_is_named(folder):
    file = edit_tensors(folder, {"model.layers.0.mlp.surplus.weight": torch.zeros(3, 4)})
    found = "tensor model.layers.0.mlp.surplus.weight of shape [3, 4]"
    with pytest.raises(ModelError, match=says(str(file), found, "does not have", "config.json")):
        open_runtime(folder)


def test_experts_too_many_are_named(folder):
    edit_config(folder, num_local_experts=6)
    edit_tensors(folder, {f"model.layers.{n}.block_sparse_moe.gate.weight": torch.zeros(6, 32) for n in range(3)})
    with pytest.raises(ModelError, match=says("experts.6.", "more)", "does not have")):
        open_runtime(folder)


@pytest.mark.parametrize(("name", "shape"), [(EXPERT, (32, 25)), (NORM, (31,))])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder, name, shape):
    expected = {EXPERT: "[32, 24]", NORM: "[32]"}[name]
    file = edit_tensors(folder, {name: torch.zeros(shape)})
    found = f"tensor {name} has shape {list(shape)}; expected {expected}"
    with pytest.raises(ModelError, match=says(str(file), found)):
        open_runtime(folder)


def test_a_fused_tensor_of_another_shape_is_named(tmp_path):
    write_tiny(tmp_path, layout="fused")
    edit_tensors(tmp_path, {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(8, 48, 31)})
    with pytest.raises(ModelError, match=says("gate_up_proj has shape [8, 48, 31]; expected [8, 48, 32]")):
        open_runtime(tmp_path)


def test_half_a_fused_layer_names_the_other_half(tmp_path):
    write_tiny(tmp_path, layout="fused")
    edit_tensors(tmp_path, {"model.layers.0.mlp.experts.down_proj": None})
    with pytest.raises(
        ModelError, match=says("lacks tensor model.layers.0.mlp.experts.down_proj of shape [8, 32, 24]")
    ):
        open_runtime(tmp_path)


def test_a_quantised_tensor_is_refused_by_its_type(folder):
    edit_tensors(folder, {EXPERT: torch.zeros(32, 24, dtype=torch.int8)})
    with pytest.raises(ModelError, match=says(f"tensor {EXPERT} is I8; expected one of F32, F16, BF16")):
        open_runtime(folder)


def test_a_truncated_file_says_by_how_much_and_which_tensor(folder):
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1000)
    with pytest.raises(ModelError, match=says(str(file), "is truncated: tensor ", "fetch the file again")):
        open_runtime(folder)


@pytest.mark.parametrize("content", [b"", b"1234", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"])
def test_a_file_that_is_no_safetensors_is_named(folder, content):
    file = folder / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=says(str(file), "is not a safetensors file")):
        open_runtime(folder)


def test_a_damaged_header_is_named(folder):
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:20] = b"x" * 12
    file.write_bytes(bytes(data))
    with pytest.raises(ModelError, match=says(str(file), "damaged header")):
        open_runtime(folder)


def test_a_file_cut_off_while_serving_is_named_by_the_forward(folder):
    runtime = open_runtime(folder, budget_bytes=3 * 9216)
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(20_000)
    with pytest.raises(ModelError, match=says(str(file), "bytes early")):
        runtime.model(**prompts())
    runtime.close()


def test_an_unknown_architecture_says_what_was_found_and_what_is_known(folder):
    edit_config(folder, model_type="llama")
    with pytest.raises(ModelError, match=says("config.json", "'llama'", "mixtral, qwen2_moe")):
        open_runtime(folder)


def test_a_folder_without_config_is_named(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=says(str(folder), "there is no config.json", "Hugging Face format")):
        open_runtime(folder)
    with pytest.raises(ModelError, match=says("elsewhere", "there is no such folder")):
        open_runtime(folder.parent / "elsewhere")


def test_a_config_that_is_no_json_is_named(folder):
    (folder / "config.json").write_text("{model_type: mixtral")
    with pytest.raises(ModelError, match=says("config.json", "cannot be read as JSON")):
        open_runtime(folder)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"num_local_experts": 0}, "num_local_experts is 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9 and num_local_experts 8"),
        ({"hidden_size": "wide"}, "config.json"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"num_hidden_layers": 0}, "no mixture-of-experts layer"),
        ({"hidden_act": "siluu"}, "config.json"),
        ({"model_type": ["mixtral"]}, "model_type is ['mixtral']"),
    ],
)
def test_a_config_that_describes_no_model_is_named(folder, changes, found):
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=says("config.json", *found.split("config.json"))):
        open_runtime(folder)


@pytest.mark.parametrize("changes", [{"decoder_sparse_step": 0}, {"decoder_sparse_step": None}, {"mlp_only_layers": 1}])
def test_a_config_whose_sparse_layers_cannot_be_told_is_named(tmp_path, changes):
    edit_config(write_tiny(tmp_path, "qwen2_moe"), **changes)
    with pytest.raises(ModelError, match=says("config.json", *changes)):
        open_runtime(tmp_path)


@pytest.mark.parametrize("content", ["no JSON", "[]"])
def test_generation_settings_that_cannot_be_read_are_named(folder, content):
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=says("generation_config.json", "cannot be read", "restore")):
        open_runtime(folder)


def test_a_folder_without_safetensors_says_what_it_has(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=says(str(folder), "pytorch_model.bin", "save_pretrained")):
        open_runtime(folder)


def test_an_index_that_names_a_missing_file_says_which(tmp_path):
    write_tiny(tmp_path, shards="100KB")
    missing = sorted(tmp_path.glob("model-*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(ModelError, match=says(str(missing), "there is no such file", "index.json names it for tensor")):
        open_runtime(tmp_path)


def test_an_index_that_names_a_tensor_its_file_lacks_says_which(tmp_path):
    write_tiny(tmp_path, shards="100KB")
    file = min(tmp_path.glob("model-*.safetensors"))
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(ModelError, match=says(str(file), f"lacks tensor {name}", "index.json says is in it")):
        open_runtime(tmp_path)


@pytest.mark.parametrize("content", ["{}", "[1]", '{"weight_map": {"a": "../outside.safetensors"}}'])
def test_an_index_that_is_none_is_named(tmp_path, content):
    write_tiny(tmp_path, shards="100KB")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    with pytest.raises(ModelError, match=says(str(index), "expected a file" if "outside" in content else "weight_map")):
        open_runtime(tmp_path)


def test_a_tensor_in_two_files_is_named(tmp_path):
    write_tiny(tmp_path, shards="100KB")
    first, second = sorted(tmp_path.glob("model-*.safetensors"))[:2]
    name, value = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: value}, second)
    with pytest.raises(ModelError, match=says(f"tensor {name} is also in {first.name}")):
        open_runtime(tmp_path)


def test_a_tokenizer_that_cannot_be_read_is_named(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=says(str(folder), "tokenizer cannot be read")):
        open_runtime(folder)


@pytest.mark.parametrize(("budget_bytes", "mode"), [(0, "ondemand"), (2 * 9216 - 1, "ondemand")])
def test_a_budget_below_the_experts_of_a_token_says_how_much_it_takes(folder, budget_bytes, mode):
    expected = says(str(folder), f"budget of {budget_bytes} bytes", "2 experts of 9216 bytes", f"at least {2 * 9216}")
    with pytest.raises(ModelError, match=expected):
        open_runtime(folder, budget_bytes, mode)


def test_a_mode_that_chooses_among_its_experts_needs_those_of_a_token_in_each_layer(folder):
    class Choosing(type(open_mode("ondemand", folder))):
        lossless = False

    with pytest.raises(ModelError, match=says("in each of 3 layers", f"give at least {6 * 9216} bytes")):
        MoeRuntime.open(folder, Choosing(), 5 * 9216)


@pytest.mark.parametrize("call", ["model", "generate"])
def test_a_prompt_that_is_empty_or_too_long_is_refused_and_the_model_serves_on(folder, call):
    runtime = open_runtime(folder)
    run = runtime.model if call == "model" else runtime.model.generate
    with pytest.raises(ModelError, match=says(str(folder), "the prompt is empty")):
        run(input_ids=torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(ModelError, match=says("prompt has 65 tokens", "context 64", "shorten it")):
        run(input_ids=torch.ones(1, CONTEXT + 1, dtype=torch.long))
    assert runtime.model(**prompts()).logits.isfinite().all()
    runtime.close()


def test_a_prompt_without_room_for_its_answer_is_told_how_long_it_may_be(folder):
    runtime = open_runtime(folder)
    runtime.check_prompt(CONTEXT, 0)
    runtime.check_prompt(CONTEXT - 10, 10)
    with pytest.raises(ModelError, match=says("60 tokens and 10 new ones", "context 64; shorten it to 54")):
        runtime.check_prompt(60, 10)
    runtime.close()


def test_experts_that_cannot_be_read_leave_the_other_layers_books_in_order(folder):
    runtime = open_runtime(folder, budget_bytes=4 * 9216)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    with file.open("r+b") as opened:
        opened.truncate(20_000)
    with pytest.raises(ModelError):
        runtime.model(**prompts())
    runtime.cache.check()
    with file.open("r+b") as opened:
        opened.write(content)
    assert runtime.model(**prompts()).logits.isfinite().all()
    runtime.cache.check()
    runtime.close()


def test_a_model_that_could_not_be_opened_leaves_no_file_open_and_no_thread(folder):
    class Unprepared(type(open_mode("ondemand", folder))):
        def attach(self, cache, arch):
            super().attach(cache, arch)
            cache.prefetch([ExpertKey(0, 0)])
            cache.quiesce()
            raise ModelError(folder, "not made yet")

    threads = set(threading.enumerate())
    with pytest.raises(ModelError, match="not made yet"):
        MoeRuntime.open(folder, Unprepared(), 6 * 9216)
    files = [link.resolve() for link in Path("/proc/self/fd").iterdir() if link.exists()]
    assert not [file for file in files if file.is_relative_to(folder)]
    assert set(threading.enumerate()) <= threads


def test_older_names_and_computed_buffers_in_a_checkpoint_are_taken(folder):
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    edit_tensors(folder, old)
    runtime = open_runtime(folder)
    runtime.close()


def test_weights_stored_in_another_type_are_converted_on_their_way_into_a_slot(folder):
    original = load_file(folder / "model.safetensors")[EXPERT]
    edit_tensors(folder, {EXPERT: original.bfloat16()})
    _, arch, checkpoint = read_model(folder)
    store = CheckpointStore(arch, checkpoint)
    buffer = torch.zeros(store.expert_bytes, dtype=torch.uint8)
    store.read(ExpertKey(1, 5), buffer.numpy().data)
    assert torch.equal(store.weights(buffer).down, original.bfloat16().float())
    store.close()


def test_the_import_command_refuses_with_one_sentence(folder):
    from typer.testing import CliRunner

    from tools.cli.main import app

    edit_config(folder, model_type="gpt2")
    result = CliRunner().invoke(app, ["moe", "import", str(folder)])
    assert result.exit_code == 1
    assert "model_type is 'gpt2'" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_import_command_reports_what_it_wrote_and_what_packing_costs(folder):
    from typer.testing import CliRunner

    from tools.cli.main import app

    result = CliRunner().invoke(app, ["moe", "import", str(folder), "--storage", "int8", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["reads_per_expert"] == {"checkpoint": 3, "imported": 1}
    assert len(report["layer_errors"]) == 3
    assert all(0 < error < 0.01 for error in report["layer_errors"])
    assert report["logit_error_max"] > 0
    assert (folder / "coserve" / "experts-int8.safetensors").is_file()
