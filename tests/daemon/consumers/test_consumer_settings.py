"""The section `consumers`: mistakes with their lines, files that must be there, and the text without the extra."""

import subprocess
import sys
from pathlib import Path

import pytest

from daemon.config.settings import Config, load_config
from daemon.consumers.kinds import KINDS
from daemon.delivery.deliveries import consumer_problems, consumer_warnings
from daemon.errors import ConfigError

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
    keys = "host: a:70000|prefix: /a|pasword: x|send: [board]|port: 8883|retain_boards: 200y"
    problems = mistakes(tmp_path, "  plant:\n    kind: mqtt\n" + "".join(f"    {key}\n" for key in keys.split("|")))
    assert [problem.split(":")[0] for problem in problems] == [str(line) for line in range(7, 13)]
    assert any("did you mean `password`?" in problem for problem in problems)
    (unknown,) = mistakes(tmp_path, "  plant:\n    host: h\n    kind: mqqt\n")
    assert unknown.startswith("7:11: expected ")
    assert all(repr(kind) in unknown for kind in KINDS)
    assert mistakes(tmp_path, "  plant: {host: h}\n") == ["5:3: missing key `kind`"]
    assert mistakes(tmp_path, "  plant: 3\n") == ["5:10: expected a mapping (`key: value` lines), found `3`"]


@pytest.mark.parametrize(
    ("settings", "server"),
    [
        ("host: broker.plant.lan", ("broker.plant.lan", 1883)),
        ("host: broker.plant.lan, tls: {}", ("broker.plant.lan", 8883)),
        ("host: '192.0.2.7:1884', tls: {}", ("192.0.2.7", 1884)),
        ("host: '2001:db8::7'", ("2001:db8::7", 1883)),
        ("host: '[2001:db8::7]:8884'", ("2001:db8::7", 8884)),
    ],
)
def test_a_broker_has_the_port_after_its_host_or_the_usual_one(
    tmp_path: Path, settings: str, server: tuple[str, int]
) -> None:
    plant = a_config(tmp_path, f"  plant: {{kind: mqtt, {settings}}}\n").consumers["plant"]
    assert plant.servers() == [server]


def test_a_hub_takes_a_line_once_and_by_a_name_that_fits_its_tables(tmp_path: Path) -> None:
    hub = "{kind: plant, database: 'postgresql://hub.lan/plant'}"
    text = f"  hub: {hub}\n  again: {hub}\nline: Halle 3\n"
    named, twice = "a hub takes names such as line-3", "is that of hub too: one of them is enough"
    assert [problem.split(": ", 1)[1][: len(named)] for problem in mistakes(tmp_path, text)][:1] == [named]
    assert any(twice in problem for problem in mistakes(tmp_path, text))


def test_what_cannot_be_together_is_named(tmp_path: Path) -> None:
    plant = "  plant:\n    kind: mqtt\n    host: h\n    password: x\n    tls: {cert: x.pem}\n"
    text = f"{plant}  other: {{kind: mqtt, host: h:8883}}\n"
    assert mistakes(tmp_path, text) == [
        "8:15: needs `user`, whose password it is",
        "9:10: needs both `cert` and `key` if the broker asks for a certificate, or neither",
        "10:3: coserve is that of plant at the same broker: each needs its own",
    ]


def test_check_names_the_files_that_cannot_be_used(tmp_path: Path) -> None:
    pytest.importorskip("paho")
    text = "  plant:\n    kind: mqtt\n    host: broker\n    user: u\n    password: word\n    tls: {ca: nothing.pem}\n"
    config = a_config(tmp_path, text)
    problems = consumer_problems(tmp_path / "coserve.yaml", config)
    assert [line.split("coserve.yaml:")[1].split(": ", 1)[0] for line in problems] == ["9:15", "10:15"]
    assert "No such file" in problems[0]
    (tmp_path / "word").write_text("two\nlines")
    (tmp_path / "word").chmod(0o600)
    assert "expected one line" in consumer_problems(tmp_path / "coserve.yaml", config)[0]


def test_a_password_that_crosses_the_network_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "coserve.yaml"
    text = "  plant: {kind: mqtt, host: 192.0.2.7, user: u, password: x}\n"
    assert "crosses the network unencrypted" in consumer_warnings(path, a_config(tmp_path, text))[0]
    for well in (text.replace("192.0.2.7", "127.0.0.1"), text.replace("user: u", "tls: {}, user: u")):
        assert consumer_warnings(path, a_config(tmp_path, well)) == []


def test_without_the_extra_check_and_process_say_which_to_install(tmp_path: Path) -> None:
    a_config(tmp_path, "  plant: {kind: mqtt, host: 127.0.0.1}\n")
    code = (
        "import sys; sys.modules['paho'] = None\n"
        "from pathlib import Path\n"
        "from daemon.config.settings import load_config\n"
        "from daemon.delivery.deliveries import consumer_problems\n"
        "path = Path(sys.argv[1]); print(consumer_problems(path, load_config(path))[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "coserve.yaml")], capture_output=True, text=True, check=True
    )
    assert "coserve.yaml:5:17: paho.mqtt is not installed; this consumer needs the extra `mqtt`" in done.stdout
    assert "--editable '.[mqtt]'" in done.stdout
