"""Ways to load an expert and to ask it, all through the same reader, so that all have the same disk.

- `slots`: ours. One read into memory that is there already.
- `kept`: modules that are kept on the meta device, weights files of folded batch norms in channels-last order, read
  into memory that is reused, and `load_state_dict(assign=True)`: no copy, no construction. It computes what slots do.
- `ordinary`: read, `torch.load`, construct the framework's model, `load_state_dict`; as most programs do it.
- `openvino`, `onnxruntime`: the libraries' own compiled models (libraries.py).
"""

import copy
import json
import mmap
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import nn

from experts.errors import ExpertError
from experts.memory import HostMemory
from experts.reading import FileReader
from experts.spec import Answer, ExpertId, ExpertSpec, LoadReport
from experts.transfer import SlotMemory
from experts.vision.architectures import ARCHITECTURES
from experts.vision.infer import classify_answers, infer, normalise, select_detections
from experts.vision.layouts import TORCH_DTYPES
from experts.vision.networks import build_original, select_head
from experts.vision.preprocess import Prepared
from experts.vision.slot import LayoutShelf, Slot, SlotPool
from tests.bench.devices import bench_shelf
from tests.bench.live.expert_files import ordinary_file

Loading = Literal["slots", "kept", "ordinary", "openvino", "onnxruntime"]


class Loader(Protocol):
    """Loads experts and computes batches with them. Any thread; a model that is computing is not given up."""

    def load(self, spec: ExpertSpec, /) -> Any: ...

    def give_up(self, model: Any, /) -> None: ...

    def answer(self, model: Any, spec: ExpertSpec, prepared: Sequence[Prepared], /) -> Sequence[Answer]: ...


def loader_of(loading: Loading, reader: FileReader, memory_bytes: int, threads: int, device: str) -> Loader:
    """Return the loader of a device in one process; `threads` are of each executor.

    Raises ValueError for the ways that know only the CPU: those of libraries and of the framework's own models.
    """
    if loading == "slots":
        return SlotLoader(reader, memory_bytes, device)
    if loading == "kept":
        return KeptModules(reader, device)
    if device != "cpu":
        raise ValueError(f"{loading} computes on the CPU only here, not on {device}")
    if loading in ("openvino", "onnxruntime"):
        from tests.bench.live.libraries import LIBRARIES

        return LIBRARIES[loading].loader(reader, threads)
    return OrdinaryModels(reader)


class FileBuffers:
    """Reads whole files into page-aligned memory that is used again, so that reads pay for no fresh pages."""

    def __init__(self, reader: FileReader, pin: bool = False) -> None:
        self._reader, self._pin = reader, pin
        self._free: defaultdict[int, list[HostMemory]] = defaultdict(list)
        self._lock = threading.Lock()

    def read(self, file: Path) -> HostMemory:
        descriptor = self._reader.open(file)
        try:
            size = os.fstat(descriptor).st_size
            with self._lock:
                free = self._free[size]
                memory = free.pop() if free else None
            memory = memory or HostMemory(size, pin=self._pin)
            self._reader.read(descriptor, memory.view, 0)
        finally:
            os.close(descriptor)
        return memory

    def give_back(self, memory: HostMemory) -> None:
        with self._lock:
            self._free[memory.array.nbytes].append(memory)


class SlotLoader:
    """Our slots, behind the interface of the others."""

    def __init__(self, reader: FileReader, memory_bytes: int, device: str) -> None:
        self._shelf = bench_shelf(packs=True)
        self._pool = SlotPool(device, memory_bytes, self._shelf, reader)

    def load(self, spec: ExpertSpec) -> Slot:
        accept_file(self._shelf, spec, self._pool.device)
        self._pool.load(spec)
        return self._pool.slot(spec.expert)

    def give_up(self, model: Slot) -> None:
        self._pool.unload(model.spec.expert)

    def answer(self, model: Slot, _spec: ExpertSpec, prepared: Sequence[Prepared]) -> Sequence[Answer]:
        return infer(model, prepared)


def accept_file(shelf: LayoutShelf, spec: ExpertSpec, device: str) -> None:
    """Load an expert once, so that the layout is built and its file's hash known as in a line that has run a while."""
    if not any(spec.sha256 in known_as for known_as in shelf.hashes):
        SlotPool(device, spec.weights_bytes, shelf).load(spec)


class KeptModules:
    """Modules of each layout that are used again, with the tensors of the expert's safetensors file in them.

    On a GPU the file's bytes are copied in one piece from pinned memory into memory there that is used again, too.
    """

    def __init__(self, reader: FileReader, device: str) -> None:
        self._shelf = LayoutShelf()
        self._transfer = bench_shelf().transfers(device)  # pyright: ignore[reportOptionalCall]
        self._place = self._transfer.device
        self._buffers = FileBuffers(reader, pin=self._place.type == "cuda")
        self._kept: defaultdict[str, list[Slot]] = defaultdict(list)

    def load(self, spec: ExpertSpec) -> Slot:
        layout, memory = self._shelf.get(spec), self._buffers.read(spec.file)
        kept = self._kept[spec.layout]
        model = kept.pop() if kept else None
        module = model.module if model else copy.deepcopy(layout.shell)
        place = SlotMemory(memory.tensor, memory)
        if self._place.type != "cpu":
            buffer = model.buffer if model else torch.empty(memory.array.nbytes, dtype=torch.uint8, device=self._place)
            buffer.copy_(memory.tensor, non_blocking=True)
            torch.cuda.current_stream(self._place).synchronize()
            self._buffers.give_back(memory)
            place = SlotMemory(buffer)
        module.load_state_dict(tensors_of(memory, place.buffer), assign=True)
        return Slot(spec, layout, place, module.eval().to(self._place), self._transfer)

    def give_up(self, model: Slot) -> None:
        self._kept[model.spec.layout].append(model)
        if model.place.memory is not None:
            self._buffers.give_back(model.place.memory)

    def answer(self, model: Slot, _spec: ExpertSpec, prepared: Sequence[Prepared]) -> Sequence[Answer]:
        return infer(model, prepared)


def tensors_of(memory: HostMemory, buffer: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a safetensors file in memory, without a copy (github.com/huggingface/safetensors).

    `buffer` has the same bytes, on the device of the tensors.
    """
    begin = 8 + int.from_bytes(memory.view[:8], "little")
    header = json.loads(bytes(memory.view[8:begin]))
    dtypes = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    tensors: dict[str, torch.Tensor] = {}
    for name, item in header.items():
        if item.get("dtype") in dtypes:  # others are no weights: metadata, and bytes between tensors
            first, end = item["data_offsets"]
            stored = buffer[begin + first : begin + end].view(TORCH_DTYPES[dtypes[item["dtype"]]])
            tensor = stored.view(item["shape"])
            tensors[name] = tensor.permute(0, 3, 1, 2) if tensor.dim() == 4 else tensor
    return tensors


class _Pages(mmap.mmap):
    """Page-aligned memory that torch.load takes for a file: reads past the page cache need the alignment."""

    def readinto(self, view: memoryview) -> int:
        begin = self.tell()
        count = min(len(view), len(self) - begin)
        view[:count] = memoryview(self)[begin : begin + count]
        self.seek(begin + count)
        return count


class OrdinaryModels:
    """The framework's own models, made of the experts' state_dicts. One buffer per thread is kept."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self._of_thread = threading.local()

    def load(self, spec: ExpertSpec) -> nn.Module:
        """Return the framework's own model with the expert's weights, in evaluation mode."""
        state = torch.load(self._read(spec), map_location="cpu", weights_only=True)  # pyright: ignore[reportArgumentType]  # it reads like a file
        model = build_original(ARCHITECTURES[spec.architecture], len(spec.classes))
        model.load_state_dict(state)
        if spec.task == "detect":
            select_head(model, end_to_end=False)
        return model.eval()

    def give_up(self, model: nn.Module) -> None:
        """Nothing to do: the caller forgets the model."""

    def answer(self, model: nn.Module, spec: ExpertSpec, prepared: Sequence[Prepared]) -> list[Answer]:
        """Compute a batch eagerly, as the model was trained, contiguous."""
        with torch.inference_mode():
            output = model(images_of(prepared, spec))
            return answers_of(output if spec.task == "classify" else output[0], spec)

    def _read(self, spec: ExpertSpec) -> _Pages:
        descriptor = self._reader.open(ordinary_file(spec))
        try:
            size = os.fstat(descriptor).st_size
            pages: _Pages | None = getattr(self._of_thread, "pages", None)
            if pages is None or len(pages) != size:
                pages = self._of_thread.pages = _Pages(-1, size)
            with memoryview(pages) as view:
                self._reader.read(descriptor, view, 0)
        finally:
            os.close(descriptor)
        pages.seek(0)
        return pages


def images_of(prepared: Sequence[Prepared], spec: ExpertSpec) -> torch.Tensor:
    """(B, 3, S, S) float32, contiguous."""
    pixels = torch.from_numpy(np.stack([image.pixels for image in prepared]))
    return normalise(pixels, spec, torch.float32).contiguous()


def answers_of(output: torch.Tensor, spec: ExpertSpec) -> list[Answer]:
    """Return the answers of a framework's output: logits, or (B, 4 + classes, anchors) with centres and sizes."""
    if spec.task == "classify":
        return classify_answers(output, spec)
    centres, sizes = output[:, :2], output[:, 2:4]
    corners = torch.cat((centres - sizes / 2, centres + sizes / 2, output[:, 4:]), 1)
    return [
        Answer(spec.classes[int(boxes[0, 5])], float(boxes[0, 4])) if len(boxes) else Answer(None, None)
        for boxes in select_detections(corners, spec, end_to_end=False)
    ]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in the place of a slot, for an executor."""

    spec: ExpertSpec
    model: Any


@dataclass(slots=True)
class ModelPool:
    """A device's memory as most programs keep it, a dictionary of models, in the place of a pool of slots."""

    loader: Loader
    budget_bytes: int
    _models: dict[ExpertId, LoadedModel] = field(default_factory=dict[ExpertId, LoadedModel])

    def load(self, spec: ExpertSpec, *, source: object | None = None) -> LoadReport:
        assert source is None, "such a model is always read from its file"
        begin_s = time.perf_counter()
        self._models[spec.expert] = LoadedModel(spec, self.loader.load(spec))
        return LoadReport(spec.weights_bytes, (time.perf_counter() - begin_s) * 1e3)

    def slot(self, expert: ExpertId) -> LoadedModel:
        if expert not in self._models:
            raise ExpertError(expert, "is not loaded")
        return self._models[expert]

    def unload(self, expert: ExpertId) -> None:
        self.loader.give_up(self._models.pop(expert).model)

    def resize(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes  # the scheduler keeps to it

    def resident(self) -> tuple[ExpertId, ...]:
        return tuple(self._models)

    def forward(self, slot: Any, prepared: Sequence[Prepared]) -> Sequence[Answer]:
        return self.loader.answer(slot.model, slot.spec, prepared)


Forward = Callable[[Any, Sequence[Prepared]], Sequence[Answer]]
