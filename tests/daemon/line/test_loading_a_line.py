"""Mistakes in a whole line that `coserve check` and the daemon's start find before anything runs."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from daemon.app import App
from daemon.check import check_line
from daemon.config.settings import load_config
from daemon.errors import ConfigError
from daemon.host.folders import folder_problem
from daemon.line.line import load_line
from daemon.line.profile import this_machine
from daemon.wire.keys import make_key_pair
from experts.editions.folder import EditionFolder
from tests.daemon.line.test_profile import a_profile
from tests.editions import files_in_force
from tests.lines import a_line
from tests.simulated import SimulatedDevices, answer


@pytest.fixture
def folder(tmp_path: Path, experts_folder: Path) -> Path:
    a_line(tmp_path, experts_folder)
    return tmp_path


def settings(folder: Path, policy: str = "coserve-plus", **device: Any) -> Path:
    path = folder / "coserve.yaml"
    content = yaml.safe_load(path.read_text())
    content["policy"] = policy
    content["devices"] = {"cpu": device}
    path.write_text(yaml.safe_dump(content))
    return path


def start_problems(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        App(load_line(path), path, devices=SimulatedDevices(answer))
    return str(caught.value)


def test_an_expert_larger_than_the_memory_is_named_by_check_and_start(folder: Path) -> None:
    path = settings(folder, expert_memory="20MB")
    problems, _ = check_line(path)
    (problem,) = problems
    assert problem.startswith(f"{path}:4:20: devices.cpu.expert_memory: ")
    assert "R0402 and 2 other experts need up to 44.7 MB; cpu has 20.0 MB: raise it to at least 44.8 MB" in problem
    assert problem in start_problems(path)


def test_a_device_that_no_pc_has_is_named_where_it_stands(folder: Path) -> None:
    path = settings(folder)
    path.write_text(path.read_text().replace("  cpu:", "  gpu9:"))
    problems, _ = check_line(path)
    assert any("gpu9 is not a device of this PC" in problem for problem in problems), problems


def test_an_edition_in_force_that_cannot_be_run_is_named_by_check_and_start(folder: Path) -> None:
    path = folder / "coserve.yaml"
    edition, pointer = files_in_force(path), EditionFolder(load_config(path, {}).catalog).pointer
    place = EditionFolder(load_config(path, {}).catalog).weights.place(edition.experts["R0402"].sha256)
    place.rename(place.with_suffix(".away"))
    (problem,) = check_line(path)[0]
    assert "weights: those of R0402 are missing or damaged: coserve reload takes in what" in problem
    pointer.write_text("9\n")
    (problem,) = check_line(path)[0]
    assert problem.startswith("there is no edition 9: ")
    with pytest.raises(ConfigError, match="there is no edition 9: "):
        load_line(path)


def test_memory_that_this_machine_has_not_and_pictures_that_cannot_be_kept_end_a_start(folder: Path) -> None:
    assert "devices.cpu.expert_memory: 60.0 TB is more than" in str(
        start_problems(settings(folder, expert_memory="60TB"))
    )
    path = settings(folder, expert_memory="60MB")
    path.write_text(path.read_text() + "images: /proc/nope\n")
    assert "images: nothing can be written in /proc" in str(start_problems(path))


def test_secrets_that_others_can_read_end_a_start(folder: Path) -> None:
    path, token, key = folder / "coserve.yaml", folder / "token", make_key_pair(folder, "server")[1]
    token.write_text("0123456789abcdef" * 2)
    (folder / "clients").mkdir()
    for file in (token, key):
        file.chmod(0o644)
    security = {"http_token": str(token), "server_key": str(key), "allowed_clients": str(folder / "clients")}
    path.write_text(path.read_text() + yaml.safe_dump({"security": security}))
    problems = start_problems(path)
    for name, file in (("http_token", token), ("server_key", key)):
        assert f"security.{name}: {file} can be read by everybody: chmod 600 it" in problems


def test_a_profile_of_this_machine_fills_what_is_left_open_and_layouts_it_lacks_are_a_warning(folder: Path) -> None:
    a_profile(folder, this_machine())
    path = settings(folder, profile="profile.yaml")
    problems, facts = check_line(path)
    assert problems == []
    assert "was not measured with" in facts["warnings"][0]
    line = load_line(path)
    assert (line.config.devices["cpu"].executors, line.config.devices["cpu"].expert_memory) == (3, 900_000_000)
    assert line.warnings == facts["warnings"][: len(line.warnings)], "behind them: limits, classes, time zone"


@pytest.mark.promise("Containment", "`coserve check` names the experts that cannot tell a picture in the dark")
def test_experts_without_limits_of_pictures_are_named_unless_the_guard_is_off(folder: Path) -> None:
    path, catalog = folder / "coserve.yaml", folder / "experts" / "catalog.yaml"

    def named() -> list[str]:
        return [text for text in check_line(path, reads_weights=False)[1]["warnings"] if "dark" in text]

    (warning,) = named()
    assert warning.startswith("R0402, C0603, QFP64, yolo-solder: may pass a picture that is dark or shows nothing")
    document = yaml.safe_load(catalog.read_text())
    limits = {"brightness": [20.0, 200.0], "sharpness": [1.0, 9.5], "constant": 0.2}
    document["experts"]["QFP64"]["pictures"] = limits
    catalog.write_text(yaml.safe_dump(document, sort_keys=False))
    (warning,) = named()
    assert warning.startswith("R0402, C0603, yolo-solder: may pass")
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"guards": {"picture_quality": "off"}}))
    assert named() == []


def test_one_round_names_every_mistake_of_settings_rules_and_catalog_in_the_order_of_lines(folder: Path) -> None:
    """`check` lists the mistakes that a start would refuse even if other values cannot be read."""
    path = folder / "coserve.yaml"
    path.write_text(
        "policy: cosreve\n"
        "devices: {cpu: {expert_memory: 60TB}}\n"
        "endpoints:\n"
        "  http: 'http://127.0.0.1:5570'\n"
        "  intake: ['tcp://127.0.0.1:5570']\n"
        "  results: 'tcp://127.0.0.1:99999'\n"
        "  control: 'tcp://127.0.0.1:1'\n"
        "images: /proc/nope\n"
        "rules: rules.yaml\n"
        "catalog: experts/catalog.yaml\n"
        "retention: {free: lots}\n"
        "limits: {hang_after: soon}\n"
        "consumers: {plant: {kind: mqqt}}\n"
        "record: nowhere/trace.jsonl\n"
    )
    rules = folder / "rules.yaml"
    rules.write_text(rules.read_text().replace("review_below: 0.0", "review_below: 1.5"))
    problems = [problem.removeprefix(f"{folder}/") for problem in check_line(path)[0]]
    lines = [int(problem.split(":")[1]) for problem in problems if problem.startswith("coserve.yaml:")]
    assert lines == sorted(lines)
    for line, text in (
        (1, "policy: 'cosreve' is unknown"),
        (2, "devices.cpu.expert_memory: 60.0 TB is more than"),
        (4, "http://127.0.0.1:5570 is named twice (endpoints.intake)"),
        (6, "ports end at 65535"),
        (7, "control is reached over ipc only"),
        (8, "nothing can be written in /proc"),
        (11, "lots"),
        (12, "soon"),
        (13, "mqqt"),
        (14, "record: there is no folder"),
    ):
        (problem,) = [problem for problem in problems if text in problem]
        assert problem.startswith(f"coserve.yaml:{line}:"), problem
    assert any(problem.startswith("rules.yaml:") for problem in problems)


def test_a_value_that_cannot_be_read_is_one_mistake(folder: Path) -> None:
    (problem,) = check_line(settings(folder, expert_memory="150 megs"))[0]
    assert "150 megs" in problem


@pytest.mark.parametrize("key", ["rules", "catalog"])
def test_a_path_that_leads_nowhere_is_a_mistake_of_the_line_that_names_it(folder: Path, key: str) -> None:
    path = folder / "coserve.yaml"
    content = yaml.safe_load(path.read_text()) | {key: "nowhere.yaml"}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    line = 1 + next(n for n, text in enumerate(path.read_text().splitlines()) if text.startswith(f"{key}:"))
    says = f"{path}:{line}:{len(key) + 3}: {key}: {folder / 'nowhere.yaml'}: cannot read the file: No such file or"
    says += " directory"
    assert says in check_line(path)[0]
    with pytest.raises(ConfigError) as refused:
        load_line(path)
    assert says in refused.value.problems


def test_a_folder_that_is_mounted_read_only_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=os.ST_RDONLY, f_blocks=1))
    says = f"{tmp_path} is mounted read-only: mount it for writing (a service: ReadWritePaths), or name another folder"
    assert folder_problem(tmp_path / "images") == says
