import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

from experts.errors import ExpertError
from experts.slot import LayoutShelf, SlotPool
from experts.spec import ExpertId, ExpertSpec
from experts.vision.infer import infer
from experts.vision.layouts import Layout
from experts.vision.preprocess import fit
from tests.experts.samples import a_picture, an_expert_file


def answers(pool: SlotPool, spec: ExpertSpec):
    return infer(pool.slot(spec.expert), [fit(a_picture(seed=seed), spec.task, spec.input_size) for seed in range(2)])


def a_pool(budget_bytes: int = 100 << 20) -> SlotPool:
    return SlotPool("cpu", budget_bytes)


def test_a_slot_that_held_others_answers_as_a_fresh_one(tmp_path: Path):
    specs = [
        an_expert_file(tmp_path, f"{architecture}-{class_count}-{seed}", architecture, class_count, seed)
        for architecture, class_count in (("resnet18", 3), ("yolo11n", 2), ("resnet18", 7))
        for seed in (1, 2)
    ]
    fresh = {}
    for spec in specs:
        pool = a_pool()
        pool.load(spec)
        fresh[spec.expert] = answers(pool, spec)
    assert len({str(answer) for answer in fresh.values()}) == len(specs)
    pool, previous = a_pool(60 << 20), ()
    for spec in specs * 2:
        pool.load(spec, previous)
        previous = (spec.expert,)
        assert answers(pool, spec) == fresh[spec.expert]
        pool.check()


def test_five_hundred_switches_construct_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    specs = [an_expert_file(tmp_path, f"y{seed}", "yolov8n", 2, seed) for seed in range(3)]
    pool = a_pool(2 * specs[0].weights_bytes)
    pool.load(specs[0])
    pool.load(specs[1])
    made: list[object] = []
    monkeypatch.setattr(Layout, "bind", lambda *_: made.append("bound"))
    monkeypatch.setattr(nn.Module, "__init__", lambda *_: made.append("constructed"))
    buffers = {pool.slot(spec.expert).buffer.data_ptr() for spec in specs[:2]}
    for number in range(500):
        pool.load(specs[(number + 2) % 3], evict=(specs[number % 3].expert,))
    assert made == []
    assert {pool.slot(expert).buffer.data_ptr() for expert in pool.resident()} == buffers


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
    pool.check()
    assert (pool.resident(), pool.used_bytes) == ((), 0)
    pool.load(good)
    assert answers(pool, good)


def test_a_failed_load_has_evicted_what_it_was_told_to(tmp_path: Path):
    good, bad = an_expert_file(tmp_path, "good", seed=1), an_expert_file(tmp_path, "bad", seed=2)
    pool = a_pool(good.weights_bytes)
    pool.load(good)
    for spec in (replace(bad, file=tmp_path / "none"), replace(bad, layout="unreadable")):
        with pytest.raises(ExpertError):
            pool.load(spec, evict=(good.expert,))
        assert pool.resident() == ()
        pool.load(good)


def test_a_file_of_another_layout_is_refused(tmp_path: Path):
    spec = an_expert_file(tmp_path, "small", class_count=3)
    other = an_expert_file(tmp_path, "large", class_count=20)
    with pytest.raises(ExpertError, match="reload the catalog"):
        a_pool().load(replace(spec, layout=other.layout))


def test_an_expert_replaced_on_disk_is_checked_again(tmp_path: Path):
    spec = an_expert_file(tmp_path, "r18", seed=1)
    pool = a_pool()
    pool.load(spec)
    pool.unload(spec.expert)
    an_expert_file(tmp_path, "r18", seed=2)
    with pytest.raises(ExpertError, match="contents changed"):
        pool.load(spec)


def test_an_expert_that_does_not_fit_says_how_many_bytes_are_missing(tmp_path: Path):
    spec = an_expert_file(tmp_path)
    with pytest.raises(ExpertError, match=rf"needs {spec.weights_bytes} bytes on cpu, where 1000 are free"):
        a_pool(1000).load(spec)


def test_an_expert_is_not_loaded_twice(tmp_path: Path):
    spec = an_expert_file(tmp_path)
    pool = a_pool()
    pool.load(spec)
    with pytest.raises(ExpertError, match="already in the pool"):
        pool.load(spec)
    with pytest.raises(ExpertError, match="not resident"):
        pool.slot(ExpertId("nobody"))


def test_kept_slots_make_room_for_another_layout_and_for_a_smaller_budget(tmp_path: Path):
    small, large = an_expert_file(tmp_path, "small", "yolov8n", 2), an_expert_file(tmp_path, "large")
    pool = a_pool(large.weights_bytes)
    pool.load(small)
    pool.unload(small.expert)
    assert pool.allocated_bytes == small.weights_bytes
    pool.load(large)
    assert pool.allocated_bytes == large.weights_bytes
    with pytest.raises(ValueError, match="unload some first"):
        pool.resize(small.weights_bytes)
    pool.unload(large.expert)
    pool.resize(small.weights_bytes)
    assert pool.allocated_bytes == 0
    pool.load(small)


def test_loads_and_answers_go_on_in_threads_at_once(tmp_path: Path):
    specs = [an_expert_file(tmp_path, f"e{seed}", "yolov8n", 2, seed) for seed in range(4)]
    expected = {}
    for spec in specs:
        pool = a_pool()
        pool.load(spec)
        expected[spec.expert] = answers(pool, spec)
    pool, wrong = a_pool(4 * specs[0].weights_bytes), []

    def work(spec: ExpertSpec) -> None:
        torch.set_num_threads(1)
        for _ in range(6):
            pool.load(spec)
            if answers(pool, spec) != expected[spec.expert]:
                wrong.append(spec.expert)
            pool.unload(spec.expert)

    threads = [threading.Thread(target=work, args=(spec,)) for spec in specs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    pool.check()


def test_two_threads_may_compute_in_one_slot(tmp_path: Path):
    spec = an_expert_file(tmp_path, "e", "yolo11n", 2)
    pool = a_pool()
    pool.load(spec)
    expected, wrong = answers(pool, spec), []

    def work() -> None:
        torch.set_num_threads(1)
        wrong.extend(1 for _ in range(8) if answers(pool, spec) != expected)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_reduced_precision_experts_run_and_nearly_agree(tmp_path: Path):
    full, half = (an_expert_file(tmp_path, dtype, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert half.weights_bytes < 0.51 * full.weights_bytes
    pool = a_pool()
    pool.load(full)
    pool.load(half)
    for exact, rough in zip(answers(pool, full), answers(pool, half), strict=True):
        assert rough.confidence == pytest.approx(exact.confidence, abs=0.02)


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
            self.pool.check()
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
