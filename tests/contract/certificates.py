"""Certificates for tests: an authority, and for each PC a certificate that it signed."""

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

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
