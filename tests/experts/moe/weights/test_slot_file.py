"""`coserve moe import`: experts in slot layout, exact or packed, checked, resumable."""

from contextlib import closing

import pytest
import torch

from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey
from experts.moe.model.runtime import read_model
from experts.moe.modes import open_mode
from experts.moe.weights.checkpoint import CheckpointStore, WeightFiles
from experts.moe.weights.slot_file import SlotFileStore, write_slot_file
from tests.experts.moe.tiny import EACH_FAMILY, prompts, write_tiny
from tests.experts.moe.traces import open_with_slots


def import_into_slots(folder, storage="exact"):
    _, arch, checkpoint = read_model(folder)
    with closing(CheckpointStore(arch, checkpoint)) as source:
        return write_slot_file(source, checkpoint, storage, lambda _: None)


@pytest.fixture
def slots(tmp_path):
    """Import a tiny model; return its slot file."""
    write_tiny(tmp_path)
    return import_into_slots(tmp_path)


def open_stores(folder, storage="exact"):
    _, arch, checkpoint = read_model(folder)
    return CheckpointStore(arch, checkpoint), SlotFileStore(arch, checkpoint, storage)


def read_all(store):
    buffer = torch.zeros(store.expert_bytes, dtype=torch.uint8)
    for key in store.arch.expert_keys:
        store.read(key, buffer.numpy().data)
        yield key, [matrix.clone() for matrix in store.arch.weights(buffer)]


@torch.inference_mode()
def a_prefill(folder, storage):
    runtime = open_with_slots(folder, open_mode("ondemand", folder), 4, storage=storage)
    return runtime.model(**prompts(2)).logits


@pytest.mark.parametrize("layout", ["single", "fused"])
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_imported_experts_are_those_of_the_checkpoint_in_one_read_each(tmp_path, family, layout, monkeypatch):
    write_tiny(tmp_path, family, layout=layout, shards="40KB")
    import_into_slots(tmp_path)
    original, imported = open_stores(tmp_path)
    expected, reads, read = dict(read_all(original)), [], WeightFiles.read
    monkeypatch.setattr(WeightFiles, "read", lambda *arguments: reads.append(arguments) or read(*arguments))
    for key, matrices in read_all(imported):
        assert all(torch.equal(*pair) for pair in zip(matrices, expected[key], strict=True))
    assert len(reads) == len(expected)


@pytest.mark.usefixtures("slots")
def test_an_imported_model_is_read_from_the_slot_file_and_answers_the_same(tmp_path):
    assert torch.equal(a_prefill(tmp_path, "auto"), a_prefill(tmp_path, "checkpoint"))


@pytest.mark.parametrize(("storage", "max_error"), [("int8", 0.01), ("int4", 0.12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_come_back_with_a_small_error(tmp_path, storage, max_error, dtype):
    write_tiny(tmp_path, dtype=dtype)
    import_into_slots(tmp_path, storage)
    original, packed = open_stores(tmp_path, storage)
    assert packed.stored_bytes < original.stored_bytes * (0.4 if dtype == torch.float32 else 0.7)
    for (_, before), (_, after) in zip(read_all(original), read_all(packed), strict=True):
        for old, new in zip(before, after, strict=True):
            assert new.dtype == dtype
            assert float((new.float() - old.float()).norm() / old.float().norm()) < max_error
    assert float((a_prefill(tmp_path, storage) - a_prefill(tmp_path, "checkpoint")).abs().max()) > 0


@pytest.mark.parametrize("read_before", [ExpertKey(0, 0), ExpertKey(2, 7)])
def test_a_damaged_expert_is_named_whether_it_was_read_before_or_not(tmp_path, slots, read_before):
    _, store = open_stores(tmp_path)
    buffer = torch.zeros(store.expert_bytes, dtype=torch.uint8).numpy().data
    store.read(read_before, buffer)
    with slots.open("r+b") as opened:
        opened.seek(-4096, 2)
        opened.write(b"damage")
    with pytest.raises(ModelError, match=r"experts-exact.*expert 7 of layer 2 is damaged.*coserve moe import"):
        store.read(ExpertKey(2, 7), buffer)


def cut_off(file):
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 4096)


def change_header(file):
    data = bytearray(file.read_bytes())
    at = data.index(b'"data_offsets":[0,') + len(b'"data_offsets":[')
    data[at : at + 1] = b"4"
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("spoil", [cut_off, change_header])
def test_a_spoilt_slot_file_is_refused_and_written_again_by_the_import(tmp_path, slots, spoil):
    spoil(slots)
    with pytest.raises(ModelError, match=r"experts-exact.*not a whole slot file.*coserve moe import"):
        a_prefill(tmp_path, "auto")
    import_into_slots(tmp_path)
    a_prefill(tmp_path, "auto")


def test_packed_storage_that_was_not_imported_says_which_command_makes_it(tmp_path):
    write_tiny(tmp_path)
    with pytest.raises(ModelError, match=r"experts-int8.*coserve moe import --storage int8"):
        a_prefill(tmp_path, "int8")
