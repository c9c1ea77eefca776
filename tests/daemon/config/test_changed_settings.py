"""What of coserve.yaml has changed since the start, by key."""

from pathlib import Path

import yaml

from daemon.config.changed_settings import StartSettings


def test_changed_added_and_removed_settings_are_named_by_key(tmp_path: Path) -> None:
    path = tmp_path / "coserve.yaml"
    files = {"rules": "rules.yaml", "catalog": "catalog.yaml"}
    gpu = {"cuda:0": {"expert_memory": "1GB"}}
    at_start = {**files, "devices": {"cpu": {"expert_memory": "100MB", "executors": 2}, **gpu}}
    path.write_text(yaml.safe_dump(at_start), encoding="utf-8")
    settings = StartSettings(path)
    path.write_text("# a comment changes nothing\n" + yaml.safe_dump(at_start), encoding="utf-8")
    assert settings.changed() == ([], [])
    now = {**files, "devices": {"cpu": {"expert_memory": "0.1GB", "executors": 1}}, "security": {"http_token": "token"}}
    path.write_text(yaml.safe_dump(now), encoding="utf-8")
    assert settings.changed() == (["devices.cpu.executors", "devices.cuda:0", "security.http_token"], [])


def test_a_file_that_cannot_be_read_any_more_says_why(tmp_path: Path) -> None:
    path = tmp_path / "coserve.yaml"
    path.write_text("{rules: r.yaml, catalog: c.yaml, devices: {cpu: {expert_memory: 1GB}}}\n", encoding="utf-8")
    settings = StartSettings(path)
    path.write_text("rules: [", encoding="utf-8")
    changed, problems = settings.changed()
    assert changed == []
    assert "coserve.yaml" in problems[0]
    path.unlink()
    assert settings.changed()[1]
