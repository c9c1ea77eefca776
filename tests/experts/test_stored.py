import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from experts.errors import ExpertError, WeightsError
from experts.reading import CachedReader, RegionHash
from experts.spec import ExpertSpec
from experts.stored import plan_form, thinned
from experts.transfer import DeviceTransfer, HostTransfer, StagedTransfer
from experts.vision.slot import SlotPool
from experts.weights import SCALE_PREFIX, Block, Entry, plan_entries, read_header, write_weights
from tests.experts.lanes import LateLane
from tests.experts.samples import an_expert_file

NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: Weights of one channel, many channels, first convolutions (short rows), biases, empty rows of a padded head.
SHAPES = [(64, 3, 3, 64), (7, 1, 1, 333), (16, 96), (1, 2048), (16, 3, 3, 3), (5,), (1024,), (32, 32), (3, 31)]


def transfers() -> list[DeviceTransfer]:
    return [HostTransfer(), StagedTransfer("cpu", LateLane)]


def some_tensors(shapes: list[tuple[int, ...]], dtype: str, seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=random).to(NUMBERS[dtype]) for shape in shapes]
    for tensor in tensors:
        tensor[-1:] = 0  # a channel of zeros, as in padded heads
    return tensors


def a_thin_file(folder: Path, tensors: list[torch.Tensor], dtype: str, form: str):
    """A thin file of these tensors: path, form, and the entries and bytes of the slot that it fills."""
    entries, slot_bytes = plan_entries([(f"t{n}", dtype, tuple(tensor.shape)) for n, tensor in enumerate(tensors)])
    blocks = [
        Block(entry.name, dtype, entry.shape, tensor.view(-1).view(torch.uint8).numpy().tobytes())
        for entry, tensor in zip(entries, tensors, strict=True)
    ]
    plan = plan_form(entries, slot_bytes, form)
    write_weights(folder / "thin", thinned(blocks, plan), {"stored": form})
    return folder / "thin", plan, entries, slot_bytes


def filled(transfer: DeviceTransfer, file: Path, plan, slot_bytes: int, reader=None) -> torch.Tensor:
    place, descriptor = transfer.allocate(slot_bytes), os.open(file, os.O_RDONLY)
    place.buffer.fill_(255)  # not a number in any dtype
    try:
        transfer.fill(
            place,
            RegionHash(bytes(16)).read(
                partial((reader or CachedReader()).read, descriptor), read_header(file).data_start
            ),
            plan,
        )
    finally:
        os.close(descriptor)
    return place.buffer


def tensor_in(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
    return buffer[entry.begin : entry.end].view(NUMBERS[entry.dtype]).view(entry.shape)


@pytest.mark.parametrize("piece_bytes", [4096, 4 << 20])
@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=9),
    dtype=st.sampled_from(["F32", "F16", "BF16"]),
    form=st.sampled_from(["bfloat16", "int8"]),
    seed=st.integers(0, 99),
)
def test_a_filled_slot_holds_what_the_safetensors_library_reads_times_its_scales(
    piece_bytes: int, shapes: list[tuple[int, ...]], dtype: str, form: str, seed: int
):
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("experts.transfer._READ_BYTES", piece_bytes)
        patch.setattr("experts.transfer._STAGING_BYTES", piece_bytes)
        tensors = some_tensors(shapes, dtype, seed)
        file, plan, entries, slot_bytes = a_thin_file(Path(folder), tensors, dtype, form)
        if not plan.is_thin:
            return
        stored = load_file(file)
        buffers = [filled(transfer, file, plan, slot_bytes) for transfer in transfers()]
        for entry, original in zip(entries, tensors, strict=True):
            weights, scales = stored[entry.name].float(), stored.get(SCALE_PREFIX + entry.name)
            if scales is not None:
                weights *= scales.view(-1, *[1] * (weights.dim() - 1))
            for buffer in buffers:
                torch.testing.assert_close(
                    tensor_in(buffer, entry), weights.to(NUMBERS[dtype]), rtol=0, atol=0, msg=entry.name
                )
            largest = float(original.float().abs().max())
            assert float((weights - original.float()).abs().max()) <= largest / 250


@pytest.mark.parametrize("place", [0, 1])
def test_a_thin_file_that_ends_early_is_an_error_and_leaves_no_thread(tmp_path: Path, place: int):
    file, plan, _, slot_bytes = a_thin_file(tmp_path, some_tensors(SHAPES, "F32", 1), "F32", "int8")
    header = read_header(file)
    os.truncate(file, header.data_start + plan.region_bytes // 2)
    transfer, descriptor = transfers()[place], os.open(file, os.O_RDONLY)
    before = threading.active_count()
    with pytest.raises(EOFError, match="bytes early"):
        transfer.fill(
            transfer.allocate(slot_bytes),
            RegionHash(bytes(16)).read(partial(CachedReader().read, descriptor), header.data_start),
            plan,
        )
    os.close(descriptor)
    assert threading.active_count() == before


def weights_of(pool: SlotPool, spec: ExpertSpec) -> dict[str, torch.Tensor]:
    slot = pool.slot(spec.expert)
    return {entry.name: tensor_in(slot.buffer, entry).clone() for entry in slot.layout.entries}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_thin_and_plain_experts_take_turns_in_one_slot(tmp_path: Path, dtype: str):
    plain, thin = (an_expert_file(tmp_path, f"e{form}", dtype=dtype, stored_as=form) for form in ("", "int8"))
    assert plain.weights_bytes == thin.weights_bytes > 1.9 * thin.read_bytes
    assert dtype == "bfloat16" or plain.read_bytes > 3.5 * thin.read_bytes
    pool, ram = SlotPool("cpu", plain.weights_bytes), SlotPool("ram", plain.weights_bytes)
    read, seen = [], []
    for spec in (thin, plain, thin, thin):
        read.append(pool.load(spec, pool.resident()).bytes)
        seen.append(weights_of(pool, spec))
    assert read == [thin.read_bytes, plain.weights_bytes, thin.read_bytes, thin.read_bytes]
    stored = load_file(thin.file)
    for name, weights in seen[0].items():
        assert torch.equal(weights, seen[2][name])
        assert torch.equal(weights, seen[3][name])
        if name not in stored or SCALE_PREFIX + name not in stored:
            assert torch.equal(weights, seen[1][name]), name
    ram.load(thin)
    assert pool.load(thin, (thin.expert,), ram).tier == "ram"
    assert all(torch.equal(weights, seen[0][name]) for name, weights in weights_of(pool, thin).items())


def changed(spec: ExpertSpec, change) -> ExpertSpec:
    """The expert with other tensors in its file, rightly hashed."""
    header, data = read_header(spec.file), spec.file.read_bytes()
    blocks = [
        Block(e.name, e.dtype, e.shape, data[header.data_start + e.begin : header.data_start + e.end])
        for e in header.entries
    ]
    metadata = {key: value for key, value in header.metadata.items() if key != "coserve_format"}
    return replace(spec, sha256=write_weights(spec.file, change(blocks), metadata))


FIRST = "_scale.network.conv1.weight"
NOT_FINITE = r"weights or scales in network\.conv1\.weight that are not finite numbers; .*import the expert again"


def with_number(number: float):
    def change(blocks: list[Block]) -> list[Block]:
        data = np.frombuffer(blocks[[b.name for b in blocks].index(FIRST)].data, np.float32).copy()
        data[3] = number
        return [replace(b, data=data.tobytes()) if b.name == FIRST else b for b in blocks]

    return change


def reshaped(blocks: list[Block]) -> list[Block]:
    return [replace(b, shape=(1, *b.shape)) if b.name == FIRST else b for b in blocks]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_number(float("nan")), NOT_FINITE),
        (with_number(3e38), NOT_FINITE),
        (lambda blocks: [b for b in blocks if b.name != FIRST], r"import the expert again"),
        (reshaped, r"import the expert again"),
    ],
    ids=["nan", "overflowing", "missing", "wrong shape"],
)
def test_damaged_scales_are_refused_with_the_file_the_tensor_and_what_to_do(tmp_path: Path, change, reason: str):
    spec = changed(an_expert_file(tmp_path, stored_as="int8"), change)
    pool = SlotPool("cpu", spec.weights_bytes)
    with pytest.raises(ExpertError, match=reason) as caught:
        pool.load(spec)
    assert caught.value.file == spec.file
    assert pool.resident() == ()


def test_a_stored_form_that_is_not_known_is_refused_by_name(tmp_path: Path):
    spec = an_expert_file(tmp_path, stored_as="int8")
    data = spec.file.read_bytes()
    assert b'"coserve_format":"2"' in data, "versions before thin files refuse this one by its format"
    for written, reason in (
        (b'"stored":"int4"', "stores its weights as int4, and this version reads bfloat16, int8; import the original"),
        (b'"stared":"int8"', "stores its weights as None"),
    ):
        spec.file.write_bytes(data.replace(b'"stored":"int8"', written))
        with pytest.raises(WeightsError, match=reason):
            read_header(spec.file)
    spec.file.write_bytes(data.replace(b'"coserve_format":"2"', b'"coserve_format":"1"'))
    with pytest.raises(WeightsError, match="stores its weights as int8"):
        read_header(spec.file)
