"""`coserve simulate` on several PCs: one uplink, first loads over it, disks of their own, and work that is shared."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.tools.simulate.test_simulate import SIZE, a_device, a_processor, a_task
from tools.cli.main import app
from tools.simulate.bound import task_bound
from tools.simulate.engine import Simulation, TaskOutcome
from tools.simulate.files import DeviceFile, FileError, TaskFile, read_device
from tools.simulate.world import machine_of, task_of

IMAGE_BYTES = 1_000_000


def a_network(**fields: Any) -> dict[str, Any]:
    return {"gbit_per_s": 10, "latency_ms": 0.2, "image_bytes": IMAGE_BYTES, **fields}


def a_run(
    images: int = 400, experts: int = 30, every_s: float = 0.0, prefilled: bool = True, **fields: Any
) -> tuple[TaskOutcome, float]:
    """Return the outcome on a device, and the seconds of its bound."""
    device = DeviceFile.model_validate(a_device(**fields))
    task = task_of(TaskFile.model_validate(a_task(images, experts, every_s)))
    machine = machine_of(device, task, "coserve-plus")
    return Simulation(machine, task, "coserve-plus", prefilled=prefilled).run(), task_bound(machine, task).seconds


def test_eight_pcs_give_seven_times_one_from_empty_caches_too() -> None:
    # The line's disk reads every expert once: that takes its time whatever the number of PCs.
    channels = {"disk": {"bytes_per_s": 1e11, "fixed_s": 0.0}}
    empty: dict[str, Any] = {
        "prefilled": False,
        "processors": {"gpu": a_processor(memory_bytes=60 * SIZE)},
        "channels": channels,
    }
    one, _ = a_run(1600, **empty)
    eight, _ = a_run(1600, pcs=8, network=a_network(image_bytes=20_000, gbit_per_s=100), **empty)
    assert one.makespan_s / eight.makespan_s >= 7


def test_a_slow_uplink_is_the_bound_and_the_output_says_so(tmp_path: Path) -> None:
    slow, bound_s = a_run(pcs=4, network=a_network(gbit_per_s=0.1))
    fast, _ = a_run(pcs=4, network=a_network())
    assert slow.makespan_s > 2 * fast.makespan_s
    assert slow.makespan_s >= bound_s
    device, task = tmp_path / "device.json", tmp_path / "task.json"
    device.write_text(json.dumps(a_device(pcs=4, network=a_network(gbit_per_s=0.1))))
    task.write_text(json.dumps(a_task(400, every_s=0.0)))
    command = ["simulate", "--device", str(device), "--task", str(task), "--policy", "coserve-plus"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "4 PCs" in done.stdout
    assert "(network)" in done.stdout
    assert "net GB" in done.stdout
    row = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)[0]
    assert row["network_bytes"] > 0
    assert row["share_of_bound"] <= 1


def test_an_expert_crosses_the_network_once_and_then_comes_from_the_pcs_own_disk() -> None:
    processors = {"gpu": a_processor(memory_bytes=8 * SIZE)}
    kept, _ = a_run(800, 60, 0.05, pcs=2, processors=processors, network=a_network(image_bytes=0))
    assert 0 < kept.network_loads <= 60
    assert kept.network_bytes == kept.network_loads * SIZE
    assert kept.disk_loads > 60


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pcs": 2}, "device.json: as a whole: Value error, several PCs need a network"),
        ({"pcs": 2, "hosts": {"pc2": {}}, "network": a_network()}, "pcs and hosts exclude each other"),
        ({"hosts": {"PC 2": {}}, "network": a_network()}, "hosts.PC 2"),
        ({"pcs": 2, "network": a_network(gbit_per_s=0)}, "network.gbit_per_s"),
        ({"pcs": 2, "network": {"gbit_per_s": 1}}, "network.image_bytes: Field required"),
    ],
)
def test_a_mistake_in_the_network_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = tmp_path / "device.json"
    path.write_text(json.dumps(a_device(**fields)))
    with pytest.raises(FileError) as refused:
        read_device(path)
    assert message in str(refused.value)
