"""`coserve bench compute` on real networks: its speeds are for benchmarks, its answers are tested."""

from pathlib import Path

import pytest

from tests.bench.compute import compare_network
from tests.lines import a_jpeg
from tools.profile.samples import Samples

pytestmark = pytest.mark.test_all


@pytest.mark.test_all
@pytest.mark.parametrize("network", ["resnet18", "yolov8n"])
def test_slots_and_plain_torch_give_the_same_answers(tmp_path: Path, network: str):
    samples = Samples(tuple(a_jpeg(seed) for seed in range(3)), "pictures")
    sides = compare_network(network, [1, 2], ["float32", "bfloat16"], 1, samples, tmp_path)
    assert [(side.batch, side.part, side.side) for side in sides] == [
        (batch, part, side)
        for batch in (1, 2)
        for part in ("answers", "network")
        for side in ("plain", "float32", "bfloat16")
    ]
    plain_ms = {(side.batch, side.part): side.batch_ms for side in sides if side.side == "plain"}
    for side in sides:
        assert side.ratio == pytest.approx(plain_ms[side.batch, side.part] / side.batch_ms)
        if side.side == "float32":
            assert side.same_labels == 1.0
            assert side.confidence < 1e-3
            assert side.box_pixels < 0.5
