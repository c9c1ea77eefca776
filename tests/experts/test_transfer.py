import hashlib
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from daemon.errors import is_device_error
from experts.memory import HostMemory
from experts.reading import CachedReader, Read, RegionHash
from experts.stored import plan_form
from experts.transfer import DeviceTransfer, StagedTransfer, transfer_for
from experts.vision.infer import infer
from experts.vision.preprocess import fit
from experts.vision.slot import LayoutShelf, SlotPool
from tests.experts.lanes import LateLane, StreamLane
from tests.experts.pictures import a_picture
from tests.experts.samples import an_expert_file, check_pool

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
#: "mapped" is the GPU where it shares the host's memory; a discrete one can do the same over its bus.
DEVICES = ["cpu", "ram", "staged", "simulated", *(pytest.param(name, marks=needs_gpu) for name in ("cuda:0", "mapped"))]


def a_transfer(device: str) -> DeviceTransfer:
    """For "staged" the GPU's way, in host memory, with copies as late as a stream's may be."""
    if device in ("staged", "simulated"):
        return StagedTransfer("cpu", LateLane if device == "staged" else StreamLane)
    return transfer_for("cuda:0" if device == "mapped" else device, shared=device == "mapped")


def a_file(folder: Path, size_bytes: int) -> tuple[int, bytes]:
    data = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8).tobytes()
    file = folder / "region"
    file.write_bytes(b"head" + data)
    return os.open(file, os.O_RDONLY), data


def contents(tensor: torch.Tensor) -> bytes:
    return tensor.clone().cpu().numpy().tobytes()  # a clone: torch never resizes what NumPy has seen


def read_of(descriptor: int, digest=None) -> Read:
    keyed, on_bytes = RegionHash(bytes(16)), digest.update if digest else lambda _: None
    return keyed.read(partial(CachedReader().read, descriptor), 4, on_bytes)


def filled(transfer: DeviceTransfer, descriptor: int, size_bytes: int, digest=None) -> bytes:
    place = transfer.allocate(size_bytes)
    transfer.fill(place, read_of(descriptor, digest), plan_form((), size_bytes, ""))
    return contents(place.buffer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size_bytes", [1, 4096, (16 << 20) + 5, 70 << 20])
def test_a_filled_place_and_its_digest_hold_the_bytes_of_the_file(tmp_path: Path, device: str, size_bytes: int):
    descriptor, data = a_file(tmp_path, size_bytes)
    digest = hashlib.sha256()
    assert filled(a_transfer(device), descriptor, size_bytes, digest) == data
    assert digest.digest() == hashlib.sha256(data).digest()
    os.close(descriptor)


@pytest.mark.parametrize("device", DEVICES)
def test_a_file_that_ends_early_is_an_error_and_the_next_fill_works(tmp_path: Path, device: str):
    size_bytes = (33 << 20) + 10
    descriptor, data = a_file(tmp_path, size_bytes)
    transfer = a_transfer(device)
    with pytest.raises(EOFError, match="ends 5 bytes early"):
        filled(transfer, descriptor, size_bytes + 5)
    assert filled(transfer, descriptor, size_bytes) == data
    os.close(descriptor)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", ["cpu", "ram"])
def test_a_place_can_be_copied_from_host_memory(tmp_path: Path, device: str, source: str):
    size_bytes = (17 << 20) + 3
    descriptor, data = a_file(tmp_path, size_bytes)
    origin = transfer_for(source).allocate(size_bytes)
    transfer_for(source).fill(origin, read_of(descriptor), plan_form((), size_bytes, ""))
    os.close(descriptor)
    transfer = a_transfer(device)
    place = transfer.allocate(size_bytes)
    assert origin.memory is not None
    transfer.copy(place, origin.memory)
    assert contents(place.buffer) == data


@pytest.mark.parametrize("device", DEVICES)
def test_views_of_a_place_outlive_its_memory(tmp_path: Path, device: str):
    descriptor, data = a_file(tmp_path, 20 << 20)
    transfer = a_transfer(device)
    place = transfer.allocate(20 << 20)
    view = place.buffer[4096:8192].view(torch.float32)
    for _ in range(2):
        transfer.fill(place, read_of(descriptor), plan_form((), 20 << 20, ""))
        assert contents(view) == data[4096:8192]
        assert contents(place.buffer) == data
        transfer.vacate(place)
        transfer.occupy(place)
    os.close(descriptor)


def test_vacated_host_memory_goes_back_to_the_system():
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    memory = HostMemory(64 << 20)
    memory.array[:] = 1
    before = resident_bytes()
    memory.vacate()
    assert before - resident_bytes() > 50 << 20


@pytest.mark.parametrize("device", [DEVICES[0], *DEVICES[3:]])
@pytest.mark.parametrize("architecture", ["resnet18", "yolov8n", "yolo26n"])
def test_every_device_answers_as_the_cpu(tmp_path: Path, device: str, architecture: str):
    spec = an_expert_file(tmp_path, "e", architecture, 3, input_size=96, max_detections=5)
    prepared = [fit(a_picture(seed=seed), spec.task, 96) for seed in range(3)]
    answers = []
    ram = SlotPool("ram", spec.weights_bytes)
    ram.load(spec)
    for name in ("cpu", device):
        pool = SlotPool(name, spec.weights_bytes, LayoutShelf(transfers=a_transfer))
        for source in (None, ram):
            pool.load(spec, source=source)
            answers.append(infer(pool.slot(spec.expert), prepared))
            pool.unload(spec.expert)
        check_pool(pool)
    for again in answers[1:]:
        for expected_answer, answer in zip(answers[0], again, strict=True):
            assert answer.confidence == pytest.approx(expected_answer.confidence, abs=1e-3)
            assert answer.label == expected_answer.label


def test_a_device_that_is_lost_ends_the_fill_with_its_error(tmp_path: Path):
    size_bytes = 70 << 20
    descriptor, _ = a_file(tmp_path, size_bytes)
    copies = iter(range(2))

    def next_copy() -> None:
        if next(copies, None) is None:
            raise RuntimeError("CUDA error: unspecified launch failure")

    transfer = StagedTransfer("cpu", partial(StreamLane, on_work=next_copy))
    with pytest.raises(RuntimeError, match="CUDA error") as caught:
        filled(transfer, descriptor, size_bytes)
    assert is_device_error(caught.value)
    os.close(descriptor)
