"""The peer: the trained fixture served by Hugging Face `accelerate`, layers beyond the budget offloaded to disk.

make test-moe, or: .venv/bin/python -m pytest -q -s tests/moe/fixture_peer.py
"""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experts.moe.cache.metrics import CacheMetrics
from experts.moe.library import transformers
from tests.moe.evaluate import DecodeTiming, HeldOutPrompt, decode_timing, held_out_prompts
from tools.moe.checkpoint import arch_of, open_runtime

FIXTURE = Path("build/moe/fixture")

pytest.importorskip("accelerate", reason="needs the extra `dev`")


def time_accelerate(share: float, prompts: list[HeldOutPrompt], folder: Path) -> DecodeTiming:
    """Time it with as many layers in memory as the modes have memory for experts, one for those that pass through.

    Accelerate moves whole layers, not experts. This is the division that its own `device_map="auto"` makes, except that
    embeddings stay in memory, without which a tied checkpoint fails.
    """
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    library, arch = transformers(), arch_of(FIXTURE)
    in_memory = max(0, int(share * arch.layers) - 1)
    layers = [block.rpartition(".")[0] for block in arch.blocks]
    with torch.device("meta"):
        empty = library.AutoModelForCausalLM.from_config(library.AutoConfig.from_pretrained(FIXTURE))
    places = dict(_places(empty, "", set(layers[in_memory:])))
    model = library.AutoModelForCausalLM.from_pretrained(
        FIXTURE, device_map=places, offload_folder=folder, dtype=arch.dtype
    )
    cache = SimpleNamespace(metrics=CacheMetrics(arch.layers))
    runtime: Any = SimpleNamespace(model=model.eval(), step=lambda _rows: nullcontext(), cache=cache)
    decode_timing(runtime, prompts[:1], new_tokens=4)
    return decode_timing(runtime, prompts, new_tokens=32)


def _places(module: Any, prefix: str, on_disk: set[str]) -> Iterator[tuple[str, str]]:
    """Yield modules by name, none inside another, each with its place."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if path in on_disk:
            yield path, "disk"
        elif any(layer.startswith(f"{path}.") for layer in on_disk):
            yield from _places(child, f"{path}.", on_disk)
        else:
            yield path, "cpu"


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_loading_experts_on_demand_is_faster_than_moving_whole_layers(share: float, tmp_path: Path):
    prompts = held_out_prompts(FIXTURE, of_domain=1, length=128)
    runtime = open_runtime(FIXTURE, "ondemand", share=share)
    ours = decode_timing(runtime, prompts).as_dict()
    runtime.close()
    peer = time_accelerate(share, prompts, tmp_path).as_dict()
    print(f"\n{share} of the experts, TTFT and TPOT p50: ondemand {ours['ttft_p50_ms']:.1f} {ours['tpot_p50_ms']:.1f}")
    print(f"  accelerate {peer['ttft_p50_ms']:.1f} {peer['tpot_p50_ms']:.1f} ms")
    assert ours["tpot_p50_ms"] < peer["tpot_p50_ms"]
