"""The section `consumers`: mistakes with their lines, files that must be there, and the text without the extra."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.config.settings import Config, load_config
from daemon.consumers.kinds import KINDS
from daemon.consumers.mqtt.settings import MqttSettings
from daemon.delivery.deliveries import Deliveries, SharedStatusPage, consumer_problems, consumer_warnings
from daemon.delivery.position import DeliveryPosition, PositionFile
from daemon.errors import ConfigError
from tests import ROOT
from tools.backup.contents import contents_of
from tools.setup.service_files import credentials, drop_ins, written_folders

LINE = "rules: rules.yaml\ncatalog: catalog.yaml\ndevices: {cpu: {expert_memory: 1GB}}\n"


def a_config(folder: Path, consumers: str, environ: dict[str, str] | None = None) -> Config:
    path = folder / "coserve.yaml"
    path.write_text(f"{LINE}consumers:\n{consumers}", encoding="utf-8")
    return load_config(path, environ or {})


def mistakes(folder: Path, consumers: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        a_config(folder, consumers)
    return [problem.removeprefix(f"{folder}/coserve.yaml:") for problem in error.value.problems]


def test_paths_are_relative_to_the_file_and_credentials_are_systemds(tmp_path: Path) -> None:
    text = (
        "  plant: {kind: mqtt, host: broker, user: u, password: $CREDENTIALS_DIRECTORY/plant,"
        " tls: {ca: keys/ca.pem, cert: /a/b.pem, key: k.pem}}\n"
    )
    plant = a_config(tmp_path, text, {"CREDENTIALS_DIRECTORY": "/run/credentials/coserve"}).consumers["plant"]
    assert plant.files() == {
        ("password",): Path("/run/credentials/coserve/plant"),
        ("tls", "ca"): tmp_path / "keys/ca.pem",
        ("tls", "cert"): Path("/a/b.pem"),
        ("tls", "key"): tmp_path / "k.pem",
    }


def test_each_mistake_is_named_with_its_line(tmp_path: Path) -> None:
    keys = "host: a/b|prefix: /a|pasword: x|send: [board]|keepalive: 1s|port: 70000|retain_boards: 200y"
    problems = mistakes(tmp_path, "  plant:\n    kind: mqtt\n" + "".join(f"    {key}\n" for key in keys.split("|")))
    assert [problem.split(":")[0] for problem in problems] == [str(line) for line in range(7, 14)]
    assert any("did you mean `password`?" in problem for problem in problems)
    assert mistakes(tmp_path, "  plant:\n    host: h\n    kind: mqqt\n") == [
        f"7:11: expected {' or '.join(map(repr, KINDS))}, found `mqqt`"
    ]
    assert mistakes(tmp_path, "  plant: {host: h}\n") == ["5:3: missing key `kind`"]
    assert mistakes(tmp_path, "  plant: 3\n") == ["5:10: expected a mapping (`key: value` lines), found `3`"]


@pytest.mark.parametrize("prefix", ["", "/", "a/", "/a", "a//b", "a/+", "#", "$SYS/x", "a\x07b", "p" * 1025])
def test_a_prefix_that_is_no_topic_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        MqttSettings(kind="mqtt", host="h", prefix=prefix)


def test_what_cannot_be_together_is_named(tmp_path: Path) -> None:
    plant = "  plant:\n    kind: mqtt\n    host: h\n    password: x\n    tls: {cert: x.pem}\n"
    text = f"{plant}  other: {{kind: mqtt, host: h}}\n"
    assert mistakes(tmp_path, text) == [
        "8:15: needs `user`, whose password it is",
        "9:10: needs both `cert` and `key` if the broker asks for a certificate, or neither",
        "10:3: coserve is that of plant at the same broker: each needs its own",
    ]


def test_the_environment_names_a_consumer_too(tmp_path: Path) -> None:
    environ = {"COSERVE_CONSUMERS_PLANT_HOST": "192.0.2.7", "COSERVE_CONSUMERS_PLANT_SEND": "[generations]"}
    plant = a_config(tmp_path, "  plant: {kind: mqtt, host: broker}\n", environ).consumers["plant"]
    assert (plant.host, plant.send) == ("192.0.2.7", ["generations"])


def test_check_names_the_files_that_cannot_be_used(tmp_path: Path) -> None:
    pytest.importorskip("aiomqtt")
    text = "  plant:\n    kind: mqtt\n    host: broker\n    user: u\n    password: word\n    tls: {ca: nothing.pem}\n"
    config = a_config(tmp_path, text)
    problems = consumer_problems(tmp_path / "coserve.yaml", config)
    assert [line.split("coserve.yaml:")[1].split(": ", 1)[0] for line in problems] == ["9:15", "10:15"]
    assert "No such file" in problems[0]
    (tmp_path / "word").write_text("two\nlines")
    (tmp_path / "word").chmod(0o600)
    assert "expected one line" in consumer_problems(tmp_path / "coserve.yaml", config)[0]


def test_check_says_that_credentials_are_not_set_here(tmp_path: Path) -> None:
    text = "  plant: {kind: mqtt, host: broker, user: u, password: $CREDENTIALS_DIRECTORY/plant}\n"
    problems = consumer_problems(tmp_path / "coserve.yaml", a_config(tmp_path, text))
    assert any("$CREDENTIALS_DIRECTORY is not set here" in line for line in problems)


def test_a_password_that_crosses_the_network_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "coserve.yaml"
    text = "  plant: {kind: mqtt, host: 192.0.2.7, user: u, password: x}\n"
    assert "crosses the network unencrypted" in consumer_warnings(path, a_config(tmp_path, text))[0]
    for well in (text.replace("192.0.2.7", "127.0.0.1"), text.replace("user: u", "tls: {}, user: u")):
        assert consumer_warnings(path, a_config(tmp_path, well)) == []


def test_the_service_gets_its_secrets_its_folder_and_the_network(tmp_path: Path) -> None:
    text = (
        "  plant: {kind: mqtt, host: 192.0.2.7, user: u, password: $CREDENTIALS_DIRECTORY/plant,"
        " tls: {cert: $CREDENTIALS_DIRECTORY/line.pem, key: $CREDENTIALS_DIRECTORY/line.key}}\n"
    )
    config = a_config(tmp_path, text)
    assert credentials(config) == ["plant", "line.pem", "line.key"]
    assert drop_ins(config)["network.conf"]
    assert any(config.positions.is_relative_to(folder) for folder in written_folders(config))
    here = a_config(tmp_path, "  plant: {kind: mqtt, host: 127.0.0.1}\n")
    assert not drop_ins(here)["network.conf"]


def test_without_the_extra_check_and_process_say_which_to_install(tmp_path: Path) -> None:
    a_config(tmp_path, "  plant: {kind: mqtt, host: 127.0.0.1}\n")
    code = (
        "import sys; sys.modules['aiomqtt'] = None\n"
        "from pathlib import Path\n"
        "from daemon.config.settings import load_config\n"
        "from daemon.delivery.deliveries import consumer_problems\n"
        "path = Path(sys.argv[1]); print(consumer_problems(path, load_config(path))[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "coserve.yaml")], capture_output=True, text=True, check=True
    )
    assert "coserve.yaml:5:17: aiomqtt is not installed; this consumer needs the extra `mqtt`" in done.stdout
    assert "--editable '.[mqtt]'" in done.stdout


def test_a_consumer_that_is_not_configured_is_named(tmp_path: Path) -> None:
    a_config(tmp_path, "  plant: {kind: mqtt, host: 127.0.0.1}\n")
    command = [sys.executable, "-m", "daemon.delivery", str(tmp_path / "coserve.yaml"), "office"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "there is no consumer office among `consumers`: plant" in done.stderr


def test_what_the_daemon_says_of_a_consumer(tmp_path: Path) -> None:
    path = tmp_path / "coserve.yaml"
    deliveries = Deliveries(a_config(tmp_path, "  plant: {kind: mqtt, host: 127.0.0.1}\n"), path)
    (spec,) = deliveries.children(7)
    status_page = SharedStatusPage(spec.pass_fds[0])
    row = {"name": "plant", "kind": "mqtt", "position": None, "behind": None, "missed": 0}
    running, waiting = {"name": spec.name, "state": "running"}, {"name": spec.name, "state": "waiting"}
    assert deliveries.status(9, [running]) == [row | {"state": "waiting", "last_error": None}]
    ended = waiting | {"last_end": "exit status 2"}
    assert deliveries.status(9, [ended])[0]["last_error"] == "its process ended: exit status 2"
    written = {"position": 4, "state": "connected", "missed": 2, "last_error": None}
    status_page.write(written)
    assert deliveries.status(9, [running])[0] == row | written | {"behind": 5}
    status = deliveries.status(9, [waiting | {"last_end": "killed by SIGKILL"}])[0]
    assert (status["state"], status["last_error"]) == ("waiting", "its process ended: killed by SIGKILL")
    assert json.dumps(status)
    deliveries.close()


def test_a_backup_takes_positions_along_and_leaves_passwords_where_they_are(tmp_path: Path) -> None:
    experts = ROOT / "tests/tools/backup/line"
    for name in ("catalog.yaml", "R0402.safetensors"):
        shutil.copy(experts / name, tmp_path / name)
    for name in ("rules.yaml", "secret", "ca.pem", "line.pem", "line.key"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    tls = "{ca: ca.pem, cert: line.pem, key: line.key}"
    config = a_config(tmp_path, f"  plant: {{kind: mqtt, host: h, user: u, password: secret, tls: {tls}}}\n")
    PositionFile(config.positions, "plant").save(DeliveryPosition(7))
    contents = contents_of(tmp_path / "coserve.yaml", with_secrets=False, environ={})
    names = {part.name for part in contents.parts}
    assert {"consumers/plant.position", "ca.pem", "line.pem"} <= names
    assert not {"secret", "line.key"} & names
    everything = contents_of(tmp_path / "coserve.yaml", with_secrets=True, environ={})
    assert {part.name for part in everything.parts if part.is_secret} == {"secret", "line.key"}
