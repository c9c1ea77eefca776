"""`coserve doctor` before real wrong things: full and borrowed disks, taken ports, open secrets, clocks set back."""

import json
import os
import re
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest
import yaml

from tests.lines import a_line
from tests.small_disk import small_disk
from tests.tools.client.scripted_daemon import HOST
from tests.tools.run_commands import coserve
from tools.setup import doctor as checks
from tools.setup.doctor import Driver, Gpu, Machine, find_driver, machine_of

NOBODY = "nobody"
SMALL_GPU = Driver("550.1", (12, 4), (Gpu("a card", 16 * 10**9, 15 * 10**9),))


@pytest.fixture
def config(tmp_path: Path, experts_folder: Path) -> Path:
    return a_line(tmp_path / "line", experts_folder)


def changed(config: Path, **settings: Any) -> Path:
    written = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(written | settings))
    return config


def wrongs(findings: Any, grade: str = "wrong") -> dict[str, str]:
    """Return the findings of one grade in words, by check."""
    return {finding.check: f"{finding.so} → {finding.do}" for finding in findings if finding.grade == grade}


def test_a_sound_line_has_nothing_wrong_and_the_answer_is_for_programs_too(config: Path) -> None:
    report = json.loads(coserve("doctor", config, "--json").stdout)
    assert report["ok"], report
    assert {finding["check"] for finding in report["findings"]} >= {
        *("configuration", "libraries", "gpu", "memory", "limits", "file system", "disk space"),
        *("permissions", "ports", "clock"),
    }
    assert all((finding["do"] is None) == (finding["grade"] == "ok") for finding in report["findings"])


def test_a_mistake_in_the_line_is_named_with_what_to_do(config: Path) -> None:
    def mistake() -> str:
        return wrongs(checks.configuration(machine_of(config)))["configuration"]

    rules = config.with_name("rules.yaml").read_text()
    config.with_name("rules.yaml").write_text("boards: {a: {components: {R9: 1}}}\n")
    assert re.search(r"→ correct it, then: \S*coserve check ", mistake())
    config.with_name("rules.yaml").write_text(rules)
    (config.parent / "experts" / "R0402.safetensors").unlink()
    assert "there is no such weights file" in mistake()
    config.write_text("rules: [\n")
    shown = coserve("doctor", config, status=1).stdout
    assert "✗ configuration" in shown
    assert "1 wrong" in shown


def test_a_full_disk_is_wrong_and_a_disk_in_memory_too(config: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        context = machine_of(changed(config, journal=str(disk / "journal"), database=f"sqlite:///{disk}/inspection.db"))
        assert "which is memory" in wrongs(checks.disks(context))["file system"]
        assert "disk space" not in wrongs(checks.disks(context))
        (disk / "ballast").write_bytes(bytes(60 * 2**20))
        problems = wrongs(checks.disks(context))
        assert "MB free" in problems["disk space"]
        assert "free some room" in problems["disk space"]


def test_a_taken_port_is_named_with_who_has_it(config: Path) -> None:
    with closing(socket.create_server((HOST, 0))) as taken:
        port = taken.getsockname()[1]
        endpoints = yaml.safe_load(config.read_text())["endpoints"] | {"http": f"http://{HOST}:{port}"}
        machine = machine_of(changed(config, endpoints=endpoints))
        problems = wrongs(checks.ports(machine))
        assert f"port {port} is taken by {psutil.Process().name()}, process {os.getpid()}" in problems["ports"]
        (finding,) = checks.ports(replace(machine, is_running=True))
        assert finding.so.endswith("their ports are the line’s")
    assert "ports" not in wrongs(checks.ports(machine_of(config)))


def test_a_token_that_everybody_can_read_is_wrong(config: Path) -> None:
    token = config.with_name("token")
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o644)
    context = machine_of(changed(config, security={"http_token": "token"}))
    assert f"{token} can be read by everybody → chmod 600 {token}" in wrongs(checks.permissions(context))["secrets"]
    token.chmod(0o600)
    assert not wrongs(checks.permissions(context))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to look with the rights of another user")
def test_folders_of_another_user_are_named_with_what_gives_the_right(config: Path, tmp_path: Path) -> None:
    (config.parent / "journal").mkdir(mode=0o750)
    for folder in (config.parent, *config.parent.parents[:-1]):  # pytest's own folders are for root alone
        folder.chmod(folder.stat().st_mode | 0o005)
    findings = list(checks.permissions(machine_of(config, user=NOBODY)))
    assert any(f"journal: {NOBODY} cannot write to {config.parent}/journal" in each.so for each in findings), findings
    problems = wrongs(findings)
    assert any((each.do or "").endswith(f"install -d -o {NOBODY} {config.parent}/images") for each in findings)
    assert not wrongs(checks.permissions(machine_of(config)))
    assert os.geteuid() == 0
    assert "chown or chmod" in problems["permissions"]
    coserve("doctor", config, "--user", "no-such-user", status=2)


@pytest.mark.parametrize(
    ("settings", "check", "message"),
    [
        ({"endpoints": {"results": "tcp://192.0.2.7:5571"}}, checks.ports,
         "no network card of this machine has the address 192.0.2.7"),
        ({"devices": {"cpu": {"expert_memory": psutil.virtual_memory().total}}}, checks.memory,
         "lower expert_memory or host_cache, or add memory: it would swap, or be killed"),
        ({"devices": {"cpu": {"expert_memory": 1, "executors": 500, "threads": 4}}},
         checks.memory, "2000 threads"),
        ({"devices": {"cuda:0": {"expert_memory": "50TB"}}},
         lambda machine: checks.libraries(replace(machine, driver=machine.driver or SMALL_GPU)),
         "torch cannot compute there" if find_driver() is None else "lower devices.cuda:0.expert_memory"),
        ({"devices": {"cuda:0": {"expert_memory": "20GB"}}},
         lambda context: [checks.gpu_memory(replace(context, driver=SMALL_GPU), "cuda:0")],
         "lower devices.cuda:0.expert_memory"),
        ({"devices": {"cpu": {"expert_memory": psutil.virtual_memory().total},
                      "cuda:0": {"expert_memory": "20GB", "memory": "shared"}}},
         checks.memory, "lower devices.cpu.expert_memory, which the GPUs share"),
    ],
)  # fmt: skip
def test_settings_that_this_pc_cannot_serve_are_named(
    config: Path, settings: dict[str, Any], check: Callable[[Machine], Any], message: str
) -> None:
    if "endpoints" in settings:
        settings = {"endpoints": yaml.safe_load(config.read_text())["endpoints"] | settings["endpoints"]}
    findings = list(check(machine_of(changed(config, **settings))))
    assert any(message in f"{finding.so} → {finding.do}" for finding in findings if finding.grade != "ok"), findings


def test_a_gpu_that_shares_the_hosts_memory_is_measured_against_ram(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"expert_memory": "20GB", "activation_memory": "30GB", "memory": "shared"}
    context = machine_of(changed(config, devices={"cpu": {"expert_memory": "25GB"}, "cuda:0": shared}))
    finding = checks.gpu_memory(replace(context, driver=SMALL_GPU), "cuda:0")
    assert (finding.grade, finding.do) == ("ok", None), "NVML's figure is not what it has"
    (finding, *_) = checks.memory(context)
    assert "the line may take 56.5 GB" in finding.so

    def not_supported(handle: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    answers = {
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
        "nvmlSystemGetDriverVersion": lambda: "580", "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda number: number, "nvmlDeviceGetMemoryInfo": not_supported,
        "nvmlDeviceGetName": lambda handle: "GB10",
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    driver = find_driver()
    assert driver is not None
    assert driver.gpus[0].total_bytes == psutil.virtual_memory().total
