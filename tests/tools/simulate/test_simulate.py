"""`coserve simulate`: the same policy objects on described devices, and its figures."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from daemon.policy.matrix import Performance
from daemon.policy.presets import PRESETS, WITHOUT
from experts.spec import ArchitectureId
from tests.bench.ablation import arriving, at_once
from tools.cli.main import app
from tools.simulate.bound import Use, bound_of, task_bound
from tools.simulate.engine import Simulation
from tools.simulate.files import DeviceFile, FileError, TaskFile, read_task
from tools.simulate.fit import fit_line, largest_useful_batch
from tools.simulate.world import machine_of, task_of, with_deadlines

SIZE = 100_000_000
KEYS = {
    "policy", "images_per_s", "makespan_s", "loads", "disk_loads", "wanted_evictions", "p50_wait_s", "p95_wait_s",
    "max_wait_s", "share_of_bound",
}  # fmt: skip


def a_processor(**fields: Any) -> dict[str, Any]:
    costs = {"k_s": 0.01, "b_s": 0.01, "activation_bytes": 10_000_000}
    defaults = {"memory_bytes": 10 * SIZE, "executors": 1, "concurrency": 1.0, "max_batch": 4}
    return {**defaults, "architectures": {"small": costs}, **fields}


def a_device(**fields: Any) -> dict[str, Any]:
    channels = {"disk": {"bytes_per_s": 5e8, "fixed_s": 0.1}, "link": {"bytes_per_s": 1e10, "fixed_s": 0.01}}
    processors = {
        "gpu": a_processor(executors=2, expert_share=0.5, concurrency=1.5),
        "cpu": a_processor(architectures={"small": {"k_s": 0.05, "b_s": 0.01, "activation_bytes": 10_000_000}}),
    }
    return {"name": "bench", "unified_memory": False, "channels": channels, "processors": processors, **fields}


def a_task(images: int = 200, experts: int = 30, every_s: float = 0.001) -> dict[str, Any]:
    listed = [
        {
            "id": f"c{n}",
            "architecture": "small",
            "bytes": SIZE,
            "usage": 1 / experts,
            "then": "d" if n % 3 == 0 else None,
        }
        for n in range(experts)
    ]
    detector = {"id": "d", "architecture": "small", "bytes": SIZE, "usage": 0.3, "then": None}
    requests = [
        [every_s * n, f"c{n * 7 % experts}", "d" if n * 7 % experts % 3 == 0 and n % 10 else None]
        for n in range(images)
    ]
    return {"name": "made", "experts": [*listed, detector], "requests": requests}


def a_world(policy: str = "coserve-plus", **fields: Any):
    task = task_of(TaskFile.model_validate(a_task(**fields)))
    return machine_of(DeviceFile.model_validate(a_device()), task, policy), task


@pytest.mark.parametrize("policy", [*PRESETS, *(f"coserve-plus-without-{idea}" for idea in WITHOUT)])
def test_every_policy_answers_every_image_and_none_beats_the_bound(policy: str):
    machine, task = a_world(policy)
    outcome = Simulation(machine, task, policy).run()
    full, _ = a_world()
    assert outcome.answered == len(task.images) == len(outcome.waits_s)
    assert outcome.makespan_s > task_bound(full, task).seconds


def test_a_simulation_repeats_exactly():
    machine, task = a_world()
    first, second = Simulation(machine, task, "coserve-plus").run(), Simulation(machine, task, "coserve-plus").run()
    assert first == second


def test_one_batch_takes_k_times_n_plus_b_and_a_load_its_bytes_over_the_channel_and_what_is_fixed():
    document = a_task(images=1, experts=1)
    document["experts"] = [{**document["experts"][0], "then": None, "usage": 0.0}]
    document["requests"] = [[0.0, "c0", None]]
    task = task_of(TaskFile.model_validate(document))
    device = DeviceFile.model_validate(a_device())
    ordinary = Simulation(machine_of(device, task, "samba", "ordinary"), task, "samba").run()
    assert ordinary.makespan_s == pytest.approx(0.2 + 0.1 + 0.01 + 0.01 + 0.02)
    slots = Simulation(machine_of(device, task, "coserve-plus"), task, "coserve-plus").run()
    assert slots.makespan_s < ordinary.makespan_s


def test_the_bound_divides_the_work_so_that_both_processors_end_together():
    machine, task = a_world(images=240)
    assert all(images % 4 == 0 for images in Counter(name for image in task.images for name in image.chain).values())
    steps = sum(len(image.chain) for image in task.images)
    gpu_s, cpu_s = (0.01 + 0.01 / 4) / 1.5, 0.05 + 0.01 / 4
    assert task_bound(machine, task).compute_s == pytest.approx(steps / (1 / gpu_s + 1 / cpu_s))


def test_the_bound_counts_a_batch_for_every_expert_however_few_its_images():
    """Nine images of two experts, four to a batch: two batches and one, not nine quarters."""
    row = Performance("cpu", ArchitectureId("small"), k_s=0.01, b_s=0.1, max_batch=4)
    uses = [Use(row.architecture, SIZE, 8), Use(row.architecture, SIZE, 1)]
    bound = bound_of(uses, [row], {"cpu": 2.0}, memory_bytes=SIZE, bytes_per_s=1e9)
    assert bound.compute_s == pytest.approx((9 * 0.01 + 3 * 0.1) / 2)
    assert bound.load_s == pytest.approx(0.1)
    assert bound.seconds == bound.compute_s


def test_an_image_that_cannot_be_in_time_costs_no_compute():
    machine, task = a_world(images=100)
    late = with_deadlines(at_once(task), 1e-6)
    outcome = Simulation(machine, late, "coserve-plus").run()
    assert (outcome.answered, outcome.expired, outcome.waits_s) == (0, 100, [])


def test_under_overload_nothing_starves_and_throughput_stays():
    machine, task = a_world(images=600)
    free = Simulation(machine, at_once(task), "coserve-plus").run()
    rate = len(task.images) / free.makespan_s
    outcomes = {
        load: Simulation(machine, arriving(task, rate * load, "poisson"), "coserve-plus").run() for load in (1.2, 1.5)
    }
    assert outcomes[1.5].makespan_s <= outcomes[1.2].makespan_s * 1.02
    assert max(outcomes[1.5].waits_s) < outcomes[1.5].makespan_s


def write(folder: Path) -> list[str]:
    (folder / "device.json").write_text(json.dumps(a_device()))
    (folder / "task.json.gz").write_bytes(gzip.compress(json.dumps(a_task()).encode()))
    return ["simulate", "--device", str(folder / "device.json"), "--task", str(folder / "task.json.gz")]


def test_the_command_prints_a_row_for_every_policy_as_json(tmp_path: Path):
    done = CliRunner().invoke(app, [*write(tmp_path), "--json"])
    rows = json.loads(done.stdout)
    assert [row["policy"] for row in rows] == list(PRESETS)
    assert all(set(row) >= KEYS for row in rows)
    assert all(0 < row["share_of_bound"] <= 1 for row in rows)


def test_policies_can_be_chosen_and_a_timeline_drawn(tmp_path: Path):
    picture = tmp_path / "line.png"
    options = ["--policy", "samba", "--policy", "coserve-plus", "--timeline", str(picture), "--until", "2"]
    done = CliRunner().invoke(app, [*write(tmp_path), *options])
    assert done.exit_code == 0
    assert "coserve-plus" in done.stdout
    for policy in ("samba", "coserve-plus"):
        assert (tmp_path / f"line-{policy}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"experts": []}, "experts"),
        ({"requests": [[0.0, "nobody", None]]}, "requests[0]: nobody is not among the experts"),
        ({"experts": [{"id": "c0", "architecture": "small", "bytes": -1, "usage": 0.1}]}, "experts.0.bytes"),
    ],
)
def test_a_task_that_makes_no_sense_is_refused_with_the_place(tmp_path: Path, change: dict[str, Any], says: str):
    path = tmp_path / "task.json"
    path.write_text(json.dumps({**a_task(), **change}))
    with pytest.raises(FileError, match=r"task\.json") as refused:
        read_task(path)
    assert says in str(refused.value)


def test_what_if_classifiers_became_heads_of_one_backbone(tmp_path: Path):
    files = write(tmp_path)
    apart, family = (
        json.loads(CliRunner().invoke(app, [*files, "--policy", "coserve-plus", "--json", *heads]).stdout)[0]
        for heads in ([], ["--heads", "c*"])
    )
    assert family["loads"] < apart["loads"]
    refused = CliRunner().invoke(app, [*files, "--heads", "nothing*"])
    assert refused.exit_code == 2
    assert "no expert of" in refused.output
    assert "matches nothing*" in refused.output


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-5, 10)), min_size=1, max_size=8))
def test_no_constant_is_negative_whatever_was_measured(batches: list[tuple[int, float]]):
    line = fit_line(batches)
    assert line.k_s >= 0
    assert line.b_s >= 0
    assert 1 <= largest_useful_batch(line, max(batches)[0]) <= max(batches)[0]


def test_batches_stop_where_the_average_flattens():
    line = fit_line((images, 0.02 * images + 0.02) for images in (1, 2, 4, 8, 16))
    most = largest_useful_batch(line, 16)
    assert line.average_s(most) <= 1.03 * line.average_s(16) < line.average_s(most - 1)
    assert largest_useful_batch(fit_line([(1, 0.1), (2, 0.2), (4, 0.4)]), 4) == 1
