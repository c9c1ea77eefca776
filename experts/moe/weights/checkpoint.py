"""A checkpoint's tensors: where each lies in which file, checked by the headers, and reading them.

An expert takes two positioned reads in a fused layout, three with one tensor per matrix, one after `coserve moe import`
(slot_file.py). A tensor with an older name on disk appears under the model's name. The checkpoint must have exactly the
tensors of the model; errors name those missing, left over or of another shape.
"""

import math
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experts.moe.arch import FAMILIES, FUSED, MoeArch
from experts.moe.errors import ModelError
from experts.moe.folder import open_part, stored_tensors
from experts.moe.gating import ExpertKey
from experts.reading import read_exactly
from experts.weights import describe_os_error

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: Buffers that older versions wrote among the weights; they are always computed.
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """One tensor of a file. `offset` counts bytes from the start of the file, `stored` is its name there."""

    stored: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    tensors: Mapping[str, TensorLocation]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the first tensor, which transformers takes for the model's if config.json has none."""
        return next(iter(self.tensors.values())).dtype


def read_checkpoint(folder: Path, family: str) -> Checkpoint:
    """Read the headers of all files of a checkpoint, `model.safetensors` or its shards. Raises ModelError."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        suffixes = {".bin", ".safetensors", ".pt", ".gguf"}
        others = sorted(file.name for file in folder.iterdir() if file.suffix in suffixes)
        found = ", ".join(others[:_SHOWN]) or "no weights at all"
        message = f"has neither model.safetensors nor shards of it, but {found}"
        raise ModelError(folder, f"{message}; save the model with save_pretrained, which writes safetensors")
    tensors: dict[str, TensorLocation] = {}
    for file in files:
        for name, stored in stored_tensors(file).items():
            if _COMPUTED.search(name):
                continue
            renamed = name
            for old, new in FAMILIES[family].renamed.items():
                renamed = renamed.replace(old, new)
            if renamed in tensors:
                raise ModelError(file, f"tensor {name} is also in {tensors[renamed].file.name}; keep one of the two")
            tensors[renamed] = _location(name, file, *stored)
    if not tensors:
        raise ModelError(folder, "its weights files hold no tensors; fetch the checkpoint again")
    return Checkpoint(folder, tensors)


def _location(name: str, file: Path, stored: str, shape: tuple[int, ...], begin: int, end: int) -> TensorLocation:
    dtype = _DTYPES.get(stored)
    if dtype is None:
        message = f"tensor {name} is {stored}; expected one of {', '.join(_DTYPES)}"
        raise ModelError(file, f"{message}: this runtime takes checkpoints that are not quantised")
    if end - begin != math.prod(shape) * dtype.itemsize:
        message = f"tensor {name} has {end - begin} bytes where its shape {list(shape)} takes"
        raise ModelError(file, f"{message} {math.prod(shape) * dtype.itemsize}; fetch the file again")
    return TensorLocation(name, file, dtype, shape, begin, end - begin)


def expert_shapes(arch: MoeArch, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the expert tensors this checkpoint should have: fused in a layer that has a fused one, else per matrix."""
    shapes: dict[str, tuple[int, ...]] = {}
    gate_up, down = arch.gate_up_shape, arch.down_shape
    for block in arch.blocks:
        fused = [f"{block}.{name}" for name in FUSED]
        if any(name in checkpoint.tensors for name in fused):
            shapes |= dict(zip(fused, ((arch.experts, *gate_up), (arch.experts, *down)), strict=True))
            continue
        parts = [(arch.intermediate, arch.hidden)] * 2 + [down]
        for expert in range(arch.experts):
            names = [f"{block}.{name.format(e=expert)}" for name in FAMILIES[arch.family].single]
            shapes |= dict(zip(names, parts, strict=True))
    return shapes


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]) -> None:
    """Raise ModelError unless the checkpoint has exactly these tensors. One of two `tied` ones may be missing."""
    tensors = checkpoint.tensors
    partners = {**tied, **{source: target for target, source in tied.items()}}
    missing = [name for name in expected if name not in tensors and partners.get(name) not in tensors]
    if missing:
        shape, module = list(expected[missing[0]]), missing[0].rsplit(".", 2)[0]
        beside = sorted(tensor.stored for name, tensor in tensors.items() if name.startswith(f"{module}."))
        found = f"found beside it {', '.join(beside[:_SHOWN])}" if beside else f"found no tensor of {module}"
        message = f"lacks tensor {missing[0]} of shape {shape}{_more(missing)}; {found}"
        raise ModelError(checkpoint.folder, f"{message}: fetch the checkpoint again, or correct config.json")
    extra = [name for name in tensors if name not in expected]
    if extra:
        tensor = tensors[extra[0]]
        surplus = f"tensor {tensor.stored} of shape {list(tensor.shape)}{_more(extra)}"
        message = f"has {surplus}, which a model of this config.json does not have"
        raise ModelError(tensor.file, f"{message}; correct config.json, or fetch the file again")
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is not None and tensor.shape != shape:
            message = f"tensor {tensor.stored} has shape {list(tensor.shape)}; expected {list(shape)} by config.json"
            raise ModelError(tensor.file, f"{message}: correct config.json, or fetch the file again")


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


class WeightFiles:
    """Open descriptors of the files that weights are read from. Thread-safe."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, file: Path, view: memoryview, offset: int) -> None:
        """Fill `view` from a file. Raises ModelError if the file is gone or ends early."""
        try:
            read_exactly(self._descriptor(file), view, offset)
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
                with open_part(file) as opened:
                    self._open[file] = os.dup(opened.fileno())
            return self._open[file]


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


def load_tensors(model: Any, checkpoint: Checkpoint, device: str) -> None:
    """Load all weights outside experts into a model on `meta`, and rebuild its buffers. Raises ModelError."""
    files = WeightFiles()
    state: dict[str, torch.Tensor] = {}
    try:
        for name, placeholder in model.state_dict().items():
            tensor = checkpoint.tensors.get(name)
            if tensor is not None:
                state[name] = _read_tensor(files, tensor).to(device=device, dtype=placeholder.dtype)
    finally:
        files.close()
    missing = set(model.load_state_dict(state, strict=False, assign=True).missing_keys)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    model.requires_grad_(requires_grad=False)
    rebuild_buffers(model, device)
    unset = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
    if unset:
        raise ModelError(checkpoint.folder, f"has no value for {unset[0]}; this version cannot run the model")


def _read_tensor(files: WeightFiles, tensor: TensorLocation) -> torch.Tensor:
    raw = torch.empty(tensor.size_bytes, dtype=torch.uint8)
    if tensor.size_bytes:
        files.read(tensor.file, raw.numpy().data, tensor.offset)
    return raw.view(tensor.dtype).view(tensor.shape)


def rebuild_buffers(model: Any, device: str) -> None:
    """Compute again the buffers on `meta` that no checkpoint holds (rotary frequencies)."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            fresh: nn.Module = type(module)(config=module.config)
            for key, buffer in module.named_buffers(recurse=False):
                persistent = f"{name}.{key}" in model.state_dict()
                module.register_buffer(key, fresh.get_buffer(key).to(device, buffer.dtype), persistent=persistent)
            for key in vars(fresh):
                if key.startswith("original_") and isinstance(getattr(module, key, None), torch.Tensor):
                    setattr(module, key, getattr(fresh, key).to(device))
