"""Routing traces for tests."""

from pathlib import Path
from typing import Any

import torch

from experts.moe.model.runtime import MoeRuntime
from experts.moe.trace import Trace


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


def observe_gates(runtime: MoeRuntime) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Return a list that collects layer, experts and weights of each gate from now on."""
    gates: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    runtime.observers.append(lambda _step, gate, _done: gates.append((gate.layer, gate.index, gate.weight)))
    return gates


def open_with_slots(folder: Path, mode: Any, slots: int = 8, **options: Any) -> MoeRuntime:
    """Open a checkpoint with this many slots for each layer."""
    from experts.moe.arch import load_config, read_arch

    arch = read_arch(folder, load_config(folder), torch.float32)
    return MoeRuntime.open(folder, mode, slots * arch.layers * arch.expert_bytes, **options)
