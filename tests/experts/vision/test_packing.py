from pathlib import Path

import pytest
import torch

from experts.spec import ExpertSpec
from experts.vision.infer import infer
from experts.vision.networks import FusedConvolution, runs_fused
from experts.vision.packing import BATCHES_BEFORE
from experts.vision.preprocess import fit
from experts.vision.slot import LayoutShelf, Slot, SlotPool
from tests.experts.pictures import a_picture
from tests.experts.samples import an_expert_file

pytestmark = pytest.mark.skipif(not runs_fused(torch.float32), reason="this processor has no fused convolutions")

BUDGET_BYTES = 120 << 20
#: Each number format, a classifier and a detector, plain and int8 files.
COMBINATIONS = [
    ("resnet18", "float32", ""),
    ("resnet18", "bfloat16", ""),
    ("resnet18", "float16", "int8"),
    ("yolo11n", "float32", "int8"),
]


def a_packing_pool(budget_bytes: int = BUDGET_BYTES) -> SlotPool:
    return SlotPool("cpu", budget_bytes, LayoutShelf(packs=True))


def answers(pool: SlotPool, spec: ExpertSpec, batch: int = 2):
    images = [fit(a_picture(seed=seed), spec.task, spec.input_size) for seed in range(batch)]
    return infer(pool.slot(spec.expert), images)


def plain_answers(spec: ExpertSpec, batch: int = 2):
    pool = SlotPool("cpu", BUDGET_BYTES)
    pool.load(spec)
    return answers(pool, spec, batch)


def packed_bytes(slot: Slot) -> int:
    packed = [getattr(part, "packed", None) for part in slot.module.modules()]
    return sum(torch.ops.mkldnn._nbytes(weights) for weights in packed if weights is not None)


@pytest.mark.parametrize(("architecture", "dtype", "stored_as"), COMBINATIONS)
def test_packed_experts_answer_as_plain_ones_to_the_bit(tmp_path: Path, architecture: str, dtype: str, stored_as: str):
    spec = an_expert_file(tmp_path, "e", architecture, dtype=dtype, stored_as=stored_as)
    pool = a_packing_pool()
    pool.load(spec)
    expected = {batch: plain_answers(spec, batch) for batch in (1, 3)}
    for batch in (1, 3, 3, 1, 3):
        assert answers(pool, spec, batch) == expected[batch]
    assert (packed_bytes(pool.slot(spec.expert)) > 0) == runs_fused(getattr(torch, dtype))


def test_weights_are_packed_at_the_third_batch_since_a_load_and_plain_ones_make_room_for_them(tmp_path: Path):
    spec = an_expert_file(tmp_path)
    pool = a_packing_pool()
    for _ in range(2):
        pool.load(spec, pool.resident())
        slot = pool.slot(spec.expert)
        for _ in range(BATCHES_BEFORE):
            answers(pool, spec)
            assert packed_bytes(slot) == 0
        answers(pool, spec)
        assert 0.9 * spec.weights_bytes < packed_bytes(slot) < 1.02 * spec.weights_bytes
        assert int(slot.buffer.count_nonzero()) < 0.1 * slot.size_bytes, "pages that were given back read zeros"


def test_a_pool_that_others_may_copy_from_packs_nothing(tmp_path: Path):
    spec = an_expert_file(tmp_path)
    pool, host = SlotPool("cpu", BUDGET_BYTES), SlotPool("ram", BUDGET_BYTES, LayoutShelf(packs=True))
    for each in (pool, host):
        each.load(spec)
    for _ in range(BATCHES_BEFORE + 1):
        answers(pool, spec)
    assert packed_bytes(pool.slot(spec.expert)) == 0
    copy = SlotPool("cpu", BUDGET_BYTES)
    assert copy.load(spec, source=host).tier == "ram"
    assert answers(copy, spec) == plain_answers(spec)


@pytest.mark.parametrize("packed", [0, 3])
def test_an_expert_answers_where_memory_for_packing_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: int
):
    spec, pack, packing = an_expert_file(tmp_path), FusedConvolution.pack, iter(range(packed))

    def pack_some(part: FusedConvolution) -> None:
        if next(packing, None) is None:
            raise RuntimeError("can't allocate memory")
        pack(part)

    monkeypatch.setattr(FusedConvolution, "pack", pack_some)
    pool, expected = a_packing_pool(), plain_answers(spec)
    pool.load(spec)
    for _ in range(BATCHES_BEFORE + 3):
        assert answers(pool, spec) == expected
    assert (packed_bytes(pool.slot(spec.expert)) > 0) == (packed > 0)
