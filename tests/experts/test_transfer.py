import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from experts.slot import SlotPool
from experts.transfer import Transfer, transfer_for
from experts.vision.infer import infer
from experts.vision.preprocess import fit
from tests.experts.samples import a_picture, an_expert_file

DEVICES = [
    "cpu",
    pytest.param(
        "cuda:0",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")],
    ),
]


def a_file(folder: Path, size_bytes: int) -> tuple[int, bytes]:
    data = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8).tobytes()
    file = folder / "region"
    file.write_bytes(b"head" + data)
    return os.open(file, os.O_RDONLY), data


def filled(transfer: Transfer, descriptor: int, size_bytes: int, digest=None) -> bytes:
    buffer = transfer.allocate(size_bytes)
    transfer.fill(buffer, descriptor, 4, digest)
    return buffer.cpu().numpy().tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size_bytes", [1, 4096, (8 << 20) + 5, 20 << 20])
def test_a_filled_buffer_and_its_digest_hold_the_bytes_of_the_file(tmp_path: Path, device: str, size_bytes: int):
    descriptor, data = a_file(tmp_path, size_bytes)
    digest = hashlib.sha256()
    assert filled(transfer_for(device), descriptor, size_bytes, digest) == data
    assert digest.digest() == hashlib.sha256(data).digest()
    os.close(descriptor)


@pytest.mark.parametrize("device", DEVICES)
def test_short_reads_are_continued(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch):
    descriptor, data = a_file(tmp_path, 10_000)
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: whole(fd, [views[0][:777]], offset))
    assert filled(transfer_for(device), descriptor, 10_000) == data
    os.close(descriptor)


@pytest.mark.parametrize("device", DEVICES)
def test_a_file_that_ends_early_is_an_error_and_the_next_fill_works(tmp_path: Path, device: str):
    descriptor, data = a_file(tmp_path, 10_000)
    transfer = transfer_for(device)
    with pytest.raises(EOFError, match="ends 5 bytes early"):
        filled(transfer, descriptor, 10_005)
    assert filled(transfer, descriptor, 10_000) == data
    os.close(descriptor)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", ["resnet18", "yolov8n", "yolo26n"])
def test_every_device_answers_as_the_cpu(tmp_path: Path, device: str, architecture: str):
    spec = an_expert_file(tmp_path, "e", architecture, 3, input_size=96, max_detections=5)
    prepared = [fit(a_picture(seed=seed), spec.task, 96) for seed in range(3)]
    answers = []
    for name in ("cpu", device):
        pool = SlotPool(name, spec.weights_bytes)
        for _ in range(2):
            pool.load(spec)
            answers.append(infer(pool.slot(spec.expert), prepared))
            pool.unload(spec.expert)
        pool.check()
    for again in answers[1:]:
        for one, other in zip(answers[0], again, strict=True):
            assert other.confidence == pytest.approx(one.confidence, abs=1e-3)
            assert other.label == one.label


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="expected cpu or cuda:N"):
        transfer_for("tpu")
