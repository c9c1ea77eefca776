"""A command's checkpoint: its shapes, and its model opened in a mode."""

from pathlib import Path
from typing import Any

from experts.moe.arch import MoeArch, load_config, read_arch
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes import open_mode
from experts.moe.weights.checkpoint import read_checkpoint


def open_runtime(
    checkpoint: Path, mode: str, *, share: float = 1.0, options: dict[str, Any] | None = None, device: str = "cpu"
) -> MoeRuntime:
    """Open the model in a mode, with memory for `share` of each layer's experts. Raises ModelError."""
    opened = open_mode(mode, checkpoint, options)
    return MoeRuntime.open(checkpoint, opened, budget_of(checkpoint, share), device=device)


def budget_of(checkpoint: Path, share: float) -> int:
    """Return the bytes of `share` of each layer's experts, whole experts in each layer. Raises ModelError."""
    arch = arch_of(checkpoint)
    return arch.layers * max(1, round(share * arch.experts)) * arch.expert_bytes


def arch_of(checkpoint: Path) -> MoeArch:
    config = load_config(checkpoint)
    return read_arch(checkpoint, config, read_checkpoint(checkpoint, config.model_type).dtype)
