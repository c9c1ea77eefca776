"""Batches on an executor's thread over a real slot: a fault costs an image or a batch, never the thread."""

import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from daemon.cluster.messages import SentImage
from daemon.dispatch.pool import Batch, DevicePool, Fault
from daemon.policy.request import ExecutorId, PoolId
from daemon.records import JournalKey, Pixels
from daemon.storage.journal import Journal
from experts.spec import Answer, Detection, ExpertSpec
from experts.vision.infer import infer_each
from experts.vision.preprocess import Prepared
from experts.vision.slot import Slot, SlotPool
from tests.experts.pictures import a_picture, encoded
from tests.experts.samples import an_expert_file

pytestmark = pytest.mark.not_fast("computes with torch")

CPU = ExecutorId("cpu/0")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ExpertSpec:
    return an_expert_file(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def pool(spec: ExpertSpec) -> SlotPool:
    pool = SlotPool("cpu", spec.weights_bytes)
    pool.load(spec)
    return pool


def reader_of(*payloads: bytes) -> Callable[[JournalKey], bytes]:
    """Return a function that reads images by number, as a journal does; without payloads four pictures."""
    images = payloads or tuple(encoded(a_picture(seed=seed)) for seed in range(4))
    return lambda key: images[key.offset]


def a_batch(spec: ExpertSpec, *keys: JournalKey | int) -> Batch:
    images = [SentImage(key if isinstance(key, JournalKey) else JournalKey(1, key, 1), Pixels()) for key in keys]
    return Batch(1, CPU, spec, images, [None] * len(images))


Run = Callable[[Batch], Batch]


@pytest.fixture
def start(pool: SlotPool) -> Iterator[Callable[..., Run]]:
    """Start executor threads: `start(infer, read)` returns what runs a batch; each is stopped at the end."""
    started: list[DevicePool] = []

    def start(
        infer: Callable[[Slot, Sequence[Prepared], Sequence[ExpertSpec]], Sequence[Answer]],
        read: Callable[[JournalKey], bytes] | None = None,
    ) -> Run:
        device = DevicePool(PoolId("cpu"), [CPU], pool, infer, read or reader_of())
        device.start()
        started.append(device)

        def run(batch: Batch) -> Batch:
            ended: queue.SimpleQueue[Batch] = queue.SimpleQueue()
            device.run(batch, ended.put)
            return ended.get(timeout=60.0)

        return run

    yield start
    assert all(device.stop(60.0) for device in started)


def faults(batch: Batch) -> list[str | None]:
    return [answer.kind if isinstance(answer, Fault) else None for answer in batch.answers]


def test_answers_are_those_of_the_network_alone(spec: ExpertSpec, start: Callable[..., Run]):
    pictures = [a_picture(width=80 + seed, seed=seed) for seed in range(3)]
    run = start(infer_each, reader_of(*(encoded(picture) for picture in pictures)))
    together = run(a_batch(spec, 0, 1, 2))
    assert together.sizes == [(picture.shape[1], picture.shape[0]) for picture in pictures]
    for number, answer in enumerate(together.answers):
        (alone,) = run(a_batch(spec, number)).answers
        assert isinstance(alone, Answer)
        assert isinstance(answer, Answer)
        assert answer.label == alone.label
        assert answer.confidence == pytest.approx(alone.confidence, abs=1e-3)


@pytest.mark.promise("Containment", "An image that poisons its batch costs only itself")
def test_an_image_that_poisons_its_batch_costs_only_itself(spec: ExpertSpec, start: Callable[..., Run]):
    poison = encoded(a_picture(width=33, height=33))

    def infer(_slot: Slot, prepared: Sequence[Prepared], _experts: Sequence[ExpertSpec]) -> list[Answer]:
        if any(image.width == 33 for image in prepared):
            raise RuntimeError("the network chokes")
        return [Answer("ok", 0.9) for _ in prepared]

    good, bad = encoded(a_picture()), b"\x89PNG this is not an image"
    batch = start(infer, reader_of(good, good, poison, bad, good))(a_batch(spec, *range(5)))
    assert faults(batch) == [None, None, "expert_failed", "bad_image", None]
    assert batch.memory_limit is None


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_out_of_memory_halves_the_batch_and_says_what_fitted(
    error: Exception, spec: ExpertSpec, start: Callable[..., Run]
):
    sizes: list[int] = []

    def infer(_slot: Slot, prepared: Sequence[Prepared], _experts: Sequence[ExpertSpec]) -> list[Answer]:
        sizes.append(len(prepared))
        if len(prepared) > 1:
            raise error
        return [Answer("ok", 0.9) for _ in prepared]

    batch = start(infer)(a_batch(spec, 0, 1, 2, 3))
    assert faults(batch) == [None] * 4
    assert sizes == [4, 2, 1, 1, 2, 1, 1]
    assert batch.memory_limit == 1


@pytest.mark.parametrize(
    ("error", "is_of_the_device"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA driver error: device not ready"), True),
        (RuntimeError("the network chokes"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
    ],
)
def test_an_error_of_the_device_ends_the_batch_at_once_and_is_reported(
    error: Exception, is_of_the_device: bool, spec: ExpertSpec, start: Callable[..., Run]
):
    sizes: list[int] = []

    def infer(_slot: Slot, prepared: Sequence[Prepared], _experts: Sequence[ExpertSpec]) -> list[Answer]:
        sizes.append(len(prepared))
        raise error

    batch = start(infer)(a_batch(spec, 0, 1, 2, 3))
    assert faults(batch) == ["expert_failed"] * 4
    assert (batch.device_error is not None) == is_of_the_device
    assert (sizes == [4]) == is_of_the_device


@pytest.mark.parametrize(
    "answer",
    [Answer("ok", float("nan")), Answer("ok", 0.9, (Detection("ok", 0.9, (0.0, float("inf"), 1.0, 1.0)),))],
)
def test_an_answer_that_is_not_a_number_is_no_answer(answer: Answer, spec: ExpertSpec, start: Callable[..., Run]):
    run = start(lambda _slot, prepared, _experts: [answer for _ in prepared])
    assert faults(run(a_batch(spec, 0))) == ["expert_failed"]


def test_bytes_that_the_disk_refuses_now_are_no_fault_of_the_image(
    spec: ExpertSpec, start: Callable[..., Run], tmp_path: Path
):
    journal = Journal(tmp_path / "journal")
    (key,) = journal.append([encoded(a_picture())])
    journal.close()
    (tmp_path / "journal").rename(tmp_path / "elsewhere")
    run = start(infer_each, journal.read)
    assert faults(run(a_batch(spec, key))) == ["unreadable"]
    (tmp_path / "elsewhere").rename(tmp_path / "journal")
    assert faults(run(a_batch(spec, key))) == [None]
    journal.close()
