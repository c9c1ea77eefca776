"""When a batch is recorded, who replays it, and what happens where that fails; CUDA itself where there is a GPU."""

import gc
import threading
import weakref
from pathlib import Path

import pytest
import structlog
import torch
from torch import nn

from experts.spec import Answer
from experts.vision.graphs import (
    WARM_UPS,
    CudaRecorder,
    GraphedNetwork,
    GraphStream,
    Recorders,
    Recordings,
)
from experts.vision.infer import infer
from experts.vision.preprocess import prepare
from experts.vision.slot import LayoutShelf, SlotPool
from tests.experts.pictures import encoded
from tests.experts.recorder import FakeRecorder
from tests.experts.samples import PICTURES, an_expert_file


def a_slot(recorder: FakeRecorder, weights: torch.Tensor | None = None) -> GraphedNetwork:
    network = nn.Linear(3, 2, bias=False)
    network.weight = nn.Parameter(torch.ones(2, 3) if weights is None else weights, requires_grad=False)
    return GraphedNetwork(network, Recordings(recorder))


def run(slot: GraphedNetwork, images: int = 1, times: int = 1) -> torch.Tensor:
    output = torch.empty(0)
    for _ in range(times):
        output = slot(torch.ones(images, 3))
    return output


def test_a_batch_size_is_recorded_once_after_its_warm_ups_and_replayed_from_then_on():
    recorder = FakeRecorder()
    slot = a_slot(recorder)
    run(slot, times=WARM_UPS)
    assert recorder.recorded == []
    run(slot, times=4)
    assert (recorder.recorded, recorder.replayed) == ([("executor 0", 1)], 4)


def test_another_expert_in_the_slot_answers_through_the_same_recording():
    weights, recorder = torch.ones(2, 3), FakeRecorder()
    slot = a_slot(recorder, weights)
    assert run(slot, times=WARM_UPS + 1).tolist() == [[3.0, 3.0]]
    weights.fill_(2.0)
    assert run(slot).tolist() == [[6.0, 6.0]]
    assert len(recorder.recorded) == 1


def test_each_thread_has_a_lane_for_each_stream_that_goes_with_it():
    recorder, lanes = CudaRecorder(torch.device("cuda:0")), dict[str, weakref.ref[GraphStream]]()
    mine = recorder.lane_of(7)
    assert recorder.lane_of(7) is mine

    def work() -> None:
        for name, stream in (("same stream", 7), ("another stream", 8)):
            lanes[name] = weakref.ref(recorder.lane_of(stream))
        assert lanes["same stream"]() not in (mine, lanes["another stream"]())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    gc.collect()
    assert len(lanes) == 2
    assert [lane() for lane in lanes.values()] == [None, None]
    assert recorder.lane_of(7) is mine


def test_recordings_of_an_executor_stay_within_their_bytes_and_other_batches_run_as_they_are():
    recorder = FakeRecorder()
    slots = [GraphedNetwork(nn.Identity(), Recordings(recorder, limit_bytes=15)) for _ in range(3)]
    for slot in slots:
        assert run(slot, 2, WARM_UPS + 2).tolist() == [[1.0] * 3] * 2
    assert len(recorder.recorded) == 2
    recorder.this_lane = "executor 1"
    run(slots[2], 2, WARM_UPS + 1)
    assert len(recorder.recorded) == 3, "each executor has bytes of its own"


def test_where_recording_fails_every_slot_of_the_layout_runs_without_and_one_line_says_so():
    recordings = Recordings(FakeRecorder(works=False))
    slots = [GraphedNetwork(nn.Identity(), recordings) for _ in range(3)]
    with structlog.testing.capture_logs() as lines:
        for slot in slots:
            assert run(slot, 2, WARM_UPS + 3).tolist() == [[1.0] * 3] * 2
    assert [(line["event"], line["batch"]) for line in lines] == [("graph_not_recorded", 2)]


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def assert_same(output: list[Answer], expected: list[Answer]) -> None:
    """Nearly: a GPU multiplies with fewer bits, so that boxes that are as good as each other may change places."""
    assert [answer.confidence for answer in output] == pytest.approx(
        [answer.confidence for answer in expected], abs=2e-3
    )
    for answer, wanted in zip(output, expected, strict=True):
        assert bool(answer.detections) == bool(wanted.detections)
        if not answer.detections:
            assert answer.label == wanted.label
            continue
        best = answer.detections[0]
        assert any(
            box.label == best.label
            and box.confidence == pytest.approx(best.confidence, abs=2e-3)
            and box.box == pytest.approx(best.box, abs=2.0)
            for box in wanted.detections
        )


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("architecture", ["resnet18", "yolo11n", "yolo26n"])
def test_on_a_gpu_replays_answer_as_the_cpu_does_for_each_expert_of_the_slot(tmp_path: Path, architecture: str):
    first, second = (an_expert_file(tmp_path, f"e{seed}", architecture, seed=seed) for seed in (1, 2))
    pool = SlotPool("cuda:0", first.weights_bytes)
    ready = [prepare(encoded(picture), "image", None, first) for picture in PICTURES]
    expected = {}
    for spec in (first, second):
        host = SlotPool("cpu", spec.weights_bytes)
        host.load(spec)
        expected[spec.expert] = infer(host.slot(spec.expert), ready)
    with pytest.raises(AssertionError):
        assert_same(expected[first.expert], expected[second.expert])
    evict: tuple[str, ...] = ()
    for spec in (first, second, first):
        pool.load(spec, evict)
        evict = (spec.expert,)
        for _ in range(WARM_UPS + 2):
            assert_same(infer(pool.slot(spec.expert), ready), expected[spec.expert])
    module = pool.slot(first.expert).module
    assert isinstance(module, GraphedNetwork)
    assert len(module._replays) == 1


@pytest.mark.gpu
@gpu
def test_on_a_gpu_a_slot_that_was_given_other_memory_answers_from_there(tmp_path: Path):
    specs = [
        an_expert_file(tmp_path, "small", "yolo11n", 2),
        an_expert_file(tmp_path, "large"),
        an_expert_file(tmp_path, "other", "yolo11n", 2, seed=2),
    ]
    ready = {spec.expert: [prepare(encoded(picture), "image", None, spec) for picture in PICTURES] for spec in specs}
    expected = {}
    for spec in specs:
        host = SlotPool("cpu", spec.weights_bytes)
        host.load(spec)
        expected[spec.expert] = infer(host.slot(spec.expert), ready[spec.expert])
    pool = SlotPool("cuda:0", max(spec.weights_bytes for spec in specs))
    evict: tuple[str, ...] = ()
    in_the_way: list[torch.Tensor] = []
    for spec in specs * 3:
        pool.load(spec, evict)
        evict = (spec.expert,)
        for _ in range(WARM_UPS + 2):
            assert_same(infer(pool.slot(spec.expert), ready[spec.expert]), expected[spec.expert])
        # Takes what the next vacated slot leaves behind, so that the slot comes back elsewhere.
        in_the_way.append(torch.full((spec.weights_bytes,), 255, dtype=torch.uint8, device="cuda:0"))
    pool.check()


@pytest.mark.gpu
@gpu
def test_on_a_gpu_the_bytes_of_recordings_are_counted_and_end_with_them(tmp_path: Path):
    spec = an_expert_file(tmp_path)
    device = torch.device("cuda:0")
    shelf = LayoutShelf(recorders=Recorders(limits={device: 1}))
    pool = SlotPool("cuda:0", spec.weights_bytes, shelf)
    pool.load(spec)
    slot = pool.slot(spec.expert)
    assert isinstance(slot.module, GraphedNetwork)
    ready = [prepare(encoded(picture), "image", None, spec) for picture in PICTURES]
    for count in (1, 2):
        for _ in range(WARM_UPS + 1):
            infer(slot, ready[:count])
    assert len(slot.module._replays) == 1, "one byte is used up by the first recording"
    (lane,) = (lane for lane, _ in slot.module._replays)
    assert lane.pool_bytes > 0
    assert len(lane.graph_bytes) == 1
    slot.module.forget()
    gc.collect()
    assert len(lane.graph_bytes) == 0
