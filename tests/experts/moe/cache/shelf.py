"""A store of numbered experts in a real file, for tests of slots: no model, no transformers."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey, ExpertWeights
from experts.reading import read_exactly

HIDDEN, INTERMEDIATE = 16, 8
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE * 4


@dataclass(frozen=True, slots=True)
class ShelfArch:
    layers: int = 3
    experts: int = 8
    top_k: int = 2

    @property
    def expert_keys(self) -> tuple[ExpertKey, ...]:
        return tuple(ExpertKey(layer, expert) for layer in range(self.layers) for expert in range(self.experts))

    def weights(self, buffer: torch.Tensor) -> ExpertWeights:
        values = buffer[:EXPERT_BYTES].view(torch.float32)
        split = 2 * HIDDEN * INTERMEDIATE
        return ExpertWeights(values[:split].view(-1, HIDDEN), values[split:].view(HIDDEN, INTERMEDIATE))


class Shelf:
    """Every weight of an expert is `100 * layer + expert`. `broken` experts cannot be read; `order` is who was."""

    expert_bytes = stored_bytes = EXPERT_BYTES

    def __init__(self, folder: Path, arch: ShelfArch) -> None:
        self.folder = folder
        self.arch = arch
        self.order: list[ExpertKey] = []
        file = folder / "experts.bin"
        everybody = arch.expert_keys
        numbers = np.array([100 * key.layer + key.expert for key in everybody], np.float32)
        file.write_bytes(np.repeat(numbers, EXPERT_BYTES // 4).tobytes())
        self.file = file

    def read(self, key: ExpertKey, view: memoryview) -> None:
        self.order.append(key)
        try:
            descriptor = os.open(self.file, os.O_RDONLY)
            try:
                read_exactly(descriptor, view, (key.layer * self.arch.experts + key.expert) * EXPERT_BYTES)
            finally:
                os.close(descriptor)
        except (OSError, EOFError) as error:
            raise ModelError(self.file, f"expert {key.layer}.{key.expert} cannot be read ({error})") from error


def number(weights: ExpertWeights) -> int:
    """Which expert these weights are of; -1 where they are of two."""
    lowest, highest = torch.cat([weights.gate_up.flatten(), weights.down.flatten()]).aminmax()
    return int(lowest) if lowest == highest else -1
