"""Experts in 8 or 4 bits on disk: packing matrices, and unpacking them into a slot.

A group of a row's columns has one float32 scale and minimum: the whole row in 8 bits, 64 columns (fewer if the columns
do not divide) in 4 bits, where two weights share a byte, the first in the low half.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from experts.moe.gating import ExpertWeights

_GROUP = 64
Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Packing:
    """Layout of one expert's stored bytes: of each matrix the scales, the minima, and the codes."""

    bits: Literal[8, 4]
    shapes: tuple[Shape, Shape]

    @property
    def stored_bytes(self) -> int:
        return sum(8 * self._groups(shape) + self._code_bytes(shape) for shape in self.shapes)

    def pack(self, weights: ExpertWeights) -> torch.Tensor:
        """Return an expert's matrices, of any floating type, as (stored_bytes,) uint8."""
        parts: list[torch.Tensor] = []
        for shape, matrix in zip(self.shapes, weights, strict=True):
            groups, most = matrix.float().reshape(self._groups(shape), -1), 2**self.bits - 1
            minimum = groups.amin(dim=1)
            scale = ((groups.amax(dim=1) - minimum) / most).clamp_min(torch.finfo(torch.float32).tiny)
            codes = ((groups - minimum[:, None]) / scale[:, None]).round().clamp(0, most).to(torch.uint8).flatten()
            if self.bits == 4:
                codes = functional.pad(codes, (0, len(codes) % 2))
                codes = codes[0::2] | (codes[1::2] << 4)
            codes = functional.pad(codes, (0, self._code_bytes(shape) - len(codes)))
            parts += [scale.view(torch.uint8), minimum.view(torch.uint8), codes]
        return torch.cat(parts)

    def unpack(self, stored: torch.Tensor, target: ExpertWeights) -> None:
        """Dequantise (stored_bytes,) uint8 into the views of a slot, of any type."""
        for shape, matrix in zip(self.shapes, target, strict=True):
            parameter_bytes, code_bytes = 8 * self._groups(shape), self._code_bytes(shape)
            parameters, codes, stored = stored.split(
                [parameter_bytes, code_bytes, len(stored) - parameter_bytes - code_bytes]
            )
            scale, minimum = parameters.view(torch.float32).view(2, -1, 1)
            if self.bits == 4:
                codes = torch.stack((codes & 15, codes >> 4), dim=1).flatten()
            groups = codes[: math.prod(shape)].view(len(scale), -1).float()
            matrix.copy_(groups.mul_(scale).add_(minimum).view(shape))

    def _groups(self, shape: Shape) -> int:
        rows, columns = shape
        return rows if self.bits == 8 else rows * (columns // math.gcd(columns, _GROUP))

    def _code_bytes(self, shape: Shape) -> int:
        """Return the bytes of the codes, rounded up to whole float32s to keep the next part aligned."""
        return -(-math.prod(shape) * self.bits // 32) * 4
