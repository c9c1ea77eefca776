import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon.config.settings import load_config
from tests.systemd.sandbox import settings
from tests.tools.run_commands import coserve
from tools.setup.service_files import Places, exec_words, started_config, unreadable_secrets


def a_config(folder: Path, **changed: Any) -> Path:
    """A configuration; nothing that it names has to be there."""
    folder.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "rules": "rules.yaml",
        "catalog": "experts/catalog.yaml",
        "devices": {"cpu": {"expert_memory": "1GB"}},
        "endpoints": {"control": "ipc://run/control.sock", "intake": ["ipc://run/intake.sock"]},
        **changed,
    }
    path = folder / "coserve.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def unit_of(prefix: Path) -> dict[str, list[str]]:
    return settings(Places(prefix).unit.read_text(encoding="utf-8"))


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_first_install_begins_a_configuration_whose_data_lie_under_var_lib(tmp_path: Path) -> None:
    output = coserve("install-service", "--prefix", tmp_path).output
    config = load_config(tmp_path / "etc/coserve/coserve.yaml", {})
    state = tmp_path / "var/lib/coserve"
    assert config.database == f"sqlite:///{state}/inspection.db"
    assert (config.journal, config.images, config.catalog.parent) == (
        state / "journal",
        state / "images",
        state / "experts",
    )
    assert config.endpoints.control == f"ipc://{tmp_path}/run/coserve/control.sock"
    for name in ("sysusers.d/coserve.conf", "tmpfiles.d/coserve.conf", "systemd/system/coserve.service"):
        assert (tmp_path / "etc" / name).is_file()
        assert f"wrote      {tmp_path}/etc/{name}" in output
    assert f"coserve check {tmp_path}/etc/coserve/coserve.yaml" in output
    assert f"coserve reload --config {tmp_path}/etc/coserve/coserve.yaml" in "".join(output.splitlines())


@pytest.mark.promise("A service of systemd", "A second installation changes nothing, and a person's changes stay")
def test_a_second_install_changes_nothing_and_what_a_person_changed_stays(tmp_path: Path) -> None:
    coserve("install-service", "--prefix", tmp_path)
    places = Places(tmp_path)
    text = places.config.read_text(encoding="utf-8").replace("tcp://127.0.0.1:5570", "ipc:///run/coserve/more.sock")
    places.config.write_text(text + "# mine\n", encoding="utf-8")
    (places.drop_ins).mkdir()
    (places.drop_ins / "override.conf").write_text("[Service]\nMemoryMax=8G\n", encoding="utf-8")
    before = everything(tmp_path)
    output = coserve("install-service", "--prefix", tmp_path).output
    assert everything(tmp_path) == before
    assert "wrote" not in output


def test_the_unit_follows_the_configuration(tmp_path: Path) -> None:
    config = a_config(
        tmp_path / "a b, 9%",
        stop={"backlog_for": "90s"},
        database=f"sqlite:///{tmp_path}/results/inspection.db",
        devices={"cuda:0": {"expert_memory": "1GB"}},
        security={"server_key": "$CREDENTIALS_DIRECTORY/server.key_secret", "allowed_clients": "clients"},
    )
    coserve("install-service", config, "--prefix", tmp_path)
    unit = unit_of(tmp_path)
    assert unit["TimeoutStopSec"] == ["103s"]
    assert exec_words(unit["ExecStart"][0])[-2:] == ["run", str(config)]
    assert started_config(Places(tmp_path).unit.read_text(encoding="utf-8")) == config
    assert unit["ReadWritePaths"][0].replace("%%", "%") == (
        f'"{config.parent}/images" "{config.parent}/journal" "{config.parent}/quarantine" "{config.parent}/run"'
        f" {tmp_path}/results"
    )
    assert unit["LoadCredential"] == [f"server.key_secret:{tmp_path}/etc/coserve/keys/server.key_secret"]
    assert [path.name for path in Places(tmp_path).drop_ins.iterdir()] == ["nvidia.conf"]


def test_cameras_on_the_network_get_a_drop_in_that_goes_again_unless_it_was_changed(tmp_path: Path) -> None:
    keys = {"server_key": "keys/server.key_secret", "allowed_clients": "clients"}
    endpoints = {"intake": ["tcp://192.168.7.1:5570"], "control": "ipc://run/control.sock"}
    config = a_config(tmp_path / "line", endpoints=endpoints, security=keys)
    drop_in = Places(tmp_path).drop_ins / "network.conf"
    coserve("install-service", config, "--prefix", tmp_path)
    assert "IPAddressAllow=" in drop_in.read_text(encoding="utf-8")
    a_config(tmp_path / "line")
    coserve("install-service", config, "--prefix", tmp_path)
    assert not drop_in.exists()
    a_config(tmp_path / "line", endpoints=endpoints, security=keys)
    drop_in.write_text("[Service]\nIPAddressAllow=192.168.7.0/24\n", encoding="utf-8")
    assert f"kept       {drop_in}" in coserve("install-service", config, "--prefix", tmp_path).output
    assert f"kept       {drop_in}" in coserve("install-service", "--remove", "--prefix", tmp_path).output
    assert drop_in.exists()


def test_uninstalling_leaves_what_is_the_users_and_says_where(tmp_path: Path) -> None:
    coserve("install-service", "--prefix", tmp_path)
    (tmp_path / "var/lib/coserve/inspection.db").write_text("results", encoding="utf-8")
    output = coserve("install-service", "--remove", "--prefix", tmp_path).output
    assert sorted(path.relative_to(tmp_path) for path in everything(tmp_path)) == [
        Path("etc/coserve/coserve.yaml"),
        Path("etc/coserve/rules.yaml"),
        Path("var/lib/coserve/inspection.db"),
    ]
    assert f"left       {tmp_path}/etc/coserve/coserve.yaml" in output
    assert f"left       {tmp_path}/var/lib/coserve" in output
    assert "no service is installed" in coserve("install-service", "--remove", "--prefix", tmp_path, status=1).output


def test_a_token_that_the_service_could_not_read_is_known_and_a_credential_is_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "line").mkdir()
    token = tmp_path / "line/token"
    token.write_text("0123456789abcdef" * 4)
    named = load_config(a_config(tmp_path / "line", security={"http_token": "token"}), {})
    assert unreadable_secrets(named, os.getuid()) == []
    assert unreadable_secrets(named, os.getuid() + 1) == [token]
    handed_in = load_config(a_config(tmp_path / "line", security={"http_token": "$CREDENTIALS_DIRECTORY/token"}), {})
    assert unreadable_secrets(handed_in, os.getuid() + 1) == []
