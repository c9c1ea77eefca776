"""Each benchmark, made small: real commands, and what they report."""

import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from daemon.policy.presets import PRESETS
from tests.bench import image_cost, intake
from tests.bench.compute import compare_network
from tests.bench.paper import DEVICES, WORLDS, simulated
from tests.lines import a_jpeg
from tests.tools.simulate.test_simulate import a_device, a_task
from tools.cli.main import app
from tools.profile.samples import Samples

pytestmark = pytest.mark.test_all

torch.set_num_threads(1)


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
    out = tmp_path / "paper.json"
    done = CliRunner().invoke(app, ["bench", "paper", "--tasks", "A1", "--json", str(out)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    assert {(row["device"], row["loading"], row["policy"]) for row in rows} == {
        (device, loading, policy) for device in DEVICES for loading in WORLDS for policy in PRESETS
    }
    ordinary, slots = ({row["policy"]: row for row in rows if row["loading"] == loading} for loading in WORLDS)
    assert all(ordinary[policy]["images_per_s"] < slots[policy]["images_per_s"] for policy in PRESETS)
    assert "read ratios, not seconds" in done.stdout


def test_each_policy_has_a_row_for_each_scenario_way_of_loading_and_load(tmp_path: Path) -> None:
    (tmp_path / "device-numa.json").write_text(json.dumps(a_device()))
    for name in ("A1", "A1-board"):
        (tmp_path / f"task-{name}.json.gz").write_bytes(gzip.compress(json.dumps(a_task()).encode()))
    policies = ["coserve-plus", "coserve-plus-without-making-room"]
    options = [text for policy in policies for text in ("--policy", policy)]
    out = tmp_path / "out.json"
    done = CliRunner().invoke(
        app, ["bench", "ablation", "--dir", str(tmp_path), "--machine", "numa", *options, "--json", str(out)]
    )
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())
    assert len(rows) == 2 * 2 * len(policies) * 3
    assert {row["policy"] for row in rows} == set(policies)
    assert all(0 < row["share_of_bound"] <= row["share_of_attainable"] <= 1.0 for row in rows)


def run_load(*words: str):
    return CliRunner().invoke(app, ["bench", "load", *words])


def test_every_way_is_measured_and_slots_stand_beside_raw_and_ordinary(tmp_path: Path):
    result = run_load(
        "--architecture", "resnet18", "--rounds", "1", "--dtype", "bfloat16", "--folder", str(tmp_path), "--json"
    )
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["rounds"] == 1
    assert report["cold_reads"] in ("direct", "dropped", "cached")
    figures = {entry["way"]: entry for entry in report["figures"]}
    for slot in ("slot, cold", "slot, warm", "slot, from RAM tier"):
        assert figures[slot]["share_of_raw"] > 0
        assert figures[slot]["bytes"] < 25e6
    for state in ("cold", "warm"):
        assert figures[f"slot, {state}, int8"]["bytes"] < 0.51 * figures[f"slot, {state}"]["bytes"]
        assert figures[f"slot, {state}, int8"]["share_of_raw"] > 0
        assert figures[f"slot, {state}, int8"]["slot_is_faster"] > 0
        assert f"slot, {state}, bfloat16" not in figures, "no thinner than what the slot computes with"
        for way in (
            "torch.load + construct",
            "safetensors + construct",
            "safetensors, module kept",
            "safetensors, assigned",
        ):
            assert figures[f"{way}, {state}"]["slot_is_faster"] > 0
    assert all(entry["ms"] > 0 and entry["dtype"] == "bfloat16" for entry in report["figures"])
    assert list(tmp_path.iterdir()) == []


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


def run_intake(*words: str):
    app = typer.Typer()
    intake.register(app)
    app.callback()(lambda: None)
    return CliRunner().invoke(app, ["intake", *words])


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Sockets lie in it, and the path of one has 107 bytes at the most."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_accepted_images_stand_beside_the_raw_disk_and_a_steady_rate_beside_inference(short_path: Path):
    result = run_intake(
        *("--kilobytes", "20", "--seconds", "0.5", "--rounds", "1", "--rate", "50", "--executors", "1"),
        *("--no-delayed", "--folder", str(short_path), "--json"),
    )
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    (flood,) = report["floods"]
    assert flood["image_bytes"] == 20_000
    assert flood["accepted_per_s"] > 0
    assert flood["share"] == pytest.approx(flood["accepted_per_s"] / flood["raw_per_s"], abs=0.001)
    idle, saturated = report["steady"]
    assert (idle["beside"], saturated["beside"]) == ("idle", "saturated")
    assert idle["p99_ms"] >= idle["p50_ms"] > 0
    assert saturated["inference_kept"] > 0
    assert not list(short_path.iterdir())


def test_the_processor_time_of_an_image_is_told_thread_by_thread():
    app = typer.Typer()
    image_cost.register(app)
    app.callback()(lambda: None)
    result = CliRunner().invoke(
        app, ["image-cost", "--rates", "50", "--seconds", "1.5", "--rounds", "1", "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.stderr
    (cost,) = json.loads(result.stdout)["costs"]
    assert {"writer", "intake", "journal"} <= set(cost["threads_ms"])
    assert 0 < cost["threads_ms"]["writer"] < cost["total_ms"]
