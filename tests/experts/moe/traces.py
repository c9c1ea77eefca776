"""Traced and opened checkpoints of tests."""

from pathlib import Path
from typing import Any

import torch

from experts.moe.model.runtime import MoeRuntime, read_model
from experts.moe.trace import Trace, load_trace
from experts.moe.weights.prepared import TRAIN as TRACE
from experts.moe.weights.prepared import PreparedFiles
from tools.moe.trace import TRAIN, TaskText, save_text, take_trace


def make_trace(index: torch.Tensor, experts: int = 8, **changes: Any) -> Trace:
    """Return a trace of one prompt of one task, all of it decoded; `index` is (N, L, k)."""
    tokens = len(index)
    columns = {
        "weight": torch.full(index.shape, 1 / index.shape[2], dtype=torch.float16),
        "token": torch.zeros(tokens, dtype=torch.int32),
        "start": torch.tensor([0, tokens]),
        "task": torch.zeros(1, dtype=torch.int16),
        "tasks": ("text",),
    }
    return Trace(index=index.to(torch.int16), experts=experts, **(columns | changes))


def take_tiny_trace(folder: Path, ids: dict[str, torch.Tensor], length: int) -> Trace:
    """Trace each task's ids in prompts of this length, and save text and trace."""
    prepared = PreparedFiles(folder)
    save_text(prepared, TRAIN, TaskText(ids))
    take_trace(prepared, TRACE, prompts=1000, length=length)
    return load_trace(prepared, TRACE)


def open_with_slots(folder: Path, mode: Any, slots: int = 8, **options: Any) -> MoeRuntime:
    """Open a checkpoint with this many slots for each layer."""
    _, arch, _ = read_model(folder)
    return MoeRuntime.open(folder, mode, slots * arch.layers * arch.expert_bytes, **options)
