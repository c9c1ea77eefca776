"""When a batch is recorded, who replays it, and what happens where that fails; CUDA itself where there is a GPU."""

from collections.abc import Hashable
from pathlib import Path

import pytest
import structlog
import torch
from torch import nn

from experts.slot import SlotPool
from experts.vision.graphs import MOST_GRAPHS, WARM_UPS, GraphedNetwork, Network, Recordings
from experts.vision.infer import infer
from experts.vision.layouts import build_layout
from experts.vision.preprocess import prepare
from tests.experts.samples import PICTURES, an_expert_file, encoded


class FakeRecorder:
    """Records as CUDA does: into an input of its own, through weights where they are; counts what it does."""

    def __init__(self, *, works: bool = True) -> None:
        self.this_lane: Hashable = "executor 0"
        self.recorded: list[tuple[Hashable, int]] = []
        self.replayed = 0
        self._works = works

    def lane(self) -> Hashable:
        return self.this_lane

    def record(self, network: Network, images: torch.Tensor) -> Network:
        if not self._works:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded.append((self.this_lane, len(images)))
        entry = torch.empty_like(images)

        def replay(batch: torch.Tensor) -> torch.Tensor:
            self.replayed += 1
            entry.copy_(batch)
            return network(entry).clone()

        return replay


def a_slot(recorder: FakeRecorder, weights: torch.Tensor | None = None) -> GraphedNetwork:
    network = nn.Linear(3, 2, bias=False)
    network.weight = nn.Parameter(torch.ones(2, 3) if weights is None else weights, requires_grad=False)
    return GraphedNetwork(network, Recordings(recorder))


def run(slot: GraphedNetwork, images: int = 1, times: int = 1) -> torch.Tensor:
    found = torch.empty(0)
    for _ in range(times):
        found = slot(torch.ones(images, 3))
    return found


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


def test_each_batch_size_and_each_executor_has_a_recording_of_its_own():
    recorder = FakeRecorder()
    slot = a_slot(recorder)
    for recorder.this_lane in ("executor 0", "executor 1"):
        for images in (1, 4):
            run(slot, images, WARM_UPS + 1)
    lanes = ("executor 0", "executor 1")
    assert recorder.recorded == [(lane, images) for lane in lanes for images in (1, 4)]


def test_a_slot_keeps_so_many_recordings_and_runs_other_batches_as_they_are():
    recorder = FakeRecorder()
    slot = a_slot(recorder)
    for images in range(1, MOST_GRAPHS + 4):
        assert len(run(slot, images, WARM_UPS + 2)) == images
    assert len(recorder.recorded) == MOST_GRAPHS


def test_where_recording_fails_every_slot_of_the_layout_runs_without_and_one_line_says_so():
    recordings = Recordings(FakeRecorder(works=False))
    slots = [GraphedNetwork(nn.Identity(), recordings) for _ in range(3)]
    with structlog.testing.capture_logs() as lines:
        for slot in slots:
            assert run(slot, 2, WARM_UPS + 3).tolist() == [[1.0] * 3] * 2
    assert [(line["event"], line["batch"]) for line in lines] == [("graph_not_recorded", 2)]


def test_a_processor_without_graphs_gets_the_network_itself(tmp_path: Path):
    spec = an_expert_file(tmp_path)
    layout = build_layout(spec.layout)
    module = layout.bind(torch.zeros(layout.region_bytes, dtype=torch.uint8))
    assert type(module) is type(layout.shell)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("architecture", ["resnet18", "yolo11n", "yolo26n"])
def test_on_a_gpu_replays_answer_as_the_cpu_does_for_each_expert_of_the_slot(tmp_path: Path, architecture: str):
    first, second = (an_expert_file(tmp_path, f"e{seed}", architecture, seed=seed) for seed in (1, 2))
    pool = SlotPool("cuda:0", first.weights_bytes)
    ready = [prepare(encoded(picture), "image", None, first) for picture in PICTURES]
    evict: tuple[str, ...] = ()
    for spec in (first, second, first):
        pool.load(spec, evict)
        evict = (spec.expert,)
        host = SlotPool("cpu", spec.weights_bytes)
        host.load(spec)
        expected = infer(host.slot(spec.expert), ready)
        for _ in range(WARM_UPS + 2):
            found = infer(pool.slot(spec.expert), ready)
            assert [answer.confidence for answer in found] == pytest.approx(
                [answer.confidence for answer in expected], abs=2e-3
            )
    module = pool.slot(first.expert).module
    assert isinstance(module, GraphedNetwork)
    assert len(module._replays) == 1
