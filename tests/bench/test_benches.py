"""Each benchmark, made small: real commands, and what they report."""

import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from daemon.policy.presets import PRESETS
from tests.bench.compute import compare_network
from tests.bench.paper import DEVICES, WORLDS, simulated
from tests.lines import a_jpeg
from tests.tools.run_commands import coserve
from tests.tools.simulate.test_simulate import a_device, a_task
from tools.profile.samples import Samples

pytestmark = pytest.mark.test_all

torch.set_num_threads(1)


def bench(*words: object) -> Any:
    """Return the figures that a benchmark prints with `--json`."""
    return json.loads(coserve("bench", *words, "--json").stdout)


@pytest.mark.parametrize(
    ("device", "task", "samba", "coserve"),
    [
        ("numa", "A1", 8.8, 30.3),
        ("uma", "A1", 8.5, 29.1),
        ("numa", "A1-board", 3.4, 19.1),
        ("uma", "A1-board", 6.1, 27.2),
    ],
)
def test_with_slots_for_all_the_papers_policies_are_as_fast_as_a_reader_found(
    device: str, task: str, samba: float, coserve: float
) -> None:
    rows = {policy: simulated(device, task, "slots", policy) for policy in ("samba", "coserve", "coserve-plus")}
    assert rows["samba"]["images_per_s"] == pytest.approx(samba, rel=0.01)
    assert rows["coserve"]["images_per_s"] == pytest.approx(coserve, rel=0.01)
    assert rows["coserve"]["images_per_s"] < rows["coserve-plus"]["images_per_s"]
    assert rows["coserve-plus"]["share_of_bound"] < 1


def test_the_command_has_every_policy_on_both_devices_in_both_worlds(tmp_path: Path) -> None:
    coserve("bench", "paper", "--tasks", "A1", "--json", tmp_path / "paper.json")
    rows = json.loads((tmp_path / "paper.json").read_text())["rows"]
    assert len(rows) == len(DEVICES) * len(WORLDS) * len(PRESETS)
    ordinary, slots = ({row["policy"]: row for row in rows if row["loading"] == loading} for loading in WORLDS)
    assert all(ordinary[policy]["images_per_s"] < slots[policy]["images_per_s"] for policy in PRESETS)


def test_each_policy_has_a_row_for_each_scenario_way_of_loading_and_load(tmp_path: Path) -> None:
    (tmp_path / "device-numa.json").write_text(json.dumps(a_device()))
    for name in ("A1", "A1-board"):
        (tmp_path / f"task-{name}.json.gz").write_bytes(gzip.compress(json.dumps(a_task()).encode()))
    policies = ["coserve-plus", "coserve-plus-without-making-room"]
    options = [text for policy in policies for text in ("--policy", policy)]
    out = tmp_path / "out.json"
    coserve("bench", "ablation", "--dir", tmp_path, "--machine", "numa", *options, "--json", out)
    rows = json.loads(out.read_text())
    assert len(rows) == 2 * 2 * len(policies) * 3
    assert {row["policy"] for row in rows} == set(policies)
    assert all(0 < row["share_of_bound"] <= row["share_of_attainable"] <= 1.0 for row in rows)


def test_every_way_to_load_is_measured_beside_the_slot(tmp_path: Path) -> None:
    report = bench(*("load", "--architecture", "resnet18", "--rounds", 1, "--dtype", "bfloat16", "--folder", tmp_path))
    figures = {entry["way"]: entry for entry in report["figures"]}
    assert figures["slot, from RAM tier"]["share_of_raw"] > 0
    for state in ("cold", "warm"):
        slot, thin = figures[f"slot, {state}"], figures[f"slot, {state}, int8"]
        assert min(slot["share_of_raw"], thin["share_of_raw"], thin["slot_is_faster"]) > 0
        assert thin["bytes"] < 0.51 * slot["bytes"] < 13e6
        assert f"slot, {state}, bfloat16" not in figures, "no thinner than what the slot computes with"
        for way in ("torch.load + construct", "safetensors, assigned"):
            assert figures[f"{way}, {state}"]["slot_is_faster"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("network", ["resnet18", "yolov8n"])
def test_slots_and_plain_torch_give_the_same_answers(tmp_path: Path, network: str) -> None:
    samples = Samples(tuple(a_jpeg(seed) for seed in range(3)), "pictures")
    sides = compare_network(network, [1, 2], ["float32", "bfloat16"], 1, samples, tmp_path)
    assert len(sides) == 2 * 2 * 3  # batches, parts, plain and both dtypes
    exact = [side for side in sides if side.side == "float32"]
    assert all((s.same_labels, s.confidence < 1e-3, s.box_pixels < 0.5) == (1.0, True, True) for s in exact)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Sockets lie in it, and the path of one has 107 bytes at the most."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_accepted_images_stand_beside_the_raw_disk_and_a_steady_rate_beside_inference(short_path: Path) -> None:
    report = bench(
        *("intake", "--kilobytes", 20, "--seconds", 0.5, "--rounds", 1, "--rate", 50, "--executors", 1),
        *("--no-delayed", "--folder", short_path),
    )
    (flood,) = report["floods"]
    assert flood["share"] == pytest.approx(flood["accepted_per_s"] / flood["raw_per_s"], abs=0.001)
    idle, saturated = report["steady"]
    assert (idle["beside"], saturated["beside"]) == ("idle", "saturated")
    assert idle["p99_ms"] >= idle["p50_ms"] > 0
    assert saturated["inference_kept"] > 0
    assert not list(short_path.iterdir())


def test_the_processor_time_of_an_image_is_told_thread_by_thread() -> None:
    (cost,) = bench("image-cost", "--rate", 50, "--seconds", 1.5, "--rounds", 1)["costs"]
    assert {"writer", "intake", "journal"} <= set(cost["threads_ms"])
    assert 0 < cost["threads_ms"]["writer"] < cost["total_ms"]
