"""A real line profiled in seconds: what is written is what the daemon reads, and costs are by layout."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from daemon.line.line import load_line
from daemon.line.profile import load_profile, this_machine
from experts.vision.graphs import WARM_UPS, Recorders
from experts.vision.slot import LayoutShelf
from tests.experts.recorder import FakeRecorder
from tests.lines import a_jpeg, a_line
from tests.ports import free_port
from tools.cli.main import app
from tools.profile import measure
from tools.profile.measure import Bench, ProfileEffort, try_pairs
from tools.profile.run import ProfileError
from tools.profile.samples import Samples
from tools.profile.split import best_count
from tools.simulate.fit import fit_line

HASTY = ProfileEffort(max_batch=2, rounds=1, loads=1, pair_rounds=1, seconds=0.01)
SAMPLES = Samples((a_jpeg(1), a_jpeg(2)), "two pictures")


@pytest.fixture
def experts(torch_experts_folder: Path) -> Path:
    return torch_experts_folder


def command(*arguments: str):
    return CliRunner().invoke(app, ["profile", *arguments])


def test_the_command_writes_a_profile_that_the_daemon_reads(tmp_path: Path, experts: Path):
    config, out = a_line(tmp_path / "line", experts), tmp_path / "made" / "profile.yaml"
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "part.jpg").write_bytes(a_jpeg(3))
    (photos / "notes.txt").write_text("no image")
    done = command(str(config), "--quick", "--max-batch", "2", "--images", str(photos), "--out", str(out), "--json")
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert figures["measured_with"] == f"1 images of {photos}"
    assert figures["files"] == [str(out)]
    profile = load_profile(out)
    assert profile.machine_problems(this_machine()) == []
    catalog = load_line(config).catalog
    assert {row.architecture for row in profile.rows} == {spec.layout for spec in catalog.values()}
    for row in profile.rows:
        entry = figures["devices"]["cpu"]["architectures"][row.architecture]
        fitted = fit_line((int(size), seconds) for size, seconds in entry["latencies_s"].items())
        assert (row.k_s, row.b_s) == (pytest.approx(fitted.k_s, rel=1e-5), pytest.approx(fitted.b_s, rel=1e-5))
        assert (row.disk_s, row.ram_s) == (entry["disk_s"], None)
        assert 1 <= row.max_batch <= 2
        assert row.activation_bytes > 64 * 64 * 3 * 4
    recommended = profile.file.devices["cpu"]
    assert recommended.expert_memory is not None
    assert recommended.expert_memory + (recommended.activation_memory or 0) == 150_000_000
    search = figures["devices"]["cpu"]["search"]
    assert search["limited"] <= search["experts"] <= search["most"] <= len(catalog)
    assert search["images_per_s"][str(search["experts"])] == max(search["images_per_s"].values())


def test_a_device_of_another_pc_that_is_out_of_reach_is_named_and_the_rest_is_measured(tmp_path: Path, experts: Path):
    pytest.importorskip("ray")
    address = f"127.0.0.1:{free_port()}"
    there = {"pc2-cpu": {"host": "pc2/cpu", "expert_memory": "150MB"}}
    here = {"cpu": {"expert_memory": "150MB", "executors": 1}}
    config = a_line(tmp_path / "line", experts, devices=here | there, cluster={"address": address})
    done = command(str(config), "--quick", "--max-batch", "1", "--json")
    assert done.exit_code == 0, done.output
    assert [*json.loads(done.stdout)["skipped"]] == ["pc2-cpu"]
    said = f"pc2-cpu was not measured: no cluster answers at {address} (Connection refused): start its head"
    assert said in " ".join(done.stderr.split())
    assert [*load_profile(config.parent / "profile.yaml").file.devices] == ["cpu"]
    config = a_line(tmp_path / "none_here", experts, devices=there, cluster={"address": address})
    done = command(str(config), "--quick", "--max-batch", "1")
    assert done.exit_code == 1
    assert f"pc2-cpu: no cluster answers at {address}" in done.stderr
    assert not (config.parent / "profile.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["none.yaml"], 2, "none.yaml: cannot read the file"),
        (["{line}", "--images", "nowhere"], 2, "no folder nowhere"),
        (["{gpu_line}", "--quick"], 2, "devices.cuda:7: torch sees"),
        (["{empty_line}", "--quick"], 1, "names no expert whose weights can be read"),
    ],
)
def test_what_cannot_be_profiled_is_a_sentence(
    tmp_path: Path, experts: Path, arguments: list[str], status: int, message: str
):
    lines = {name: a_line(tmp_path / name, experts) for name in ("line", "empty_line")}
    lines["gpu_line"] = a_line(tmp_path / "gpu_line", experts, devices={"cuda:7": {"expert_memory": "1GB"}})
    for file in (tmp_path / "empty_line/experts").glob("*.safetensors"):
        file.unlink()
    done = command(*(argument.format(**lines) for argument in arguments))
    assert done.exit_code == status
    assert message in done.stderr


def test_batches_are_timed_only_after_they_were_recorded(tmp_path: Path, experts: Path):
    spec = next(iter(load_line(a_line(tmp_path / "line", experts)).catalog.values()))
    recorder = FakeRecorder()
    with Bench("cpu", 1, 1, LayoutShelf(recorders=Recorders(lambda _device: recorder))) as bench:
        slots = bench.slots(spec)
        assert measure.warm_ups(slots[0]) == WARM_UPS + 1
        bench.latencies_s(slots, SAMPLES, (1, 2), rounds=2)
        assert ([images for _, images in recorder.recorded], recorder.replayed) == ([1, 2], 2 * (1 + 2))
    with Bench("cpu", 1, 1, LayoutShelf()) as bench:
        assert measure.warm_ups(bench.slots(spec)[0]) == 1


def test_a_device_without_memory_for_one_image_is_refused_with_what_to_do(
    tmp_path: Path, experts: Path, monkeypatch: pytest.MonkeyPatch
):
    line = load_line(a_line(tmp_path / "line", experts))
    spec, shelf = next(iter(line.catalog.values())), LayoutShelf()

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "infer", fail)
    monkeypatch.setattr(measure, "cores", lambda: 1)
    with (
        Bench("cpu", 1, 1, shelf) as bench,
        pytest.raises(ProfileError, match=r"cpu: has no memory for one image of .* smaller --input-size"),
    ):
        measure.measure_layout(bench, "cpu", spec, SAMPLES, HASTY, shelf)
    with pytest.raises(ProfileError, match="cpu: has no memory for 4 images"):
        try_pairs("cpu", spec, SAMPLES, HASTY, shelf)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 400), st.lists(st.floats(0, 1000), min_size=1, max_size=200))
def test_the_choice_is_never_worse_than_full_batches_first_or_than_all_experts(lowest: int, curve: list[float]):
    highest, asked = lowest + len(curve) - 1, list[int]()

    def measured(experts: int) -> float:
        asked.append(experts)
        return curve[experts - lowest]

    speeds = best_count(measured, lowest, highest)
    best = next(iter(speeds))
    assert lowest <= best <= highest
    assert speeds[best] == curve[best - lowest] >= max(curve[0], curve[-1])
    assert len(asked) == len(set(asked)), "a number was measured twice"
    assert {lowest, highest} <= speeds.keys() == set(asked)
