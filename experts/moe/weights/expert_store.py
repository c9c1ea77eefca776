"""Expert weights where they lie on disk, and the one way into a slot: a positioned read per contiguous piece.

A checkpoint's own files are read as they are: one piece for an expert that `coserve moe import` has laid out, two for
a fused layout, three for one tensor per matrix. Nothing is mapped into memory.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from experts.moe.arch import ExpertKey, ExpertWeights, MoeArch
from experts.moe.errors import ModelError
from experts.moe.weights.checkpoint import Checkpoint, TensorLocation
from experts.reading import CachedReader, Reader
from experts.weights import describe_os_error


class ExpertStore(Protocol):
    """The experts of one model, on disk. Thread-safe."""

    @property
    def arch(self) -> MoeArch: ...

    @property
    def folder(self) -> Path:
        """Of the checkpoint, for errors."""
        ...

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in a slot."""
        ...

    @property
    def stored_bytes(self) -> int:
        """Bytes of one expert on disk: what a fill moves."""
        ...

    def read(self, key: ExpertKey, view: memoryview) -> None:
        """Fill `view`, expert_bytes of writable memory. Raises ModelError."""
        ...

    def weights(self, buffer: torch.Tensor) -> ExpertWeights:
        """Views of a slot's buffer, (expert_bytes,) uint8 on any device."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """Contiguous bytes of one expert: in `file` at `offset`, in the slot at `place`; `dtype` as stored."""

    file: Path
    offset: int
    size_bytes: int
    place: int
    dtype: torch.dtype


class WeightFiles:
    """Descriptors of the files that weights are read from, opened once each. Thread-safe."""

    def __init__(self, reader: Reader | None = None) -> None:
        self._reader = reader or CachedReader()
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, file: Path, view: memoryview, offset: int) -> None:
        """Fill `view` from a file. Raises ModelError where it is gone or ends early."""
        try:
            self._reader.read(self._descriptor(file), view, offset)
        except EOFError as error:
            raise ModelError(file, f"{error}; fetch the file again") from error
        except OSError as error:
            raise ModelError(file, describe_os_error(error)) from error

    def close(self) -> None:
        with self._lock:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._open:
                self._open[file] = self._reader.open(file)
            return self._open[file]


class CheckpointStore:
    """Experts read from the files of a checkpoint as they came, in either layout."""

    def __init__(self, arch: MoeArch, checkpoint: Checkpoint, reader: Reader | None = None) -> None:
        self.arch = arch
        self.folder = checkpoint.folder
        self.expert_bytes = arch.expert_bytes
        self._pieces = {key: _merge(_pieces(arch, checkpoint, key)) for key in arch.keys()}  # noqa: SIM118 — not a mapping
        self.stored_bytes = max(sum(piece.size_bytes for piece in pieces) for pieces in self._pieces.values())
        #: Reads that a fill takes, of the expert that takes most.
        self.reads = max(map(len, self._pieces.values()))
        self._files = WeightFiles(reader)

    def read(self, key: ExpertKey, view: memoryview) -> None:
        for piece in self._pieces[key]:
            if piece.dtype == self.arch.dtype:
                self._files.read(piece.file, view[piece.place : piece.place + piece.size_bytes], piece.offset)
                continue
            raw = torch.empty(piece.size_bytes, dtype=torch.uint8)
            self._files.read(piece.file, raw.numpy().data, piece.offset)
            stored = raw.view(piece.dtype)
            end = piece.place + stored.numel() * self.arch.dtype.itemsize
            target = torch.frombuffer(view[piece.place : end], dtype=self.arch.dtype)
            target.copy_(stored)

    def weights(self, buffer: torch.Tensor) -> ExpertWeights:
        return self.arch.weights(buffer)

    def close(self) -> None:
        self._files.close()


def _pieces(arch: MoeArch, checkpoint: Checkpoint, key: ExpertKey) -> list[ReadPiece]:
    """Where the matrices of one expert lie, in the order of a slot."""
    block = arch.blocks[key.layer]
    half = arch.gate_up_bytes // (2 if arch.names.gated else 1)
    fused = [f"{block}.{name}" for name in arch.names.fused]
    if fused and fused[0] in checkpoint.tensors:
        found = [checkpoint.tensors[name] for name in fused]
        where = zip(found, (0, arch.down_offset), strict=True)
        return [_part(tensor, key.expert, arch.experts, place) for tensor, place in where]
    places = (0, half, arch.down_offset) if arch.names.gated else (0, arch.down_offset)
    names = [f"{block}.{name.format(e=key.expert)}" for name in arch.names.single]
    return [_part(checkpoint.tensors[name], 0, 1, place) for name, place in zip(names, places, strict=True)]


def _part(tensor: TensorLocation, number: int, parts: int, place: int) -> ReadPiece:
    size = tensor.size_bytes // parts
    return ReadPiece(tensor.file, tensor.offset + number * size, size, place, tensor.dtype)


def _merge(pieces: Sequence[ReadPiece]) -> tuple[ReadPiece, ...]:
    """Neighbours in the file that are neighbours in the slot are one read."""
    merged: list[ReadPiece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.file, last.dtype) == (piece.file, piece.dtype)
            and last.offset + last.size_bytes == piece.offset
            and last.place + last.size_bytes == piece.place
        ):
            merged[-1] = ReadPiece(last.file, last.offset, last.size_bytes + piece.size_bytes, last.place, last.dtype)
        else:
            merged.append(piece)
    return tuple(merged)
