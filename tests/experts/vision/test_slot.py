import hashlib
import mmap
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from experts.errors import ExpertError
from experts.spec import ExpertId, ExpertSpec
from experts.transfer import HostTransfer, StagedTransfer
from experts.vision.infer import infer
from experts.vision.layouts import Layout
from experts.vision.preprocess import fit
from experts.vision.slot import LayoutShelf, Slot, SlotPool
from tests.experts.lanes import LateLane
from tests.experts.pictures import a_picture
from tests.experts.samples import an_expert_file, check_pool


def answers(pool: SlotPool, spec: ExpertSpec):
    return infer(pool.slot(spec.expert), [fit(a_picture(seed=seed), spec.task, spec.input_size) for seed in range(2)])


def a_pool(budget_bytes: int = 100 << 20, *specs: ExpertSpec) -> SlotPool:
    """A pool of the CPU with these experts resident."""
    pool = SlotPool("cpu", budget_bytes)
    for spec in specs:
        pool.load(spec)
    return pool


def fresh_answers(spec: ExpertSpec):
    return answers(a_pool(100 << 20, spec), spec)


def test_a_slot_that_held_others_answers_as_a_fresh_one(tmp_path: Path):
    specs = [
        an_expert_file(tmp_path, f"{architecture}-{class_count}-{seed}", architecture, class_count, seed)
        for architecture, class_count in (("resnet18", 3), ("yolo11n", 2), ("resnet18", 7))
        for seed in (1, 2)
    ]
    fresh = {spec.expert: fresh_answers(spec) for spec in specs}
    assert len({str(answer) for answer in fresh.values()}) == len(specs)
    pool, previous = a_pool(60 << 20), ()
    for spec in specs * 2:
        pool.load(spec, previous)
        previous = (spec.expert,)
        assert answers(pool, spec) == fresh[spec.expert]
        check_pool(pool)


class Constructions(TorchDispatchMode):
    """Counts what is made while it is entered: modules and threads anywhere, torch calls on this thread.

    Torch sees calls twice: as functions (`torch.empty`, `torch.from_numpy`, `nn.Parameter(...)`, `tensor.view`) and as
    operators, however they were reached; both are counted, so that no tensor or storage comes to be unseen.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()
        self._functions = TorchFunctions(self.made)
        monkeypatch.setattr(Layout, "bind", self._counting("bind"))
        for owner in (nn.Module, threading.Thread):
            monkeypatch.setattr(owner, "__init__", self._counting(owner.__name__))
        for owner in (torch.UntypedStorage, nn.Parameter):
            monkeypatch.setattr(owner, "__new__", self._counting(owner.__name__))

    def _counting(self, name: str):
        return lambda *_args, **_options: self.made.update([name])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *failure):
        super().__exit__(*failure)
        self._functions.__exit__(*failure)


class TorchFunctions(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.made = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.made[str(func)] += 1
        return func(*args, **(kwargs or {}))


def four_of_two_layouts(folder: Path) -> list[ExpertSpec]:
    return [
        an_expert_file(folder, f"{name}{seed}", name, 2, seed) for seed in (1, 2) for name in ("yolov8n", "yolov5n")
    ]


def switch(pool: SlotPool, spec: ExpertSpec) -> None:
    """Load in place of the experts that have been resident longest, as many as it takes."""
    evict, free_bytes = [], pool.budget_bytes - pool.used_bytes
    for expert in pool.resident():
        if free_bytes >= spec.weights_bytes:
            break
        evict.append(expert)
        free_bytes += pool.slot(expert).size_bytes
    pool.load(spec, tuple(evict))


def test_five_hundred_switches_among_layouts_make_no_module_tensor_or_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    specs = four_of_two_layouts(tmp_path)
    pool = a_pool(2 * max(spec.weights_bytes for spec in specs))
    for pair in (specs[::2], specs[1::2], specs[::2]):  # the pool's mix: two of either layout at once
        for spec in pair:
            switch(pool, spec)
    slots = {id(slot) for slot in every_slot(pool)}
    random, loads = np.random.default_rng(0), 0
    with Constructions(monkeypatch) as constructions:
        while loads < 500:
            spec = specs[random.integers(len(specs))]
            if spec.expert not in pool.resident():
                switch(pool, spec)
                loads += 1
    assert constructions.made == {}
    assert {id(slot) for slot in every_slot(pool)} == slots
    check_pool(pool)


def every_slot(pool: SlotPool) -> list[Slot]:
    return [*pool._resident.values(), *pool._kept, *pool._vacant]


@pytest.mark.parametrize("source_device", ["ram", pytest.param("cpu", marks=pytest.mark.test_all)])
def test_an_expert_copied_from_another_pool_answers_as_one_from_its_file(tmp_path: Path, source_device: str):
    specs = [an_expert_file(tmp_path, f"e{seed}", seed=seed) for seed in (1, 2)]
    source, pool = SlotPool(source_device, 2 * specs[0].weights_bytes), a_pool(specs[0].weights_bytes)
    previous = ()
    for spec in specs:
        assert source.load(spec).tier == "disk"
        pool.load(spec, previous)
        expected = answers(pool, spec)
        pool.unload(spec.expert)
        report = pool.load(spec, source=source)
        assert (report.tier, report.bytes) == ("ram", spec.weights_bytes)
        assert answers(pool, spec) == expected
        previous = (spec.expert,)
    assert source.resident() == tuple(spec.expert for spec in specs)
    check_pool(source)


def test_weights_replaced_since_the_source_was_filled_come_from_the_file(tmp_path: Path):
    old = an_expert_file(tmp_path, "e", seed=1)
    ram, pool = SlotPool("ram", old.weights_bytes), a_pool()
    ram.load(old)
    new = an_expert_file(tmp_path, "e", seed=2)
    assert pool.load(new, source=ram).tier == "disk"
    assert answers(pool, new) == fresh_answers(new)


@pytest.mark.parametrize("device", ["cpu", "ram"])
def test_weights_that_are_not_numbers_never_answer(tmp_path: Path, device: str):
    spec = an_expert_file(tmp_path)
    bad = bytearray(spec.file.read_bytes())
    at = len(bad) - spec.weights_bytes // 2 // 4 * 4
    bad[at : at + 4] = np.float32("nan").tobytes()
    spec.file.write_bytes(bad)
    spec = replace(spec, sha256=hashlib.sha256(bad).hexdigest())
    pool = SlotPool(device, spec.weights_bytes)
    for _ in range(2):
        with pytest.raises(ExpertError, match="not finite"):
            pool.load(spec)
    assert pool.resident() == ()


def test_an_expert_that_leaves_a_gpu_can_stay_in_host_memory_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spec = an_expert_file(tmp_path)
    ram = SlotPool("ram", spec.weights_bytes)
    monkeypatch.setattr("experts.vision.slot.transfer_for", lambda _: StagedTransfer("cpu", LateLane))
    gpu = SlotPool("cuda:0", spec.weights_bytes)
    gpu.load(spec)
    assert ram.load(spec, source=gpu).tier == "ram"
    gpu.unload(spec.expert)
    assert gpu.load(spec, source=ram).tier == "ram"
    monkeypatch.undo()
    assert answers(gpu, spec) == fresh_answers(spec)


def test_pools_that_share_a_shelf_check_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec, shelf, checked = an_expert_file(tmp_path), LayoutShelf(), []
    monkeypatch.setattr("experts.vision.slot.check_digest", lambda *_: checked.append(1))
    for device in ("ram", "cpu"):
        SlotPool(device, spec.weights_bytes, shelf).load(spec)
    assert checked == [1]


def damage(file: Path, kind: str) -> None:
    data = bytearray(file.read_bytes())
    if kind == "missing":
        file.unlink()
        return
    if kind == "truncated":
        del data[len(data) // 2 :]
    elif kind == "flipped":
        data[len(data) // 2] ^= 0x10
    elif kind == "empty":
        data.clear()
    file.write_bytes(data)


@pytest.mark.parametrize("seen_before", [False, True])
@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped", "empty"])
def test_a_damaged_file_fails_its_expert_and_leaves_the_pool_usable(tmp_path: Path, kind: str, seen_before: bool):
    good, bad = an_expert_file(tmp_path, "good", seed=1), an_expert_file(tmp_path, "bad", seed=2)
    pool = a_pool(good.weights_bytes)
    if seen_before:
        pool.load(bad)
        pool.unload(bad.expert)
    damage(bad.file, kind)
    with pytest.raises(ExpertError, match=r"expert bad: .*bad\.safetensors"):
        pool.load(bad)
    check_pool(pool)
    assert (pool.resident(), pool.used_bytes) == ((), 0)
    pool.load(good)
    assert answers(pool, good)


@pytest.mark.promise("Containment", "Weights that changed, or are written to while they are read, are never used")
def test_an_expert_replaced_on_disk_by_one_of_its_size_and_times_is_checked_again(tmp_path: Path):
    spec = an_expert_file(tmp_path, "r18", seed=1)
    pool, state = a_pool(100 << 20, spec), spec.file.stat()
    pool.unload(spec.expert)
    an_expert_file(tmp_path, "r18", seed=2)
    os.utime(spec.file, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(ExpertError, match="contents changed"):
        pool.load(spec)


@pytest.mark.promise(
    "Prepared files",
    "weights | other weights under the same name, or a byte changed in place | the bytes of each load are checked as "
    "they are read, before they judge: by their sha256 at the first, then by a keyed hash",
)
@pytest.mark.parametrize("stored_as", ["", "int8"])
def test_a_byte_that_changes_through_a_mapping_after_the_first_load_fails_the_expert(tmp_path: Path, stored_as: str):
    spec = an_expert_file(tmp_path, stored_as=stored_as)
    pool, place = a_pool(100 << 20), -spec.read_bytes // 2
    with spec.file.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[place] = mapping[place]  # until the page is written back, later writes to it change no times
        pool.load(spec)
        pool.unload(spec.expert)
        mapping[place] ^= 1
        for _ in range(2):
            with pytest.raises(ExpertError, match="contents changed"):
                pool.load(spec)
        assert pool.resident() == ()
        mapping[place] ^= 1
        pool.load(spec)


@pytest.mark.parametrize("method", ["allocate", "occupy"])
def test_a_device_without_memory_fails_the_load_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
):
    small, large = an_expert_file(tmp_path, "small", "yolov8n", 2), an_expert_file(tmp_path, "large")
    pool = a_pool(large.weights_bytes)
    if method == "occupy":
        pool.load(small)
        pool.load(large, (small.expert,))
        pool.unload(large.expert)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(HostTransfer, method, fail)
        with pytest.raises(ExpertError, match=r"cpu has no \d+ bytes left; lower the device's budget"):
            pool.load(small)
    check_pool(pool)
    assert (pool.used_bytes, pool.allocated_bytes) == (0, 0)
    pool.load(small)
    assert answers(pool, small)


def test_loads_and_answers_go_on_in_threads_at_once(tmp_path: Path):
    specs = [an_expert_file(tmp_path, f"e{seed}", "yolov8n", 2, seed) for seed in range(4)]
    expected = {spec.expert: fresh_answers(spec) for spec in specs}
    pool, wrong = a_pool(4 * specs[0].weights_bytes), []

    def work(spec: ExpertSpec) -> None:
        torch.set_num_threads(1)
        for _ in range(6):
            pool.load(spec)
            if answers(pool, spec) != expected[spec.expert]:
                wrong.append(spec.expert)
            pool.unload(spec.expert)

    with ThreadPoolExecutor(len(specs)) as threads:
        list(threads.map(work, specs))
    assert wrong == []
    check_pool(pool)


class PoolMachine(RuleBasedStateMachine):
    """Any order of loads, evictions, failures and new budgets: never over the budget, answers always right."""

    specs: tuple[ExpertSpec, ...] = ()
    shelf = LayoutShelf()

    @initialize(slots=st.integers(1, 3))
    def start(self, slots: int) -> None:
        self.unit_bytes = self.specs[0].weights_bytes
        self.pool = SlotPool("cpu", slots * self.unit_bytes, self.shelf)

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        spec = data.draw(st.sampled_from(self.specs))
        evict = tuple(data.draw(st.lists(st.sampled_from(self.pool.resident() or (spec.expert,)), unique=True)))
        before = set(self.pool.resident())
        left_bytes = self.pool.used_bytes - sum(
            self.pool.slot(expert).size_bytes for expert in evict if expert in before
        )
        broken = spec.file.name.startswith("broken")
        fits = left_bytes + spec.weights_bytes <= self.pool.budget_bytes and not broken
        if fits and spec.expert not in before - set(evict):
            assert self.pool.load(spec, evict).bytes == spec.weights_bytes
        else:
            with pytest.raises(ExpertError):
                self.pool.load(spec, evict)
            assert set(self.pool.resident()) == before - set(evict)

    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        if self.pool.resident():
            self.pool.unload(data.draw(st.sampled_from(self.pool.resident())))

    @rule(slots=st.integers(1, 3))
    def resize(self, slots: int) -> None:
        if self.pool.used_bytes <= slots * self.unit_bytes:
            self.pool.resize(slots * self.unit_bytes)

    @invariant()
    def the_books_agree(self) -> None:
        if hasattr(self, "pool"):
            check_pool(self.pool)
            assert self.pool.used_bytes <= self.pool.allocated_bytes <= self.pool.budget_bytes
            for expert in self.pool.resident():
                spec = next(spec for spec in self.specs if spec.expert == expert)
                stored = os.pread(self.files[expert], 256, os.fstat(self.files[expert]).st_size - spec.weights_bytes)
                assert bytes(self.pool.slot(expert).buffer[:256].numpy().data) == stored

    files: dict[ExpertId, int] = {}  # noqa: RUF012  # one set of files for all examples


@pytest.fixture(scope="module")
def machine_files(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("machine")
    specs = [an_expert_file(folder, f"a{seed}", "yolov8n", 2, seed) for seed in range(3)]
    specs += [an_expert_file(folder, f"b{seed}", "yolov5n", 2, seed) for seed in range(2)]
    specs.append(an_expert_file(folder, "broken", "yolov8n", 2))
    damage(specs[-1].file, "flipped")
    PoolMachine.specs = tuple(specs)
    PoolMachine.files = {spec.expert: os.open(spec.file, os.O_RDONLY) for spec in specs}
    yield
    for descriptor in PoolMachine.files.values():
        os.close(descriptor)


@pytest.mark.usefixtures("machine_files")
class TestPool(PoolMachine.TestCase):
    settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
