"""What moving one expert costs: slots beside the raw rate of the same channel and beside the ordinary ways.

All in one process and in turn, in rounds that go forth and back, so that whatever else the machine does falls on every
way alike. Within a round the raw way and the slot's alternate several times. Shares and ratios are taken within a
round; their medians over the rounds are what is reported.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn

from experts.catalog import CatalogFile, resolve, write_catalog
from experts.memory import HostMemory
from experts.reading import CachedReader, DirectReader, Reader, drop_cached
from experts.slot import LayoutShelf, SlotPool
from experts.spec import ExpertSpec
from experts.vision.architectures import ARCHITECTURES
from experts.vision.layouts import TORCH_DTYPES
from experts.vision.networks import build_original
from tools.training.expert_file import Form
from tools.training.importer import import_classifier
from tools.training.proof import pattern_images

_LABELS = ("ok", "bridge", "missing", "shifted")
#: Weights do not depend on it, and the proof at import is quick.
_INPUT_SIZE = 64
#: How often a raw way and a slot's alternate in a round: they are short beside what disturbs them.
_ALTERNATIONS = 5


@dataclass(frozen=True, slots=True)
class Expert:
    """One network's files: `spec.file` for slots, the state_dict as torch and as safetensors write it."""

    spec: ExpertSpec
    dtype: torch.dtype
    checkpoint: Path
    plain: Path


@dataclass(frozen=True, slots=True)
class Way:
    """One way to an expert's weights. `run` moves them once and gives seconds.

    `raw` names the way that moves the same bytes over the same channel and does nothing else, `slot` the slot's way
    from the same tier, where this is an ordinary one.
    """

    name: str
    tier: str
    run: Callable[[], float]
    size_bytes: int
    raw: str | None = None
    slot: str | None = None


@dataclass(frozen=True, slots=True)
class Figures:
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


def make_expert(folder: Path, architecture: str, dtype: str) -> Expert:
    """A network with random values, written to the disk in all three forms."""
    torch.manual_seed(0)
    original = build_original(ARCHITECTURES[architecture], len(_LABELS))
    form = Form(dtype=dtype, tolerance=1.0, origin="coserve bench load: random values")
    name = f"{architecture}-{dtype}"
    images = pattern_images(1)
    report = import_classifier(
        original.state_dict(), architecture, _LABELS, _INPUT_SIZE, folder, expert=name, images=images, form=form
    )
    catalog = folder / f"{name}.yaml"
    write_catalog(catalog, {name: report.entry})
    model = CatalogFile.model_validate(yaml.safe_load(catalog.read_text(encoding="utf-8")))
    found, _ = resolve(model, folder)
    (spec,) = found.values()
    state = {key: value.to(TORCH_DTYPES[dtype]) for key, value in original.state_dict().items()}
    expert = Expert(spec, TORCH_DTYPES[dtype], folder / f"{name}.pt", folder / f"{name}-plain.safetensors")
    torch.save(state, expert.checkpoint)
    save_file(state, expert.plain)
    for file in (spec.file, expert.checkpoint, expert.plain):
        drop_cached(file)
    return expert


def figures_of(way: Way, taken_s: Mapping[str, list[float]], architecture: str, dtype: str) -> Figures:
    """`taken_s` are the seconds of every way, round by round."""
    own = taken_s[way.name]
    seconds = median(own)
    raw = [r / s for r, s in zip(taken_s[way.raw], own, strict=True)] if way.raw else None
    slot = [s / other for s, other in zip(own, taken_s[way.slot], strict=True)] if way.slot else None
    return Figures(
        architecture=architecture,
        dtype=dtype,
        way=way.name,
        tier=way.tier,
        bytes=way.size_bytes,
        ms=round(seconds * 1e3, 2),
        gb_per_s=round(way.size_bytes / seconds / 1e9, 2),
        share_of_raw=round(median(raw), 3) if raw else None,
        slot_is_faster=round(median(slot), 1) if slot else None,
    )


class LoadBench:
    """The ways to one expert, on the CPU and on the GPU named, if any. Not thread-safe."""

    def __init__(self, expert: Expert, gpu: str | None = None) -> None:
        self.direct = DirectReader()
        self._expert = expert
        self._shelf = LayoutShelf()
        self._scratch = HostMemory(expert.spec.weights_bytes)
        self._ram = self._pool("ram", CachedReader())
        self._ram.load(expert.spec)
        # Ways of one group alternate.
        self._groups = [*self._from_disk(), *self._from_page_cache(), self._from_ram()]
        if gpu is not None:
            self._groups += self._to_gpu(gpu)

    def measure(self, rounds: int, advance: Callable[[], None] = lambda: None) -> list[Figures]:
        """One round more is run first and not counted: it checks digests, builds the slot and imports what is lazy."""
        ways = [way for group in self._groups for way in group]
        taken_s: dict[str, list[float]] = {way.name: [] for way in ways}
        for number in range(rounds + 1):
            for group in self._groups if number % 2 else reversed(self._groups):
                for way, seconds in zip(group, _alternate(group), strict=True):
                    if number:
                        taken_s[way.name].append(seconds)
            advance()
        architecture, dtype = self._expert.spec.architecture, str(self._expert.dtype).removeprefix("torch.")
        return [figures_of(way, taken_s, architecture, dtype) for way in ways]

    def _from_disk(self) -> list[list[Way]]:
        size_bytes = self._expert.spec.weights_bytes
        slot = self._load(self._pool("cpu", self.direct))
        pair = [
            Way("raw read, cold", "disk", lambda: self._read(self.direct), size_bytes),
            Way("slot, cold", "disk", slot, size_bytes, raw="raw read, cold"),
        ]
        return [pair, *self._ordinary("cold", "disk", drop_cached)]

    def _from_page_cache(self) -> list[list[Way]]:
        size_bytes, reader = self._expert.spec.weights_bytes, CachedReader()
        slot = self._load(self._pool("cpu", reader))
        pair = [
            Way("raw read, warm", "page cache", lambda: self._read(reader), size_bytes),
            Way("slot, warm", "page cache", slot, size_bytes, raw="raw read, warm"),
        ]
        return [pair, *self._ordinary("warm", "page cache", _read_through)]

    def _from_ram(self) -> list[Way]:
        size_bytes = self._expert.spec.weights_bytes
        source = HostMemory(size_bytes)
        source.array[:] = 1

        def copy() -> float:
            begin_s = time.perf_counter()
            np.copyto(self._scratch.array, source.array)
            return time.perf_counter() - begin_s

        slot = self._load(self._pool("cpu", CachedReader()), self._ram)
        return [
            Way("raw memory copy", "ram", copy, size_bytes),
            Way("slot, from RAM tier", "ram", slot, size_bytes, raw="raw memory copy"),
        ]

    def _to_gpu(self, gpu: str) -> list[list[Way]]:
        size_bytes = self._expert.spec.weights_bytes
        pinned = HostMemory(size_bytes, pin=True)
        target = torch.empty(size_bytes, dtype=torch.uint8, device=gpu)

        def copy() -> float:
            torch.cuda.synchronize(target.device)
            begin_s = time.perf_counter()
            target.copy_(pinned.tensor, non_blocking=True)
            torch.cuda.synchronize(target.device)
            return time.perf_counter() - begin_s

        from_ram = self._load(self._pool(gpu, CachedReader()), self._ram)
        cold = self._load(self._pool(gpu, self.direct))
        warm = self._load(self._pool(gpu, CachedReader()))
        pair = [
            Way("raw pinned copy to GPU", "ram", copy, size_bytes),
            Way("slot on GPU, from RAM tier", "ram", from_ram, size_bytes, raw="raw pinned copy to GPU"),
        ]
        return [
            pair,
            [Way("slot on GPU, cold", "disk", cold, size_bytes, raw="raw read, cold")],
            [Way("slot on GPU, warm", "page cache", warm, size_bytes, raw="raw read, warm")],
        ]

    def _ordinary(self, state: str, tier: str, prepare: Callable[[Path], None]) -> list[list[Way]]:
        expert, slot = self._expert, f"slot, {state}"
        kept = self._construct()

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
            "safetensors + construct": (
                expert.plain,
                lambda: _with_state(self._construct(), load_file(expert.plain)),
            ),
            "safetensors, module kept": (expert.plain, lambda: _with_state(kept, load_file(expert.plain))),
        }
        return [
            [Way(f"{name}, {state}", tier, timed(file, load), file.stat().st_size, slot=slot)]
            for name, (file, load) in ways.items()
        ]

    def _construct(self) -> nn.Module:
        model = build_original(ARCHITECTURES[self._expert.spec.architecture], len(_LABELS))
        return model.to(self._expert.dtype)

    def _read(self, reader: Reader) -> float:
        """The same bytes of the same file, by the same reader, into memory of the same kind."""
        spec = self._expert.spec
        begin_s = time.perf_counter()
        descriptor = reader.open(spec.file)
        try:
            reader.read(descriptor, self._scratch.view, os.fstat(descriptor).st_size - spec.weights_bytes)
        finally:
            os.close(descriptor)
        return time.perf_counter() - begin_s

    def _pool(self, device: str, reader: Reader) -> SlotPool:
        return SlotPool(device, self._expert.spec.weights_bytes, self._shelf, reader)

    def _load(self, pool: SlotPool, source: SlotPool | None = None) -> Callable[[], float]:
        spec = self._expert.spec

        def run() -> float:
            begin_s = time.perf_counter()
            pool.load(spec, pool.resident(), source)
            seconds = time.perf_counter() - begin_s
            pool.unload(spec.expert)
            return seconds

        return run


def _alternate(group: Sequence[Way]) -> list[float]:
    """Median seconds of each way of a group, which take turns; a way that is alone runs once."""
    taken_s: list[list[float]] = [[] for _ in group]
    for turn in range(_ALTERNATIONS if len(group) > 1 else 1):
        order = range(len(group))
        for index in order if turn % 2 else reversed(order):
            taken_s[index].append(group[index].run())
    return [median(seconds) for seconds in taken_s]


def _with_state(model: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    model.load_state_dict(state)
    return model


def _read_through(file: Path) -> None:
    """Have the whole file in the page cache."""
    with file.open("rb", buffering=0) as source:
        page = bytearray(1 << 20)
        while source.readinto(page):
            pass
