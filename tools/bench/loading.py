"""Times of moving one expert: slots beside the raw rate of the same channel and beside the ordinary ways.

All in one process and in turn, in rounds that go forth and back, so that other work of the machine falls on every
way alike. Within a round the raw way and the slot's alternate several times. Shares and ratios are taken within a
round; their medians over the rounds are reported.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from experts.memory import HostMemory
from experts.reading import CachedReader, DirectReader, FileReader, drop_cached
from experts.spec import ExpertSpec
from experts.vision.architectures import ARCHITECTURES
from experts.vision.layouts import TORCH_DTYPES
from experts.vision.networks import build_original
from experts.vision.slot import LayoutShelf, SlotPool
from tools.training.expert_file import STORES, Form
from tools.training.importer import import_model
from tools.training.proof import pattern_images

_LABELS = ("ok", "bridge", "missing", "shifted")
#: Weights do not depend on it, and the proof at import is quick.
_INPUT_SIZE = 64
#: How often a raw way and a slot's alternate in a round: they are short beside the machine's disturbances.
_ALTERNATIONS = 5


@dataclass(frozen=True, slots=True)
class ExpertFiles:
    """One network's files: `spec.file` for slots, the state_dict as torch and as safetensors write it.

    `thin` are slots' files of the stored forms that are thinner than the dtype.
    """

    spec: ExpertSpec
    thin: tuple[ExpertSpec, ...]
    dtype: torch.dtype
    checkpoint: Path
    plain: Path


@dataclass(frozen=True, slots=True)
class LoadWay:
    """One way to an expert's weights. `run` moves them once and gives seconds.

    `raw` names the way that moves the same bytes over the same channel and does nothing else, `slot` the slot's way
    from the same tier, where this is an ordinary one or reads a thin file.
    """

    name: str
    tier: str
    run: Callable[[], float]
    size_bytes: int
    raw: str | None = None
    slot: str | None = None


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Medians. `share_of_raw`: of the raw rate. `slot_is_faster`: how many times the slot's way is faster."""

    architecture: str
    dtype: str
    way: str
    tier: str
    bytes: int
    ms: float
    gb_per_s: float
    share_of_raw: float | None
    slot_is_faster: float | None


def make_expert(folder: Path, architecture: str, dtype: str) -> ExpertFiles:
    """Write a network with random values to the disk in all three forms."""
    torch.manual_seed(0)
    original = build_original(ARCHITECTURES[architecture], len(_LABELS))
    form = Form(dtype=dtype, tolerance=math.inf, origin="coserve bench load: random values")
    name, images = f"{architecture}-{dtype}", pattern_images(1)
    plain, *thin = (
        import_model(
            original,
            architecture,
            _LABELS,
            _INPUT_SIZE,
            folder,
            expert=f"{name}-{store}",
            images=images,
            form=replace(form, store=store),
        ).spec
        for store in reversed(STORES)
    )
    specs = (plain, *(spec for spec in thin if spec.stored_as))
    state = {key: value.to(TORCH_DTYPES[dtype]) for key, value in original.state_dict().items()}
    files = ExpertFiles(
        plain, specs[1:], TORCH_DTYPES[dtype], folder / f"{name}.pt", folder / f"{name}-plain.safetensors"
    )
    torch.save(state, files.checkpoint)
    save_file(state, files.plain)
    for file in (*(spec.file for spec in specs), files.checkpoint, files.plain):
        drop_cached(file)
    return files


def figures_of(way: LoadWay, seconds: Mapping[str, list[float]], architecture: str, dtype: str) -> LoadFigures:
    """Return the medians of one way; `seconds` are those of every way, round by round."""
    own = seconds[way.name]
    raw = [raw_s / own_s for raw_s, own_s in zip(seconds[way.raw], own, strict=True)] if way.raw else None
    slot = [own_s / slot_s for own_s, slot_s in zip(own, seconds[way.slot], strict=True)] if way.slot else None
    return LoadFigures(
        architecture=architecture,
        dtype=dtype,
        way=way.name,
        tier=way.tier,
        bytes=way.size_bytes,
        ms=round(median(own) * 1e3, 2),
        gb_per_s=round(way.size_bytes / median(own) / 1e9, 2),
        share_of_raw=round(median(raw), 3) if raw else None,
        slot_is_faster=round(median(slot), 2) if slot else None,
    )


def read_seconds(reader: FileReader, file: Path, view: memoryview, offset: int = 0) -> float:
    """Return the seconds of opening a file and reading it into `view`."""
    begin_s = time.perf_counter()
    descriptor = reader.open(file)
    try:
        reader.read(descriptor, view, offset)
    finally:
        os.close(descriptor)
    return time.perf_counter() - begin_s


class LoadBench:
    """The ways to one expert, on the CPU and on the GPU named, if any. Not thread-safe."""

    def __init__(self, expert: ExpertFiles, gpu: str | None = None) -> None:
        self.direct = DirectReader()
        self._expert = expert
        self._size_bytes = expert.spec.weights_bytes
        self._shelf = LayoutShelf()
        self._scratch = HostMemory(self._size_bytes)
        self._ram = self._pool("ram", CachedReader())
        self._ram.load(expert.spec)
        cached = CachedReader()
        from_ram = self._load("cpu", cached, self._ram)
        # Ways of one group alternate.
        self._groups = [
            self._pair("disk", "slot, cold", self._load("cpu", self.direct), "raw read, cold", self._read(self.direct)),
            *(self._thin(spec, "cold", "disk", self.direct) for spec in expert.thin),
            *self._ordinary("cold", "disk", drop_cached),
            self._pair("page cache", "slot, warm", self._load("cpu", cached), "raw read, warm", self._read(cached)),
            *(self._thin(spec, "warm", "page cache", cached) for spec in expert.thin),
            *self._ordinary("warm", "page cache", Path.read_bytes),
            self._pair("ram", "slot, from RAM tier", from_ram, "raw memory copy", self._copy()),
        ]
        if gpu is not None:
            self._groups += self._to_gpu(gpu)

    def measure(self, rounds: int, advance: Callable[[], None] = lambda: None) -> list[LoadFigures]:
        """Measure so many rounds; one more runs first: it checks digests, builds the slot, imports lazy modules."""
        ways = [way for group in self._groups for way in group]
        seconds: dict[str, list[float]] = {way.name: [] for way in ways}
        for number in range(rounds + 1):
            for group in self._groups if number % 2 else reversed(self._groups):
                for way, median_s in zip(group, _alternate(group), strict=True):
                    if number:
                        seconds[way.name].append(median_s)
            advance()
        architecture, dtype = self._expert.spec.architecture, str(self._expert.dtype).removeprefix("torch.")
        return [figures_of(way, seconds, architecture, dtype) for way in ways]

    def _pair(
        self, tier: str, name: str, run: Callable[[], float], raw: str, run_raw: Callable[[], float]
    ) -> list[LoadWay]:
        return [
            LoadWay(raw, tier, run_raw, self._size_bytes),
            LoadWay(name, tier, run, self._size_bytes, raw=raw),
        ]

    def _thin(self, spec: ExpertSpec, state: str, tier: str, reader: FileReader) -> list[LoadWay]:
        """Return the slot's way from a thin file, which it expands, and the reading of that file alone."""
        name, raw = (f"{way}, {state}, {spec.stored_as}" for way in ("slot", "raw read"))
        load, read = self._load("cpu", reader, spec=spec), self._read(reader, spec)
        return [
            LoadWay(raw, tier, read, spec.read_bytes),
            LoadWay(name, tier, load, spec.read_bytes, raw=raw, slot=f"slot, {state}"),
        ]

    def _to_gpu(self, gpu: str) -> list[list[LoadWay]]:
        size_bytes, cached = self._size_bytes, CachedReader()
        pinned = HostMemory(size_bytes, pin=True)
        target = torch.empty(size_bytes, dtype=torch.uint8, device=gpu)

        def copy() -> float:
            torch.cuda.synchronize(target.device)
            begin_s = time.perf_counter()
            target.copy_(pinned.tensor, non_blocking=True)
            torch.cuda.synchronize(target.device)
            return time.perf_counter() - begin_s

        from_ram = self._load(gpu, cached, self._ram)
        return [
            self._pair("ram", "slot on GPU, from RAM tier", from_ram, "raw pinned copy to GPU", copy),
            [LoadWay("slot on GPU, cold", "disk", self._load(gpu, self.direct), size_bytes, raw="raw read, cold")],
            [LoadWay("slot on GPU, warm", "page cache", self._load(gpu, cached), size_bytes, raw="raw read, warm")],
            *(
                [
                    LoadWay(
                        f"slot on GPU, cold, {spec.stored_as}",
                        "disk",
                        self._load(gpu, self.direct, spec=spec),
                        spec.read_bytes,
                        raw=f"raw read, cold, {spec.stored_as}",
                        slot="slot on GPU, cold",
                    )
                ]
                for spec in self._expert.thin
            ),
        ]

    def _ordinary(self, state: str, tier: str, prepare: Callable[[Path], object]) -> list[list[LoadWay]]:
        """Return the ways of ordinary programs; `prepare` brings a file into its tier, or out of the page cache."""
        expert, module = self._expert, self._construct()

        def timed(file: Path, load: Callable[[], nn.Module]) -> Callable[[], float]:
            def run() -> float:
                prepare(file)
                begin_s = time.perf_counter()
                model = load()
                ended_s = time.perf_counter()
                del model
                return ended_s - begin_s

            return run

        def torch_load() -> nn.Module:
            return _with_state(self._construct(), torch.load(expert.checkpoint, map_location="cpu", weights_only=True))

        ways = {
            "torch.load + construct": (expert.checkpoint, torch_load),
            "safetensors + construct": (expert.plain, lambda: _with_state(self._construct(), load_file(expert.plain))),
            "safetensors, module kept": (expert.plain, lambda: _with_state(module, load_file(expert.plain))),
        }
        return [
            [LoadWay(f"{name}, {state}", tier, timed(file, load), file.stat().st_size, slot=f"slot, {state}")]
            for name, (file, load) in ways.items()
        ]

    def _construct(self) -> nn.Module:
        model = build_original(ARCHITECTURES[self._expert.spec.architecture], len(_LABELS))
        return model.to(self._expert.dtype)

    def _copy(self) -> Callable[[], float]:
        source = HostMemory(self._size_bytes)
        source.array[:] = 1

        def run() -> float:
            begin_s = time.perf_counter()
            np.copyto(self._scratch.array, source.array)
            return time.perf_counter() - begin_s

        return run

    def _read(self, reader: FileReader, spec: ExpertSpec | None = None) -> Callable[[], float]:
        """Return the reading of the same bytes of the same file, by the same reader, into memory of the same kind."""
        spec = spec or self._expert.spec
        file, view = spec.file, self._scratch.view[: spec.read_bytes]
        return lambda: read_seconds(reader, file, view, file.stat().st_size - spec.read_bytes)

    def _pool(self, device: str, reader: FileReader) -> SlotPool:
        return SlotPool(device, self._size_bytes, self._shelf, reader)

    def _load(
        self, device: str, reader: FileReader, source: SlotPool | None = None, spec: ExpertSpec | None = None
    ) -> Callable[[], float]:
        spec, pool = spec or self._expert.spec, self._pool(device, reader)

        def run() -> float:
            begin_s = time.perf_counter()
            pool.load(spec, pool.resident(), source)
            seconds = time.perf_counter() - begin_s
            pool.unload(spec.expert)
            return seconds

        return run


def _alternate(group: Sequence[LoadWay]) -> list[float]:
    """Return median seconds of each way of a group, which take turns; a way that is alone runs once."""
    seconds: list[list[float]] = [[] for _ in group]
    for turn in range(_ALTERNATIONS if len(group) > 1 else 1):
        order = range(len(group))
        for index in order if turn % 2 else reversed(order):
            seconds[index].append(group[index].run())
    return [median(each) for each in seconds]


def _with_state(model: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    model.load_state_dict(state)
    return model
