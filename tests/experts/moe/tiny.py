"""Tiny models with random weights, written by transformers as it writes checkpoints; made in a fraction of a second."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra `moe`: pip install 'coserve[moe]'")

from safetensors.torch import load_file, save_file

from experts.moe.library import transformers

VOCABULARY = 96
CONTEXT = 64

_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.5,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}

#: What differs from family to family. Experts of 24 columns: 48 x 32 rows of gate and up, 32 x 24 of down.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**_SHARED, "num_hidden_layers": 3, "intermediate_size": 24, "num_local_experts": 8},
    "qwen2_moe": {
        **_SHARED,
        "num_hidden_layers": 3,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "mlp_only_layers": [1],
    },
    "olmoe": {
        **_SHARED,
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        **_SHARED,
        "num_hidden_layers": 2,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
}
#: Of tests that compute the same with each family.
EACH_FAMILY = [name if name == "mixtral" else pytest.param(name, marks=pytest.mark.test_all) for name in FAMILIES]


def build_tiny(family: str = "mixtral", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model in memory, the unmodified one of transformers."""
    library = transformers()
    torch.manual_seed(seed)
    config = library.AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
    return library.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def write_tiny(
    folder: Path,
    family: str = "mixtral",
    *,
    layout: str = "single",
    shards: str = "1GB",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Path:
    """A checkpoint of a random model. `layout`: "single" (a tensor for each expert's matrix) or "fused"."""
    model = build_tiny(family, seed=seed, dtype=dtype, **changes)
    model.save_pretrained(folder, max_shard_size=shards, save_original_format=layout == "single")
    return folder


def load_unmodified(folder: Path, **options: Any) -> Any:
    """The checkpoint as transformers loads it, in memory that is aligned as ours is.

    transformers maps the file, and some processors' kernels round otherwise where weights begin amid a cache line.
    """
    library = transformers()
    model = library.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def prompts(batch: int = 1, tokens: int = 9, *, seed: int = 1) -> dict[str, torch.Tensor]:
    """Token ids and their mask, (batch, tokens): all but the first row padded on the left, each by two more."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (batch, tokens), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        ids[row, : 2 * row] = 0
        mask[row, : 2 * row] = 0
    return {"input_ids": ids, "attention_mask": mask}


def fail_amid_each_layer(runtime: Any, step: Callable[[], object]) -> None:
    """A step that finds no memory at a layer, for each of them; what it leaves is whole."""
    for layer in range(runtime.arch.layers):

        def fail(_step: Any, gate: Any, _done: Any, layer: int = layer) -> None:
            if gate.layer == layer:
                raise MemoryError("no memory for this step")

        runtime.observers.append(fail)
        with pytest.raises(MemoryError):
            step()
        runtime.observers.remove(fail)
        runtime.check()


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    """Replace, add, or (None) take away tensors of an unsharded checkpoint."""
    file = folder / "model.safetensors"
    tensors: dict[str, Any] = {**load_file(file), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, file, metadata={"format": "pt"})
    return file
