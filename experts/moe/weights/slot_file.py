"""Slot files: a checkpoint's experts written as contiguous, page-aligned regions, so that a fill is one read.

A safetensors file with one tensor of bytes. The header names the model and weights that it
was made from, and a sha256 for each expert, checked at that expert's first read, and by a keyed hash at later ones.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open

from experts.moe.arch import MoeArch
from experts.moe.errors import ModelError
from experts.moe.folder import open_part
from experts.moe.gating import ExpertKey
from experts.moe.weights.checkpoint import Checkpoint, CheckpointStore, ExpertStore
from experts.moe.weights.prepared import FOLDER, stamp_of
from experts.moe.weights.quantise import Packing
from experts.reading import RegionHash
from experts.weights import PAGE_BYTES

Storage = Literal["exact", "int8", "int4"]
#: Where experts are read from: the checkpoint's own files, or an import. "auto": "exact" if there, else "checkpoint".
Source = Literal["auto", "checkpoint"] | Storage
_VERSION = "2"
_NO_DIGEST = "0" * 64


def slot_file(folder: Path, storage: Storage) -> Path:
    return folder / FOLDER / f"experts-{storage}.safetensors"


@dataclass(frozen=True)
class _SlotLayout:
    arch: MoeArch
    storage: Storage
    stamp: str

    @cached_property
    def packing(self) -> Packing | None:
        """Return how experts are packed; None if they are stored as they are in a slot."""
        shapes = self.arch.gate_up_shape, self.arch.down_shape
        return None if self.storage == "exact" else Packing(8 if self.storage == "int8" else 4, shapes)

    @property
    def stored_bytes(self) -> int:
        return self.arch.expert_bytes if self.packing is None else self.packing.stored_bytes

    @property
    def stride_bytes(self) -> int:
        return -(-self.stored_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def remedy(self) -> str:
        return f"delete it and run `coserve moe import --storage {self.storage}`"

    def facts(self) -> dict[str, str]:
        """Return what a file of this layout says: the stamp stands for the model's shapes, too."""
        return {"coserve_slots": _VERSION, "stamp": self.stamp, "storage": self.storage}

    def header(self, digests: Sequence[str]) -> bytes:
        """Return the header, whose length does not depend on the digests."""
        size = len(digests) * self.stride_bytes
        experts = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
        table = {"__metadata__": {**self.facts(), "sha256": " ".join(digests)}, "experts": experts}
        text = json.dumps(table, separators=(",", ":")).encode()
        text = text.ljust(-(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES - 8)
        return struct.pack("<Q", len(text)) + text


def write_slot_file(
    source: CheckpointStore, checkpoint: Checkpoint, storage: Storage, on_written: Callable[[ExpertKey], None]
) -> Path:
    """Write all experts to a file unless it is there and whole; `on_written` is called for each. Raises ModelError."""
    arch = source.arch
    layout = _SlotLayout(arch, storage, stamp_of(checkpoint.folder))
    path = slot_file(checkpoint.folder, storage)
    with suppress(ModelError):
        SlotFileStore(arch, checkpoint, storage).close()
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    slot, digests = torch.zeros(arch.expert_bytes, dtype=torch.uint8), list[str]()
    data_start = len(layout.header([_NO_DIGEST] * len(arch.expert_keys)))
    try:
        with part.open("wb") as file:
            for number, key in enumerate(arch.expert_keys):
                source.read(key, slot.numpy().data)
                stored = slot if layout.packing is None else layout.packing.pack(arch.weights(slot))
                data = stored.numpy().data
                file.seek(data_start + number * layout.stride_bytes)
                file.write(data)
                digests.append(hashlib.sha256(data).hexdigest())
                on_written(key)
            file.truncate(data_start + len(digests) * layout.stride_bytes)
            file.seek(0)
            file.write(layout.header(digests))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        message = f"cannot be written ({error.strerror or error}); make room on the disk and import again"
        raise ModelError(part, message) from error
    return part.replace(path)


class SlotFileStore(ExpertStore):
    """Experts read from a slot file, dequantised if they are packed. Raises ModelError."""

    def __init__(self, arch: MoeArch, checkpoint: Checkpoint, storage: Storage) -> None:
        super().__init__(arch, checkpoint)
        self.file = slot_file(checkpoint.folder, storage)
        self._layout = _SlotLayout(arch, storage, stamp_of(checkpoint.folder))
        self.stored_bytes = self._layout.stored_bytes
        self._data_start, self._digests = _read_header(self._layout, self.file)
        #: Keyed hashes by expert, of bytes that had their sha256.
        self._hashes: dict[int, bytes] = {}
        self._key = os.urandom(16)

    def read(self, key: ExpertKey, view: memoryview) -> None:
        number = key.layer * self.arch.experts + key.expert
        offset = self._data_start + number * self._layout.stride_bytes
        slot = torch.frombuffer(view, dtype=torch.uint8, count=self.expert_bytes)
        packing = self._layout.packing
        stored = slot if packing is None else torch.empty(self.stored_bytes, dtype=torch.uint8)
        data, keyed = stored.numpy().data, RegionHash(self._key)
        keyed.read(partial(self._files.read, self.file), offset)(data, 0)
        if (value := keyed.value()) != self._hashes.get(number):
            self._check(number, key, data)
            self._hashes[number] = value
        if packing is not None:
            packing.unpack(stored, self.arch.weights(slot))

    def _check(self, number: int, key: ExpertKey, stored: memoryview) -> None:
        digest, expected = hashlib.sha256(stored).hexdigest(), self._digests[number]
        if digest != expected:
            message = f"expert {key.expert} of layer {key.layer} is damaged: its sha256 is {digest[:12]}…, expected"
            raise ModelError(self.file, f"{message} {expected[:12]}…; {self._layout.remedy}")


def _read_header(layout: _SlotLayout, file: Path) -> tuple[int, list[str]]:
    """Return the offset of the first expert, and all digests. Raises ModelError if the file has another layout."""
    again = layout.remedy
    try:
        open_part(file).close()
        with safe_open(file, framework="pt") as opened:  # which compares the header with the file's size
            facts = dict(opened.metadata() or {})
    except FileNotFoundError:
        message = f"there is no such file; run `coserve moe import --storage {layout.storage}`"
        raise ModelError(file, f'{message}, or choose storage "checkpoint"') from None
    except (OSError, SafetensorError) as error:
        raise ModelError(file, f"is not a whole slot file ({error}); {again}") from error
    if facts.get("stamp") != layout.stamp:
        raise ModelError(file, f"was made from other weights than those of {file.parent.parent}; {again}")
    for name, expected in layout.facts().items():
        if facts.get(name) != expected:
            raise ModelError(file, f"{name} is {facts.get(name)!r}, and {expected!r} is expected; {again}")
    digests = facts["sha256"].split(" ")
    return len(layout.header(digests)), digests
