"""`coserve bench compute` on real networks: its speeds are for benchmarks, its answers are tested."""

from pathlib import Path

import pytest

from tests.bench.compute import compare_network, has_bfloat16
from tests.lines import a_jpeg
from tools.profile.samples import Samples

pytestmark = pytest.mark.test_all


@pytest.mark.test_all
@pytest.mark.parametrize("network", ["resnet18", "yolov8n"])
def test_slots_and_plain_torch_give_the_same_answers(tmp_path: Path, network: str):
    samples = Samples(tuple(a_jpeg(seed) for seed in range(3)), "pictures")
    sides = compare_network(network, [1, 2], ["float32", "bfloat16"], 1, samples, tmp_path)
    assert [(side.batch, side.part, side.side) for side in sides if "OpenVINO" not in side.side] == [
        (batch, part, side)
        for batch in (1, 2)
        for part in ("answers", "network")
        for side in ("plain", "float32", "bfloat16")
    ]
    plain_ms = {(side.batch, side.part): side.batch_ms for side in sides if side.side == "plain"}
    for side in sides:
        assert side.ratio == pytest.approx(plain_ms[side.batch, side.part] / side.batch_ms)
        assert (side.of_openvino is None) == (f"OpenVINO {side.side}" not in {each.side for each in sides})
        if side.side == "float32":
            assert side.same_labels == 1.0
            assert side.confidence < 1e-3
            assert side.box_pixels < 0.5


def test_bfloat16_is_read_off_the_processors_flags():
    assert has_bfloat16(["model name: x", "flags\t: fpu avx512f avx512_bf16"])
    assert has_bfloat16(["flags : amx_bf16 amx_tile"])
    assert has_bfloat16(["Features\t: fp asimd bf16"])
    assert not has_bfloat16(["flags : fpu avx512f avx512bw"])
    assert not has_bfloat16([])
