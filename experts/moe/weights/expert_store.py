"""Expert weights on disk and how they reach a slot: one positioned read for each contiguous piece.

An expert takes two reads in a fused layout, three with one tensor per matrix, one after `coserve moe import`
(slot_file.py). Nothing is mapped into memory.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from experts.moe.arch import FAMILIES, FUSED, MoeArch
from experts.moe.gating import ExpertKey
from experts.moe.weights.checkpoint import Checkpoint, TensorLocation, WeightFiles


class ExpertStore:
    """The experts of one model, on disk. Thread-safe."""

    #: Bytes of one expert on disk, which a fill reads.
    stored_bytes: int

    def __init__(self, arch: MoeArch, checkpoint: Checkpoint) -> None:
        self.arch = arch
        self.folder = checkpoint.folder
        self.expert_bytes = arch.expert_bytes
        self._files = WeightFiles()

    def read(self, key: ExpertKey, view: memoryview) -> None:
        """Fill `view`, expert_bytes of writable memory. Raises ModelError."""
        raise NotImplementedError

    def close(self) -> None:
        self._files.close()


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """Contiguous bytes of one expert: at `offset` in `file` and at `place` in the slot; `dtype` as stored."""

    file: Path
    offset: int
    size_bytes: int
    place: int
    dtype: torch.dtype


class CheckpointStore(ExpertStore):
    """Experts read from a checkpoint's own files, in either layout."""

    def __init__(self, arch: MoeArch, checkpoint: Checkpoint) -> None:
        super().__init__(arch, checkpoint)
        self._pieces = {key: _pieces(arch, checkpoint, key) for key in arch.expert_keys}
        self.stored_bytes = max(sum(piece.size_bytes for piece in pieces) for pieces in self._pieces.values())
        #: Reads for a fill, of the expert that needs most.
        self.reads = max(map(len, self._pieces.values()))

    def read(self, key: ExpertKey, view: memoryview) -> None:
        for piece in self._pieces[key]:
            if piece.dtype == self.arch.dtype:
                self._files.read(piece.file, view[piece.place : piece.place + piece.size_bytes], piece.offset)
                continue
            raw = torch.empty(piece.size_bytes, dtype=torch.uint8)
            self._files.read(piece.file, raw.numpy().data, piece.offset)
            stored = raw.view(piece.dtype)
            end = piece.place + stored.numel() * self.arch.dtype.itemsize
            torch.frombuffer(view[piece.place : end], dtype=self.arch.dtype).copy_(stored)


def _pieces(arch: MoeArch, checkpoint: Checkpoint, key: ExpertKey) -> list[ReadPiece]:
    block = arch.blocks[key.layer]
    fused = [f"{block}.{name}" for name in FUSED]
    if fused[0] in checkpoint.tensors:
        both = zip((checkpoint.tensors[name] for name in fused), (0, arch.down_offset), strict=True)
        return [_part(tensor, key.expert, arch.experts, place) for tensor, place in both]
    places = (0, arch.gate_up_bytes // 2, arch.down_offset)
    names = [f"{block}.{name.format(e=key.expert)}" for name in FAMILIES[arch.family].single]
    return [_part(checkpoint.tensors[name], 0, 1, place) for name, place in zip(names, places, strict=True)]


def _part(tensor: TensorLocation, number: int, parts: int, place: int) -> ReadPiece:
    size = tensor.size_bytes // parts
    return ReadPiece(tensor.file, tensor.offset + number * size, size, place, tensor.dtype)
