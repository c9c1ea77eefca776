"""TLS with a real mosquitto: certificates that are checked and shown, and the texts of mistakes."""

import asyncio
import gc
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paho")

from daemon.consumers.mqtt.consumer import Mqtt
from daemon.consumers.mqtt.settings import MqttSettings
from daemon.consumers.protocol import DeliveryError
from tests.broker import Broker, mosquitto

pytestmark = [
    pytest.mark.skipif(mosquitto() is None, reason="needs mosquitto: make system-tools"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
]


def openssl(*words: str, folder: Path) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


def an_authority(folder: Path, name: str) -> None:
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key", folder=folder)
    days = ["-days", "2", "-subj", f"/CN={name}"]
    openssl("req", "-x509", "-new", "-key", f"{name}.key", "-out", f"{name}.pem", *days, folder=folder)


def a_certificate(folder: Path, name: str, authority: str, names: str) -> None:
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key", folder=folder)
    openssl("req", "-new", "-key", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}", folder=folder)
    (folder / f"{name}.ext").write_text(f"subjectAltName={names}\n")
    signed = ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-days", "2"]
    ours = ["-in", f"{name}.csr", "-out", f"{name}.pem", "-extfile", f"{name}.ext"]
    openssl("x509", "-req", *ours, *signed, folder=folder)
    (folder / f"{name}.key").chmod(0o600)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    an_authority(folder, "plant")
    an_authority(folder, "other")
    a_certificate(folder, "broker", "plant", "IP:127.0.0.1")
    a_certificate(folder, "elsewhere", "plant", "DNS:broker.elsewhere")
    a_certificate(folder, "line", "plant", "DNS:line")
    a_certificate(folder, "stranger", "other", "DNS:line")
    return folder


@pytest.fixture(scope="module")
def broker(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """It asks for a certificate of the plant's authority."""
    with Broker(tmp_path_factory.mktemp("broker"), *_tls(keys, "broker"), "require_certificate true") as broker:
        yield broker


def _tls(keys: Path, name: str) -> list[str]:
    return [f"cafile {keys}/plant.pem", f"certfile {keys}/{name}.pem", f"keyfile {keys}/{name}.key"]


def settings(port: int, keys: Path, tls: dict[str, str] | None, **more: Any) -> MqttSettings:
    files = None if tls is None else {name: keys / file for name, file in tls.items()}
    return MqttSettings.model_validate({"kind": "mqtt", "host": f"127.0.0.1:{port}", "tls": files, **more})


def open_error(settings: MqttSettings) -> DeliveryError | None:
    """Return the error of opening a connection, None if it stands."""

    async def open_and_close() -> None:
        consumer = Mqtt(settings, "coserve-test", Path("alarms.json"))
        await consumer.open(0)
        await consumer.deliver(())
        await consumer.close()

    trouble = None
    try:
        asyncio.run(open_and_close())
    except DeliveryError as error:
        trouble = DeliveryError(error.reason, error.state)
    with warnings.catch_warnings():  # paho leaves the socket of a handshake that failed to the collector
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    return trouble


LINE = {"ca": "plant.pem", "cert": "line.pem", "key": "line.key"}


def test_both_show_their_certificates(keys: Path, broker: Broker) -> None:
    assert open_error(settings(broker.port, keys, LINE)) is None


@pytest.mark.parametrize(
    ("tls", "state", "words"),
    [
        (LINE | {"ca": "other.pem"}, "refused", "certificate in certificate chain"),
        ({}, "refused", "certificate in certificate chain"),
        ({"ca": "plant.pem"}, "waiting", "does it want a certificate of ours?"),
        (LINE | {"cert": "stranger.pem", "key": "stranger.key"}, "waiting", "does it want a certificate of ours?"),
        (None, "waiting", "does it want TLS?"),
        (LINE | {"ca": "nothing.pem"}, "refused", "nothing.pem cannot be used: No such file"),
        (LINE | {"ca": "line.ext"}, "refused", "line.ext cannot be used"),
        (LINE | {"cert": "broker.pem"}, "refused", "broker.pem and"),
    ],
    ids=["other authority", "system", "no certificate", "stranger", "no tls", "no file", "no pem", "not its key"],
)
def test_a_mistake_is_refused_by_name(
    keys: Path, broker: Broker, tls: dict[str, str] | None, state: str, words: str
) -> None:
    error = open_error(settings(broker.port, keys, tls))
    assert error is not None
    assert words in error.reason
    assert error.state == state


def test_a_broker_of_another_name_is_refused(keys: Path, tmp_path: Path) -> None:
    with Broker(tmp_path, *_tls(keys, "elsewhere")) as elsewhere:
        error = open_error(settings(elsewhere.port, keys, {"ca": "plant.pem"}))
    assert error is not None
    assert "IP address mismatch" in error.reason
    assert error.state == "refused"


def test_a_key_that_others_can_read_and_one_with_a_passphrase_are_refused(keys: Path, tmp_path: Path) -> None:
    for file in ("plant.pem", "line.pem", "line.key"):
        shutil.copy(keys / file, tmp_path / file)
    (tmp_path / "line.key").chmod(0o640)
    problems = settings(1, tmp_path, LINE).file_problems()
    assert [key for key, _ in problems] == [("tls", "key")]
    assert "line.key can be read by its group: chmod 600 it" in problems[0][1]
    plain, locked = ["-in", str(keys / "line.key")], ["-out", "line.key", "-aes128", "-passout", "pass:secret"]
    openssl("ec", *plain, *locked, folder=tmp_path)
    (tmp_path / "line.key").chmod(0o600)
    problems = settings(1, tmp_path, LINE).file_problems()
    assert "without a passphrase" in problems[0][1]
    assert "secret" not in problems[0][1]
    (tmp_path / "line.pem").unlink()
    expected = (("tls", "cert"), f"{tmp_path / 'line.pem'} cannot be read: No such file or directory")
    assert settings(1, tmp_path, LINE).file_problems() == [expected]
