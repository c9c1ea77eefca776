"""Profiles: read with every mistake named, refused on another machine, and completing what the settings leave open."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon.config.settings import Config, load_config
from daemon.errors import ConfigError
from daemon.line.devices import Measurements, complete, memory_problems, pools_and_executors, profile_warnings
from daemon.line.profile import MachineIdentity, load_profile
from experts.spec import ExpertId
from tests.daemon.dispatch.simulated_line import a_catalog

HERE = MachineIdentity(cpu="Processor Nine", cores=4, memory_bytes=16_000_000_000)
ROW = {"k_s": 0.05, "b_s": 0.004, "residual": 0.01, "max_batch": 6, "activation_bytes": 12_000_000, "disk_s": 0.1}


def a_profile(folder: Path, machine: MachineIdentity = HERE, **settings: Any) -> Path:
    cpu = {"executors": 3, "threads": 2, "expert_memory": 900_000_000, "activation_memory": 300}
    content = {
        "profile": 1,
        "made": "2026-11-21T18:00:00Z",
        "machine": machine.model_dump(mode="json"),
        "devices": {"cpu": cpu | {"architectures": {"resnet18": {**ROW, "ram_s": None}}}},
        **settings,
    }
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def a_config(folder: Path, devices: str, policy: str = "coserve-plus") -> tuple[Path, Config]:
    path = folder / "coserve.yaml"
    path.write_text(f"rules: r.yaml\ncatalog: c.yaml\npolicy: {policy}\ndevices: {devices}\n", encoding="utf-8")
    return path, load_config(path, {})


def completed(folder: Path, devices: str, here: MachineIdentity = HERE) -> tuple[Config, Measurements]:
    path, config = a_config(folder, devices)
    config, measured, problems = complete(path, config, here)
    assert problems == []
    return config, measured


def problems_of(folder: Path, devices: str, here: MachineIdentity = HERE) -> str:
    path, config = a_config(folder, devices)
    return "\n".join(map(str, complete(path, config, here)[2]))


def test_a_profile_becomes_rows_of_the_matrix_and_recommendations(tmp_path: Path) -> None:
    profile = load_profile(a_profile(tmp_path, usage={"B": 0.4}))
    (row,) = profile.rows
    assert (row.device, row.architecture, row.k_s, row.b_s, row.max_batch) == ("cpu", "resnet18", 0.05, 0.004, 6)
    assert (row.activation_bytes, row.disk_s, row.ram_s) == (12_000_000, 0.1, None)
    assert profile.file.devices["cpu"].executors == 3
    assert profile.file.usage == {"B": 0.4}


def test_every_mistake_of_a_profile_is_named_with_its_line(tmp_path: Path) -> None:
    path = a_profile(tmp_path)
    path.write_text(path.read_text().replace("max_batch: 6", "max_batch: 0").replace("disk_s", "disc_s"))
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    text = str(caught.value)
    assert "profile.yaml:19:20: expected a number" in text
    assert "profile.yaml:21:9: unknown key `disc_s`; did you mean `disk_s`?" in text
    assert len(caught.value.problems) == 2


def test_what_the_settings_leave_open_comes_from_the_profile(tmp_path: Path) -> None:
    a_profile(tmp_path)
    config, measured = completed(tmp_path, "{cpu: {profile: profile.yaml}}")
    device = config.devices["cpu"]
    assert (device.executors, device.threads, device.expert_memory, device.max_batch) == (3, 2, 900_000_000, 6)
    assert len(measured.matrix) == 1
    pools, executors = pools_and_executors(config)
    assert [(pool.pool, pool.budget_bytes, pool.activation_bytes) for pool in pools] == [("cpu", 900_000_000, 100)]
    assert [row.executor for row in executors] == ["cpu/0", "cpu/1", "cpu/2"]


def test_values_set_by_hand_win(tmp_path: Path) -> None:
    a_profile(tmp_path)
    config, _ = completed(
        tmp_path,
        "{cpu: {profile: profile.yaml, executors: 1, threads: 1, expert_memory: 50, max_batch: 2,"
        " activation_memory: 7}}",
    )
    device = config.devices["cpu"]
    assert (device.executors, device.threads, device.expert_memory, device.max_batch) == (1, 1, 50, 2)
    assert device.activation_memory == 7


def test_a_profile_of_another_machine_is_refused_with_what_differs_and_what_to_do(tmp_path: Path) -> None:
    a_profile(tmp_path)
    here = MachineIdentity(cpu="Processor Ten", cores=8, memory_bytes=64_000_000_000, gpus=("NVIDIA H200",))
    problems = problems_of(tmp_path, "{cpu: {profile: profile.yaml}}", here)
    assert "profile.yaml:3:1: this profile is of another machine" in problems
    for part in ("'Processor Nine', here it is 'Processor Ten'", "4 cores, this one 8", "16.0 GB", "NVIDIA H200"):
        assert part in problems
    assert "coserve profile" in problems


def test_layouts_that_were_not_measured_are_a_warning_and_others_are_fine(tmp_path: Path) -> None:
    a_profile(tmp_path)
    config, measured = completed(tmp_path, "{cpu: {profile: profile.yaml}}")
    assert profile_warnings(tmp_path / "coserve.yaml", config, measured, a_catalog()) == []
    other = {ExpertId("B"): replace(a_catalog()[ExpertId("B")], layout="resnet101")}  # type: ignore[arg-type]
    (warning,) = profile_warnings(tmp_path / "coserve.yaml", config, measured, other)
    assert "resnet101" in warning
    assert f"coserve profile {tmp_path / 'coserve.yaml'}" in warning


def test_a_gpu_that_shares_the_hosts_memory_takes_its_part_of_the_cpus(tmp_path: Path) -> None:
    shared = "'cuda:0': {expert_memory: 300, memory: shared}"
    config, _ = completed(tmp_path, f"{{cpu: {{expert_memory: 1000}}, {shared}}}")
    pools, _ = pools_and_executors(config)
    assert {pool.pool: pool.budget_bytes for pool in pools} == {"cpu": 700, "cuda:0": 300}
    config, _ = completed(tmp_path, f"{{{shared}}}")
    assert [pool.budget_bytes for pool in pools_and_executors(config)[0]] == [300]
    problem = "devices.cpu.expert_memory: GPUs with `memory: shared` use 300 B of these 300 B"
    assert problem in problems_of(tmp_path, f"{{cpu: {{expert_memory: 300}}, {shared}}}")


def test_an_expert_that_fits_no_pool_is_named_with_what_to_do(tmp_path: Path) -> None:
    _, config = a_config(tmp_path, "{cpu: {expert_memory: 25, executors: 2}}")
    assert memory_problems(config, ["B", "C"], a_catalog(weights_bytes=20)) == []
    (problem,) = memory_problems(config, ["B", "C", "missing"], a_catalog(weights_bytes=30))
    assert "B and 1 other expert need up to 30 B; cpu has 25 B: raise it to at least 30 B" in problem
