"""A checkpoint that is not right, or a request that cannot be served, ends in one sentence that says what to do."""

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey
from experts.moe.model.mode import Mode
from experts.moe.model.runtime import MoeRuntime
from tests.experts.moe.tiny import edit_config, edit_tensors, prompts, write_tiny

EXPERT = "model.layers.1.block_sparse_moe.experts.5.w2.weight"
FUSED = "model.layers.0.mlp.experts."

Damage = Callable[[Path], object]


def says(*words: str) -> str:
    """Return a pattern of a message that has these words in this order."""
    return "(?s)" + ".*".join(map(re.escape, words))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model")


def open_runtime(folder: Path, budget_bytes: int = 1 << 20, mode: Mode | None = None) -> MoeRuntime:
    return MoeRuntime.open(folder, mode or Mode(), budget_bytes)


def tensors(**changes: torch.Tensor | None) -> Damage:
    return lambda folder: edit_tensors(folder, changes)


def config(**changes: Any) -> Damage:
    return lambda folder: edit_config(folder, **changes)


def content(name: str, data: bytes | str) -> Damage:
    return lambda folder: (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1000)


def pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def spoil_header(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as opened:
        opened.seek(8)
        opened.write(b"x" * 12)


DAMAGES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no expert": (
        tensors(**{EXPERT: None}),
        ("lacks tensor model.layers.1.mlp.experts.5.w2.weight of shape [32, 24]", EXPERT.replace("w2", "w1"), "fetch"),
    ),
    "no layer": (config(num_hidden_layers=4), ("lacks tensor model.layers.3.", "more)", "config.json")),
    "a tensor more": (
        tensors(**{"model.layers.0.mlp.surplus.weight": torch.zeros(3, 4)}),
        ("tensor model.layers.0.mlp.surplus.weight of shape [3, 4]", "does not have", "config.json"),
    ),
    "another expert shape": (tensors(**{EXPERT: torch.zeros(32, 25)}), (EXPERT, "shape [32, 25]; expected [32, 24]")),
    "quantised": (
        tensors(**{EXPERT: torch.zeros(32, 24, dtype=torch.int8)}),
        (f"tensor {EXPERT} is I8; expected one of F32, F16, BF16",),
    ),
    "truncated": (truncate, ("model.safetensors", "is truncated: tensor ", "fetch the file again")),
    "empty": (content("model.safetensors", b""), ("model.safetensors", "is not a safetensors file")),
    "a pipe": (pipe, ("model.safetensors", "is not a regular file", "fetch the checkpoint again")),
    "damaged header": (spoil_header, ("model.safetensors", "damaged header")),
    "other family": (config(model_type="llama"), ("config.json", "'llama'", "mixtral, qwen2_moe")),
    "family list": (config(model_type=["mixtral"]), ("config.json", "model_type is ['mixtral']")),
    "no config": (lambda folder: (folder / "config.json").unlink(), ("there is no config.json", "Hugging Face format")),
    "config not JSON": (content("config.json", "{model_type: mixtral"), ("config.json", "cannot be read as JSON")),
    "no experts": (config(num_local_experts=0), ("config.json", "num_local_experts is 0")),
    "top 9 of 8": (config(num_experts_per_tok=9), ("config.json", "num_experts_per_tok is 9 and num_local_experts 8")),
    "width": (config(hidden_size="wide"), ("config.json",)),
    "no layers": (config(num_hidden_layers=0), ("config.json", "no mixture-of-experts layer")),
    "generation not JSON": (content("generation_config.json", "no JSON"), ("generation_config.json", "cannot be read")),
    "other weights": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        ("pytorch_model.bin", "save_pretrained"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_is_not_right_is_named_with_its_mistake(folder: Path, damage: str):
    spoil, words = DAMAGES[damage]
    spoil(folder)
    with pytest.raises(ModelError, match=says(str(folder), *words)):
        open_runtime(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{FUSED}gate_up_proj": torch.zeros(8, 48, 31)}, "has shape [8, 48, 31]; expected [8, 48, 32]"),
        ({f"{FUSED}down_proj": None}, f"lacks tensor {FUSED}down_proj of shape [8, 32, 24]"),
    ],
)
def test_a_fused_layer_that_is_not_right_is_named(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
):
    edit_tensors(write_tiny(tmp_path, layout="fused"), changes)
    with pytest.raises(ModelError, match=says(message)):
        open_runtime(tmp_path)


@pytest.mark.parametrize("changes", [{"decoder_sparse_step": 0}, {"decoder_sparse_step": None}, {"mlp_only_layers": 1}])
def test_a_config_with_invalid_sparse_layers_is_named(tmp_path: Path, changes: dict[str, Any]):
    edit_config(write_tiny(tmp_path, "qwen2_moe"), **changes)
    with pytest.raises(ModelError, match=says("config.json", *changes)):
        open_runtime(tmp_path)


def remove_shard(folder: Path) -> str:
    sorted(folder.glob("model-*.safetensors"))[1].unlink()
    return says(str(folder), "lacks tensor", "fetch the checkpoint again")


def repeat_tensor(folder: Path) -> str:
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    name, value = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: value}, second)
    return says(f"tensor {name} is also in {first.name}")


@pytest.mark.parametrize("spoil", [remove_shard, repeat_tensor])
def test_shards_that_do_not_make_a_model_are_named(tmp_path: Path, spoil: Callable[[Path], str]):
    message = spoil(write_tiny(tmp_path, shards="100KB"))
    with pytest.raises(ModelError, match=message):
        open_runtime(tmp_path)


@pytest.mark.parametrize("budget_bytes", [0, 2 * 9216 - 1])
def test_a_budget_below_the_experts_of_a_token_says_how_much_is_needed(folder: Path, budget_bytes: int):
    message = says(str(folder), f"budget of {budget_bytes} bytes", "2 experts of 9216 bytes", f"at least {2 * 9216}")
    with pytest.raises(ModelError, match=message):
        open_runtime(folder, budget_bytes)


def test_a_file_cut_off_while_serving_is_named_and_served_again_when_it_is_restored(folder: Path):
    runtime = open_runtime(folder, budget_bytes=4 * 9216)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    with file.open("r+b") as opened:
        opened.truncate(20_000)
    with pytest.raises(ModelError, match=says(str(file), "bytes early")):
        runtime.model(**prompts())
    runtime.cache.check()
    with file.open("r+b") as opened:
        opened.write(whole)
    assert runtime.model(**prompts()).logits.isfinite().all()
    runtime.cache.check()
    runtime.close()


class Unprepared(Mode):
    def attach(self, cache, arch):
        super().attach(cache, arch)
        cache.prefetch([ExpertKey(0, 0)])
        cache.quiesce()
        raise ModelError(cache.store.folder, "not made yet")


def test_a_model_that_could_not_be_opened_leaves_no_file_open_and_no_thread(folder: Path):
    threads = set(threading.enumerate())
    with pytest.raises(ModelError, match="not made yet"):
        open_runtime(folder, mode=Unprepared())
    files = [link.resolve() for link in Path("/proc/self/fd").iterdir() if link.exists()]
    assert not [file for file in files if file.is_relative_to(folder)]
    assert set(threading.enumerate()) <= threads
