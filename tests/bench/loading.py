"""Times of moving one expert: slots beside the raw rate of the same channel and beside the ordinary ways.

All in one process and in turn (rounds.py), so that other work of the machine falls on every way alike. Within a
round the raw way and the slot's alternate several times. Shares and ratios are taken within a round; their medians
over the rounds are reported.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from experts.memory import HostMemory
from experts.reading import CachedReader, FileReader, drop_cached
from experts.spec import ExpertSpec
from experts.vision.architectures import ARCHITECTURES
from experts.vision.layouts import TORCH_DTYPES
from experts.vision.networks import build_original
from experts.vision.slot import LayoutShelf, SlotPool
from tests.bench.rounds import ratios, run_in_turn
from tests.experts.direct import DroppedReader
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
    device: str
    way: str
    tier: str
    bytes: int
    ms: float
    gb_per_s: float
    share_of_raw: float | None
    slot_is_faster: float | None


def make_expert(folder: Path, architecture: str, dtype: str) -> ExpertFiles:
    """Write a network with random values to the disk in all forms."""
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


def figures_of(
    way: LoadWay, seconds: Mapping[str, list[float]], architecture: str, dtype: str, device: str
) -> LoadFigures:
    """Return the medians of one way; `seconds` are those of every way, round by round."""
    own = seconds[way.name]
    raw = ratios(seconds[way.raw], own) if way.raw else None
    slot = ratios(own, seconds[way.slot]) if way.slot else None
    return LoadFigures(
        architecture=architecture,
        dtype=dtype,
        device=device,
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
    """The ways to one expert on one device. `shelf` is shared with other benches of this process. Not thread-safe."""

    def __init__(self, expert: ExpertFiles, device: str = "cpu", shelf: LayoutShelf | None = None) -> None:
        self.cold = DroppedReader()
        self._expert, self._device = expert, device
        self._size_bytes = expert.spec.weights_bytes
        self._shelf = shelf or LayoutShelf()
        self._place = self._pool(device, self.cold).transfer.device
        self._scratch = HostMemory(self._size_bytes)
        self._ram = self._pool("ram", CachedReader())
        self._ram.load(expert.spec)
        cached = CachedReader()
        # Ways of one group alternate.
        self._groups = [
            self._pair("disk", "slot, cold", self._load(self.cold), "raw read, cold", self._read(self.cold)),
            *(self._thin(spec, "cold", "disk", self.cold) for spec in expert.thin),
            *self._ordinary("cold", "disk", drop_cached),
            self._pair("page cache", "slot, warm", self._load(cached), "raw read, warm", self._read(cached)),
            *(self._thin(spec, "warm", "page cache", cached) for spec in expert.thin),
            *self._ordinary("warm", "page cache", Path.read_bytes),
            self._pair("ram", "slot, from RAM tier", self._load(cached, self._ram), "raw memory copy", self._copy()),
        ]

    def measure(self, rounds: int) -> list[LoadFigures]:
        """Measure so many rounds; one more runs first: it checks digests, builds the slot, imports lazy modules."""
        groups = {group[0].name: partial(_alternate, group) for group in self._groups}
        turns = run_in_turn(groups, rounds + 1)
        seconds = {name: [turn[name] for turn in of_group[1:]] for of_group in turns.values() for name in of_group[0]}
        architecture, dtype = self._expert.spec.architecture, str(self._expert.dtype).removeprefix("torch.")
        return [figures_of(way, seconds, architecture, dtype, self._device) for group in self._groups for way in group]

    def _pair(
        self, tier: str, name: str, run: Callable[[], float], raw: str, run_raw: Callable[[], float]
    ) -> list[LoadWay]:
        return [LoadWay(raw, tier, run_raw, self._size_bytes), LoadWay(name, tier, run, self._size_bytes, raw=raw)]

    def _thin(self, spec: ExpertSpec, state: str, tier: str, reader: FileReader) -> list[LoadWay]:
        """Return the slot's way from a thin file, which it expands, and the reading of that file alone."""
        name, raw = (f"{way}, {state}, {spec.stored_as}" for way in ("slot", "raw read"))
        load, read = self._load(reader, spec=spec), self._read(reader, spec)
        return [
            LoadWay(raw, tier, read, spec.read_bytes),
            LoadWay(name, tier, load, spec.read_bytes, raw=raw, slot=f"slot, {state}"),
        ]

    def _ordinary(self, state: str, tier: str, prepare: Callable[[Path], object]) -> list[list[LoadWay]]:
        """Return the ways of ordinary programs; `prepare` brings a file into its tier, or out of the page cache."""
        expert, place = self._expert, self._place

        def assigned() -> nn.Module:
            with torch.device("meta"):
                model = self._construct(None)
            model.load_state_dict(load_file(expert.plain, str(place)), assign=True)
            return model

        def timed(file: Path, load: Callable[[], nn.Module]) -> Callable[[], float]:
            def run() -> float:
                prepare(file)
                begin_s = time.perf_counter()
                model = load()
                _settle(self._place)
                ended_s = time.perf_counter()
                del model
                return ended_s - begin_s

            return run

        def torch_load() -> nn.Module:
            model = self._construct(place)
            model.load_state_dict(torch.load(expert.checkpoint, map_location=place, weights_only=True))
            return model

        ways = {
            "torch.load + construct": (expert.checkpoint, torch_load),
            "safetensors, assigned": (expert.plain, assigned),
        }
        return [
            [LoadWay(f"{name}, {state}", tier, timed(file, load), file.stat().st_size, slot=f"slot, {state}")]
            for name, (file, load) in ways.items()
        ]

    def _construct(self, place: torch.device | None) -> nn.Module:
        model = build_original(ARCHITECTURES[self._expert.spec.architecture], len(_LABELS))
        return model.to(place, self._expert.dtype)

    def _copy(self) -> Callable[[], float]:
        """Return the copy of as many bytes of host memory, pinned for a GPU, into memory of the device."""
        transfer = self._pool(self._device, self.cold).transfer
        source = HostMemory(self._size_bytes, pin=self._place.type == "cuda")
        source.array[:] = 1
        target = transfer.allocate(self._size_bytes).buffer

        def run() -> float:
            begin_s = time.perf_counter()
            if self._place.type == "cpu":
                np.copyto(target.numpy(), source.array)
            else:
                target.copy_(source.tensor, non_blocking=True)
                _settle(self._place)
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
        self, reader: FileReader, source: SlotPool | None = None, spec: ExpertSpec | None = None
    ) -> Callable[[], float]:
        spec, pool = spec or self._expert.spec, self._pool(self._device, reader)

        def run() -> float:
            begin_s = time.perf_counter()
            pool.load(spec, pool.resident(), source)
            seconds = time.perf_counter() - begin_s
            pool.unload(spec.expert)
            return seconds

        return run


def _alternate(group: Sequence[LoadWay]) -> dict[str, float]:
    """Return median seconds of each way of a group, which take turns; a way that is alone runs once."""
    turns = _ALTERNATIONS if len(group) > 1 else 1
    seconds = run_in_turn({way.name: way.run for way in group}, turns, on_run=lambda _name: None)
    return {name: median(own) for name, own in seconds.items()}


def _settle(place: torch.device) -> None:
    """Wait for the work of a device that computes beside its callers."""
    if place.type == "cuda":
        torch.cuda.synchronize(place)
