"""The contract of an executor, held by the thread over a real slot and by the simulated one."""

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from daemon.dispatch.executors import ExecutorThread
from daemon.dispatch.orders import Answered, BatchOrder, BatchReport, Executor, ImageOrder, Unanswered
from daemon.dispatch.simulated import SimulatedClock, SimulatedExecutor, SimulatedPool
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolId, RequestId
from daemon.records import JournalKey, Pixels
from daemon.storage.journal import Journal
from experts.spec import Answer, Detection, ExpertSpec
from experts.vision.infer import infer_each
from experts.vision.preprocess import Prepared
from experts.vision.slot import Slot, SlotPool
from tests.experts.pictures import a_picture, encoded
from tests.experts.samples import an_expert_file

pytestmark = pytest.mark.not_fast("computes with torch")

FACTS = ExecutorFacts(ExecutorId("cpu/0"), PoolId("cpu"))
BAD = b"\x89PNG this is not an image"


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


@dataclass
class Bench:
    executor: Executor
    reports: "queue.SimpleQueue[BatchReport]"
    clock: SimulatedClock | None = None

    def run(self, order: BatchOrder) -> BatchReport:
        self.executor.submit(order)
        while self.clock is not None and self.clock.step():
            pass
        return self.reports.get(timeout=60.0)


def an_order(spec: ExpertSpec, *numbers: int, batch_id: int = 1) -> BatchOrder:
    images = tuple(ImageOrder(RequestId(number), JournalKey(1, number, 1), Pixels()) for number in numbers)
    return BatchOrder(batch_id, spec, images)


@pytest.fixture(params=["real", "fake"])
def bench(request: pytest.FixtureRequest, spec: ExpertSpec, pool: SlotPool) -> Iterator[Bench]:
    """Image 1 cannot be decoded; the others can."""
    reports: queue.SimpleQueue[BatchReport] = queue.SimpleQueue()
    if request.param == "real":
        good = encoded(a_picture())
        bench = Bench(ExecutorThread(FACTS, pool.slot, reader_of(good, BAD, good, good), infer_each), reports)
    else:
        clock, fake = SimulatedClock(), SimulatedPool(spec.weights_bytes)
        fake.load(spec)

        def answer(_spec: ExpertSpec, image: ImageOrder) -> Answer | Unanswered:
            return Unanswered("bad_image", "not an image") if image.request_id == 1 else Answer("label1", 0.9)

        bench = Bench(SimulatedExecutor(FACTS, fake, clock, answer), reports, clock)
    bench.executor.start(reports.put)
    yield bench
    assert bench.executor.stop(60.0)


Forward = Callable[[Slot, Sequence[Prepared]], Sequence[Answer]]


@pytest.fixture
def start(pool: SlotPool) -> Iterator[Callable[..., Bench]]:
    """Start executor threads: `start(run, read)`; each is stopped at the end."""
    started: list[Bench] = []

    def start(run: Forward, read: Callable[[JournalKey], bytes] | None = None) -> Bench:
        started.append(Bench(ExecutorThread(FACTS, pool.slot, read or reader_of(), run), queue.SimpleQueue()))
        started[-1].executor.start(started[-1].reports.put)
        return started[-1]

    yield start
    assert all(bench.executor.stop(60.0) for bench in started)


def test_answers_are_those_of_the_network_alone(spec: ExpertSpec, start: Callable[..., Bench]):
    pictures = [a_picture(width=80 + seed, seed=seed) for seed in range(3)]
    bench = start(infer_each, reader_of(*(encoded(picture) for picture in pictures)))
    together = bench.run(an_order(spec, 0, 1, 2)).results
    for number, picture in enumerate(pictures):
        (alone,) = bench.run(an_order(spec, number)).results
        result = together[number]
        assert isinstance(alone, Answered)
        assert isinstance(result, Answered)
        assert result.image_size == (picture.shape[1], picture.shape[0])
        assert result.answer.label == alone.answer.label
        assert result.answer.confidence == pytest.approx(alone.answer.confidence, abs=1e-3)


@pytest.mark.promise("Containment", "An image that poisons its batch costs only itself")
def test_an_image_that_poisons_its_batch_costs_only_itself(spec: ExpertSpec, start: Callable[..., Bench]):
    poison = encoded(a_picture(width=33, height=33))

    def run(_slot: Slot, prepared: Sequence[Prepared], _experts: Sequence[ExpertSpec]) -> list[Answer]:
        if any(image.placement.width == 33 for image in prepared):
            raise RuntimeError("the network chokes")
        return [Answer("ok", 0.9) for _ in prepared]

    good = encoded(a_picture())
    bench = start(run, reader_of(good, good, poison, good))
    report = bench.run(an_order(spec, 0, 1, 2, 3))
    faults = [result.fault if isinstance(result, Unanswered) else None for result in report.results]
    assert faults == [None, None, "expert_failed", None]
    assert report.memory_limit is None


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_out_of_memory_halves_the_batch_and_says_what_fitted(
    error: Exception, spec: ExpertSpec, start: Callable[..., Bench]
):
    sizes: list[int] = []

    def run(_slot: Slot, prepared: Sequence[Prepared], _experts: Sequence[ExpertSpec]) -> list[Answer]:
        sizes.append(len(prepared))
        if len(prepared) > 1:
            raise error
        return [Answer("ok", 0.9) for _ in prepared]

    bench = start(run)
    report = bench.run(an_order(spec, 0, 1, 2, 3))
    assert all(isinstance(result, Answered) for result in report.results)
    assert sizes == [4, 2, 1, 1, 2, 1, 1]
    assert report.memory_limit == 1


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
    error: Exception, is_of_the_device: bool, spec: ExpertSpec, start: Callable[..., Bench]
):
    sizes: list[int] = []

    def run(_slot: Slot, prepared: Sequence[Prepared], _experts: Sequence[ExpertSpec]) -> list[Answer]:
        sizes.append(len(prepared))
        raise error

    bench = start(run)
    report = bench.run(an_order(spec, 0, 1, 2, 3))
    assert [result.fault for result in report.results if isinstance(result, Unanswered)] == ["expert_failed"] * 4
    assert (report.device_error is not None) == is_of_the_device
    assert (sizes == [4]) == is_of_the_device


@pytest.mark.parametrize(
    "answer",
    [Answer("ok", float("nan")), Answer("ok", 0.9, (Detection("ok", 0.9, (0.0, float("inf"), 1.0, 1.0)),))],
)
def test_an_answer_that_is_not_a_number_is_no_answer(answer: Answer, spec: ExpertSpec, start: Callable[..., Bench]):
    bench = start(lambda _slot, prepared, _experts: [answer for _ in prepared])
    (result,) = bench.run(an_order(spec, 0)).results
    assert isinstance(result, Unanswered)
    assert result.fault == "expert_failed"


def test_bytes_that_the_disk_refuses_now_are_no_fault_of_the_image(
    spec: ExpertSpec, start: Callable[..., Bench], tmp_path: Path
):
    journal = Journal(tmp_path / "journal")
    (key,) = journal.append([encoded(a_picture())])
    journal.close()
    (tmp_path / "journal").rename(tmp_path / "elsewhere")
    bench = start(infer_each, journal.read)
    order = BatchOrder(1, spec, (ImageOrder(RequestId(1), key, Pixels()),))
    (result,) = bench.run(order).results
    assert isinstance(result, Unanswered)
    assert result.fault == "unreadable"
    (tmp_path / "elsewhere").rename(tmp_path / "journal")
    (result,) = bench.run(order).results
    assert isinstance(result, Answered)
    journal.close()
