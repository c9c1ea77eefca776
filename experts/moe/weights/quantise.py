"""Experts in 8 or 4 bits on disk: packing matrices, and unpacking them into a slot.

int8: one float32 scale for each row, symmetric. int4: one float32 scale and minimum for each group of a row's 64
columns (fewer if the columns do not divide), two weights in a byte, the first in the low half.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from experts.moe.arch import MoeArch
from experts.moe.gating import ExpertWeights

Bits = Literal[8, 4]
_GROUP = 64


@dataclass(frozen=True, slots=True)
class Packing:
    """Layout of one expert's stored bytes: the float32 parameters of both matrices, then their codes."""

    bits: Bits
    shapes: tuple[tuple[int, int], tuple[int, int]]

    @classmethod
    def of(cls, arch: MoeArch, bits: Bits) -> "Packing":
        return cls(bits, (arch.gate_up_shape, arch.down_shape))

    @property
    def stored_bytes(self) -> int:
        return sum(4 * self._parameters(shape) + self._packed_bytes(shape) for shape in self.shapes)

    def pack(self, weights: ExpertWeights) -> torch.Tensor:
        """Return an expert's matrices, of any floating type, as (stored_bytes,) uint8."""
        packed = [_quantise(matrix.float(), self.bits) for matrix in weights]
        return torch.cat([*(part.view(torch.uint8) for part, _ in packed), *(codes for _, codes in packed)])

    def unpack(self, stored: torch.Tensor, target: ExpertWeights) -> None:
        """Dequantise (stored_bytes,) uint8 into the views of a slot, of any type."""
        parameters, codes = 0, sum(4 * self._parameters(shape) for shape in self.shapes)
        for shape, matrix in zip(self.shapes, target, strict=True):
            end = parameters + 4 * self._parameters(shape)
            scales = stored[parameters:end].view(torch.float32)
            parameters = end
            size = self._packed_bytes(shape)
            _dequantise(scales, stored[codes : codes + size], self.bits, matrix)
            codes += size

    def _parameters(self, shape: tuple[int, int]) -> int:
        rows, columns = shape
        return rows if self.bits == 8 else 2 * rows * (columns // _group(columns))

    def _packed_bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of the codes, rounded up to whole float32s to keep the next part aligned."""
        size = shape[0] * shape[1] if self.bits == 8 else -(-shape[0] * shape[1] // 2)
        return -(-size // 4) * 4


def _group(columns: int) -> int:
    return math.gcd(columns, _GROUP)


def _quantise(matrix: torch.Tensor, bits: Bits) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn (rows, columns) float32 into flat float32 parameters and flat uint8 codes."""
    if bits == 8:
        scale = matrix.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        codes = (matrix / scale[:, None]).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
        return scale, _padded(codes.reshape(-1))
    groups = matrix.reshape(-1, _group(matrix.shape[1]))
    minimum = groups.amin(dim=1)
    scale = ((groups.amax(dim=1) - minimum) / 15).clamp_min(torch.finfo(torch.float32).tiny)
    codes = ((groups - minimum[:, None]) / scale[:, None]).round().clamp(0, 15).to(torch.uint8).reshape(-1)
    codes = torch.nn.functional.pad(codes, (0, len(codes) % 2))
    return torch.cat([scale, minimum]), _padded(codes[0::2] | (codes[1::2] << 4))


def _padded(codes: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(codes, (0, -len(codes) % 4))


def _dequantise(parameters: torch.Tensor, codes: torch.Tensor, bits: Bits, target: torch.Tensor) -> None:
    rows, columns = target.shape
    if bits == 8:
        whole = codes[: rows * columns].view(torch.int8).view(rows, columns)
        target.copy_(whole.float() * parameters[:, None])
        return
    halves = torch.stack((codes & 15, codes >> 4), dim=1).reshape(-1)[: rows * columns]
    scale, minimum = parameters.view(2, -1)
    groups = halves.view(len(scale), -1).float()
    target.copy_(groups.mul_(scale[:, None]).add_(minimum[:, None]).view(rows, columns))
