"""`coserve bench compute` on real networks: its speeds are for benchmarks, its answers are tested."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from experts.spec import Answer, Detection
from tests.bench.compute import compare_network, has_bfloat16, register, share_of_same_labels
from tests.bench.live.libraries import requirement
from tests.bench.openvino_networks import PACKAGES
from tests.lines import a_jpeg
from tools.profile.executors import cores
from tools.profile.samples import Samples

pytestmark = pytest.mark.test_all


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


def run(*words: str):
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return CliRunner().invoke(app, ["compute", *words])


def test_the_command_prints_figures_for_programs():
    result = run("--networks", "resnet18", "--batches", "1", "--dtypes", "float32", "--rounds", "1", "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    plain, slot = [side for side in figures["sides"] if side["part"] == "answers" and "OpenVINO" not in side["side"]]
    assert (plain["side"], slot["side"]) == ("plain", "float32")
    assert slot["ratio"] == pytest.approx(plain["batch_ms"] / slot["batch_ms"])
    assert {pair["executors"] * pair["threads"] for pair in figures["pairs"]["cpu"]} == {cores()}
    speeds = [pair["images_per_s"] for pair in figures["pairs"]["cpu"]]
    assert speeds == sorted(speeds, reverse=True)
    assert isinstance(figures["cpu"]["bfloat16"], bool)


def test_everything_that_openvinos_rows_need_has_a_version_to_install():
    assert [requirement(package).partition("==")[0] for package in PACKAGES] == list(PACKAGES)


def test_bfloat16_is_read_off_the_processors_flags():
    assert has_bfloat16(["model name: x", "flags\t: fpu avx512f avx512_bf16"])
    assert has_bfloat16(["flags : amx_bf16 amx_tile"])
    assert has_bfloat16(["Features\t: fp asimd bf16"])
    assert not has_bfloat16(["flags : fpu avx512f avx512bw"])
    assert not has_bfloat16([])


def test_answers_are_compared_by_their_labels():
    def boxes(*labels: str) -> Answer:
        return Answer(labels[0], 0.9, tuple(Detection(label, 0.9, (0, 0, 1, 1)) for label in labels))

    ok, bad = Answer("ok", 0.9), Answer("bad", 0.9)
    assert share_of_same_labels([ok, ok, bad, ok], [ok, bad, bad, ok]) == 0.75
    assert share_of_same_labels([boxes("a", "b")], [boxes("b", "a")]) == 1.0
    assert share_of_same_labels([boxes("a", "a")], [boxes("a")]) == 0.0
