"""A cluster whose connections are encrypted: a line judges on another PC, and only its authority's PCs come in."""

import datetime as dt
import ipaddress
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.contract.client import Line
from tests.contract.cluster import THERE, RayCluster, judged_there, short_folder, until_used
from tests.lines import COSERVE_RUN, a_jpeg
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.test_all, pytest.mark.timeout(3600)]


_DAY = dt.timedelta(days=1)


class Authority:
    """An authority of its own, whose files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, folder.name)])
        extension = x509.BasicConstraints(ca=True, path_length=0)
        self._write("ca", self._name, self._key, extension)

    def environment(self, name: str, *addresses: str) -> dict[str, str]:
        """Return the variables that Ray on a PC needs, with a certificate for its addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(each)) for each in addresses])
        self._write(name, x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]), key, names)
        plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        self._file(f"{name}.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *plain))
        return {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": str(self._file(f"{name}.crt")),
            "RAY_TLS_SERVER_KEY": str(self._file(f"{name}.key")),
            "RAY_TLS_CA_CERT": str(self._file("ca.crt")),
        }

    def _file(self, name: str) -> Path:
        return self._folder / name

    def _write(
        self, name: str, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType
    ) -> None:
        now = dt.datetime.now(dt.UTC)
        certificate = (
            x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
            .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
            .sign(self._key, hashes.SHA256())
        )
        self._file(f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def addresses() -> list[str]:
    """Return the addresses that Ray's processes on this PC use: its certificates must name them."""
    from ray.util import get_node_ip_address

    return ["127.0.0.1", get_node_ip_address()]


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def test_a_line_judges_over_tls_and_a_pc_of_another_authority_stays_outside(
    tmp_path: Path, folder: Path, torch_experts_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in Authority(folder / "plant").environment("pc", *addresses()).items():
        monkeypatch.setenv(name, value)
    cluster = RayCluster(folder)
    stranger = cluster.another("pc3", environ=Authority(folder / "other").environment("pc3", *addresses()))
    line = Line(tmp_path, torch_experts_folder, command=COSERVE_RUN, devices=THERE, cluster=cluster.settings)
    try:
        cluster.start()
        with line.service():
            until_used(line)
            line.send(a_jpeg(1), component="P")
            line.idle()
            assert judged_there(line) > 0
        assert stranger.start_once().wait(PATIENCE_S) == 1
        refused = f"the cluster at {cluster.address} cannot be joined: its head does not answer; if that uses TLS, give"
        said = " ".join(stranger.log.read_text().split())
        assert said == f"coserve: {refused} this PC a certificate of the same authority"
    finally:
        stranger.kill()
        cluster.end()
