"""Models the ordinary way: read the file, `torch.load`, construct the framework's model, `load_state_dict`, run.

What Samba-CoE and most users do. The file comes through the same reader as ours, whole, and nothing of this process is
slower than it must be: one buffer per thread is kept, so that a load pays for no fresh memory.
"""

import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import nn

from experts.errors import ExpertError
from experts.reading import Reader
from experts.spec import Answer, ExpertId, ExpertSpec
from experts.vision.architectures import ARCHITECTURES
from experts.vision.detections import select_detections
from experts.vision.infer import classify_answers, normalise
from experts.vision.networks import build_original, select_head
from experts.vision.preprocess import Prepared
from tests.bench.stock import ordinary_file

_PAGE_BYTES = mmap.PAGESIZE


class _Pages(mmap.mmap):
    """Page-aligned memory that torch.load takes for a file: reads past the page cache need the alignment."""

    def readinto(self, view: memoryview) -> int:
        begin = self.tell()
        count = min(len(view), len(self) - begin)
        view[:count] = memoryview(self)[begin : begin + count]
        self.seek(begin + count)
        return count


class OrdinaryFiles:
    """Makes models of the stock's state_dicts. Any thread."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._own = threading.local()

    def model(self, spec: ExpertSpec) -> nn.Module:
        """The framework's own model with the expert's weights, in evaluation mode."""
        state = torch.load(self._read(spec), map_location="cpu", weights_only=True)  # pyright: ignore[reportArgumentType]  # it reads like a file
        model = build_original(ARCHITECTURES[spec.architecture], len(spec.classes))
        model.load_state_dict(state)
        if spec.task == "detect":
            select_head(model, end_to_end=False)
        return model.eval()

    def _read(self, spec: ExpertSpec) -> _Pages:
        path = ordinary_file(spec)
        descriptor = self._reader.open(path)
        try:
            size = os.fstat(descriptor).st_size
            pages: _Pages | None = getattr(self._own, "pages", None)
            if pages is None or len(pages) != size:
                pages = self._own.pages = _Pages(-1, size)
            with memoryview(pages) as view:
                self._reader.read(descriptor, view, 0)
        finally:
            os.close(descriptor)
        pages.seek(0)
        return pages


def answer(model: nn.Module, spec: ExpertSpec, prepared: Sequence[Prepared]) -> list[Answer]:
    """A batch through a framework's model: eager, as it was trained, contiguous."""
    with torch.inference_mode():
        pixels = torch.from_numpy(np.stack([image.pixels for image in prepared]))
        output = model(normalise(pixels, spec, torch.float32, channels_last=False))
        if spec.task == "classify":
            return classify_answers(output, spec)
        found: torch.Tensor = output[0]
        centres, sizes = found[:, :2], found[:, 2:4]
        corners = torch.cat((centres - sizes / 2, centres + sizes / 2, found[:, 4:]), 1)
        boxes = select_detections(corners, spec, end_to_end=False)
    return [
        Answer(spec.classes[int(rows[0, 5])], float(rows[0, 4])) if len(rows) else Answer(None, None) for rows in boxes
    ]


@dataclass(frozen=True, slots=True)
class Loaded:
    """As experts.slot.LoadReport."""

    bytes: int
    load_ms: float
    tier: Literal["ram", "disk"] = "disk"


@dataclass(frozen=True, slots=True)
class OrdinaryModel:
    """What an executor finds in the place of a slot."""

    spec: ExpertSpec
    module: nn.Module


@dataclass(slots=True)
class ModulePool:
    """A device's memory as most programs keep it: a dictionary of models. For a loader thread."""

    files: OrdinaryFiles
    budget_bytes: int
    _models: dict[ExpertId, OrdinaryModel] = field(default_factory=dict[ExpertId, OrdinaryModel])

    def load(self, spec: ExpertSpec, evict: tuple[ExpertId, ...] = (), source: object | None = None) -> Loaded:
        if source is not None:
            raise ExpertError(spec.expert, "an ordinary model is always read from its file")
        begin_s = time.perf_counter()
        for expert in evict:
            self._models.pop(expert, None)
        self._models[spec.expert] = OrdinaryModel(spec, self.files.model(spec))
        return Loaded(spec.weights_bytes, (time.perf_counter() - begin_s) * 1e3)

    def slot(self, expert: ExpertId) -> OrdinaryModel:
        if expert not in self._models:
            raise ExpertError(expert, "is not loaded")
        return self._models[expert]

    def unload(self, expert: ExpertId) -> None:
        del self._models[expert]

    def resize(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes

    def resident(self) -> tuple[ExpertId, ...]:
        return tuple(self._models)
