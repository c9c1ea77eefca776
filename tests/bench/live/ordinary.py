"""Ordinary loading: read the file, `torch.load`, construct the framework's model, `load_state_dict`, run.

Samba-CoE and most users do it so. The file comes through the same reader as ours, whole, and nothing of this process
is slower than it must be: one buffer per thread is kept, so that a load pays for no fresh memory. The naive side loads
so for every step of every image.
"""

import mmap
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import nn

from experts.errors import ExpertError
from experts.reading import FileReader
from experts.spec import Answer, ExpertId, ExpertSpec
from experts.vision.architectures import ARCHITECTURES
from experts.vision.infer import classify_answers, normalise, select_detections
from experts.vision.networks import build_original, select_head
from experts.vision.preprocess import Prepared, prepare
from tests.bench.live.expert_files import ordinary_file, read_experts, reader_of
from tests.bench.live.sides import SideInput, SideResult


class _Pages(mmap.mmap):
    """Page-aligned memory that torch.load takes for a file: reads past the page cache need the alignment."""

    def readinto(self, view: memoryview) -> int:
        begin = self.tell()
        count = min(len(view), len(self) - begin)
        view[:count] = memoryview(self)[begin : begin + count]
        self.seek(begin + count)
        return count


class OrdinaryFiles:
    """Makes models of the experts' state_dicts. Any thread."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self._of_thread = threading.local()

    def model(self, spec: ExpertSpec) -> nn.Module:
        """Return the framework's own model with the expert's weights, in evaluation mode."""
        state = torch.load(self._read(spec), map_location="cpu", weights_only=True)  # pyright: ignore[reportArgumentType]  # it reads like a file
        model = build_original(ARCHITECTURES[spec.architecture], len(spec.classes))
        model.load_state_dict(state)
        if spec.task == "detect":
            select_head(model, end_to_end=False)
        return model.eval()

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


def answer(model: nn.Module, spec: ExpertSpec, prepared: Sequence[Prepared]) -> list[Answer]:
    """Compute a batch with a framework's model: eager, as it was trained, contiguous."""
    with torch.inference_mode():
        pixels = torch.from_numpy(np.stack([image.pixels for image in prepared]))
        output = model(normalise(pixels, spec, torch.float32, channels_last=False))
        if spec.task == "classify":
            return classify_answers(output, spec)
        rows: torch.Tensor = output[0]
        centres, sizes = rows[:, :2], rows[:, 2:4]
        corners = torch.cat((centres - sizes / 2, centres + sizes / 2, rows[:, 4:]), 1)
        boxes = select_detections(corners, spec, end_to_end=False)
    return [
        Answer(spec.classes[int(image_boxes[0, 5])], float(image_boxes[0, 4]))
        if len(image_boxes)
        else Answer(None, None)
        for image_boxes in boxes
    ]


@dataclass(frozen=True, slots=True)
class OrdinaryLoad:
    """The counterpart of experts.vision.slot.LoadReport."""

    bytes: int
    load_ms: float
    tier: Literal["ram", "disk"] = "disk"


@dataclass(frozen=True, slots=True)
class OrdinaryModel:
    """A model in the place of a slot, for an executor."""

    spec: ExpertSpec
    module: nn.Module


@dataclass(slots=True)
class ModulePool:
    """A device's memory as most programs keep it: a dictionary of models. For a loader thread."""

    files: OrdinaryFiles
    _models: dict[ExpertId, OrdinaryModel] = field(default_factory=dict[ExpertId, OrdinaryModel])

    def load(self, spec: ExpertSpec, evict: tuple[ExpertId, ...] = (), source: object | None = None) -> OrdinaryLoad:
        assert source is None, "an ordinary model is always read from its file"
        begin_s = time.perf_counter()
        for expert in evict:
            self._models.pop(expert, None)
        self._models[spec.expert] = OrdinaryModel(spec, self.files.model(spec))
        return OrdinaryLoad(spec.weights_bytes, (time.perf_counter() - begin_s) * 1e3)

    def slot(self, expert: ExpertId) -> OrdinaryModel:
        if expert not in self._models:
            raise ExpertError(expert, "is not loaded")
        return self._models[expert]

    def unload(self, expert: ExpertId) -> None:
        del self._models[expert]

    def resize(self, budget_bytes: int) -> None:
        """Nothing to do: the scheduler keeps to the budget."""

    def resident(self) -> tuple[ExpertId, ...]:
        return tuple(self._models)


def run_naive(work: SideInput) -> SideResult:
    """Run a worker per executor; each takes the next image, loads the models for it, asks them, and drops them."""
    specs, files = read_experts(work.catalog), OrdinaryFiles(reader_of(work.disk))
    numbers = iter(range(len(work.trace.images)))
    lock = threading.Lock()
    waits_s, latencies_s, loaded_bytes = list[float](), list[float](), list[int]()
    began_s = time.monotonic()

    def serve(number: int) -> None:
        payload, starts_s = work.payload(number), list[float]()
        for expert in work.trace.images[number].experts:
            spec = specs[ExpertId(expert)]
            model = files.model(spec)
            loaded_bytes.append(spec.weights_bytes)
            starts_s.append(time.monotonic() - began_s)
            answer(model, spec, [prepare(payload, "image", None, spec)])
        waits_s.append(starts_s[0])
        latencies_s.append(time.monotonic() - began_s)

    def serve_all(_worker: int) -> None:
        torch.set_num_threads(work.threads_per_executor)
        while time.monotonic() - began_s < work.limit_s:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            serve(number)

    with ThreadPoolExecutor(work.executors) as workers:
        list(workers.map(serve_all, range(work.executors)))
    return SideResult(
        side=work.side,
        images=len(latencies_s),
        seconds=time.monotonic() - began_s,
        stopped=len(latencies_s) < len(work.trace.images),
        loads=len(loaded_bytes),
        loaded_bytes=sum(loaded_bytes),
        waits_s=tuple(waits_s),
        latencies_s=tuple(latencies_s),
    )
