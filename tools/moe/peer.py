"""The peer: the same checkpoint served by Hugging Face `accelerate`, layers beyond the budget offloaded to disk."""

import logging
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from experts.moe.library import transformers
from tools.moe.evaluate import HeldOutPrompt, arch_of, greedy
from tools.moe.job import Job
from tools.moe.side import Memory


def measure_accelerate(job: Job, timed: list[HeldOutPrompt]) -> dict[str, float | None]:
    """As many layers in memory as the modes have memory for experts, one layer's room kept for those that pass through.

    Accelerate moves whole layers, not experts. This is the division that its own `device_map="auto"` makes, except that
    embeddings stay in memory, without which a tied checkpoint fails.
    """
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    library = transformers()
    library.utils.logging.disable_progress_bar()
    arch = arch_of(job.checkpoint)
    in_memory = max(0, int(job.share * arch.layers) - 1)
    layers = [block.rpartition(".")[0] for block in arch.blocks]
    with torch.device("meta"):
        empty = library.AutoModelForCausalLM.from_config(library.AutoConfig.from_pretrained(job.checkpoint))
    memory = Memory("cpu")
    with tempfile.TemporaryDirectory(prefix="coserve-offload-") as folder:
        model = library.AutoModelForCausalLM.from_pretrained(
            job.checkpoint,
            device_map=dict(_places(empty, "", set(layers[in_memory:]))),
            offload_folder=folder,
            dtype=arch.dtype,
        )
        model.eval()
        greedy(model, timed[:1], 4)
        timing = greedy(model, timed, job.new_tokens)
        return {**timing.as_dict(), "peak_mb": memory.peak_mb(), "layers_in_memory": float(in_memory)}


def _places(module: Any, prefix: str, on_disk: set[str]) -> Iterator[tuple[str, str]]:
    """Modules by name, none within another, and where each goes."""
    for name, child in module.named_children():
        whole = f"{prefix}{name}"
        if whole in on_disk:
            yield whole, "disk"
        elif any(layer.startswith(f"{whole}.") for layer in on_disk):
            yield from _places(child, f"{whole}.", on_disk)
        else:
            yield whole, "cpu"
