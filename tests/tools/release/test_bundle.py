"""The bundle with our own wheel and stand-ins for everything else; `make test-bundle` does it with all wheels."""

import ensurepip
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from email import message_from_bytes
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.lines import a_line
from tools.release.bundle import EXTRAS, client_wheel, own_wheel, write_bundle

pytestmark = pytest.mark.test_all

SITE = sysconfig.get_path("purelib")


def a_stand_in(name: str, folder: Path) -> None:
    """A wheel of the name and version that is installed here, with nothing in it."""
    normal, number = name.replace("-", "_"), version(name).split("+")[0]
    info = f"{normal}-{number}.dist-info"
    with zipfile.ZipFile(folder / f"{normal}-{number}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked bundle."""
    pip = list(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"))
    if not pip:
        pytest.skip("this Python has no wheel of pip: apt-get install python3-venv")
    folder = tmp_path_factory.mktemp("bundle")
    wheels = folder / "wheels"
    wheels.mkdir()
    own = own_wheel(wheels)
    shutil.copy(pip[0], wheels)
    with zipfile.ZipFile(own) as opened:
        (metadata,) = (opened.read(name) for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
    for line in message_from_bytes(metadata).get_all("Requires-Dist", []):
        requirement = Requirement(line)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *EXTRAS)):
            a_stand_in(requirement.name, wheels)
    with tarfile.open(write_bundle(wheels.glob("*.whl"), client_wheel(folder), folder)) as tar:
        tar.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.name.startswith("coserve-") and path.is_dir())


def install(bundle: Path, prefix: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(bundle / "install.sh"), "--prefix", str(prefix), *arguments],
        env={"PATH": f"{Path(sys.executable).resolve().parent}:{os.environ['PATH']}", "PYTHONPATH": SITE},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def coserve(prefix: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The installed command, with the libraries of this environment behind it (theirs are stand-ins)."""
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": SITE, "COLUMNS": "200"}
    command = [str(prefix / "usr/local/bin/coserve"), *arguments]
    return subprocess.run(command, env=environ, cwd=prefix, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.promise("A service of systemd", "The bundle installs without a network")
def test_the_bundle_installs_into_an_empty_prefix_and_what_it_installed_works(
    bundle: Path, tmp_path: Path, experts_folder: Path
) -> None:
    config = a_line(tmp_path / "line", experts_folder)
    prefix = tmp_path / "prefix"
    done = install(bundle, prefix, str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "install-service" in coserve(prefix, "--help").stdout
    check = coserve(prefix, "check", str(config))
    assert (check.returncode, "No mistakes found" in check.stdout) == (0, True), check.stdout + check.stderr
    (environment,) = (prefix / "opt/coserve").iterdir()
    unit = (prefix / "etc/systemd/system/coserve.service").read_text()
    assert f"ExecStart={environment}/bin/coserve run {config}\n" in unit
    assert (environment / "share/coserve/docs/service.md").is_file()
    program = (
        "from daemon.host.machine import foreign_owners; import daemon, os\n"
        "from daemon.storage.database.migrate import *\n"
        "print(foreign_owners(), os.path.dirname(daemon.__file__))"
    )
    guard = subprocess.run(
        [environment / "bin/python", "-c", program], env={"PYTHONPATH": SITE}, cwd=prefix,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert guard.stdout.strip().startswith(f"{{}} {environment}/lib"), guard.stdout + guard.stderr
    again = install(bundle, prefix, str(config))
    assert again.returncode == 0, again.stdout + again.stderr
    assert "wrote" not in again.stdout
    assert coserve(prefix, "install-service", "--remove", "--prefix", str(prefix)).returncode == 0


def lose_a_wheel(bundle: Path) -> None:
    next(bundle.glob("wheels/typer-*.whl")).unlink()
    sums = (bundle / "SHA256SUMS").read_text().splitlines(keepends=True)
    (bundle / "SHA256SUMS").write_text("".join(line for line in sums if "typer" not in line))


def flip_a_bit(bundle: Path) -> None:
    wheel = next(bundle.glob("wheels/coserve-*.whl"))
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 1
    wheel.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lose_a_wheel, "does not hold all that it needs"),
        (flip_a_bit, "the bundle is damaged"),
        (lambda bundle: (bundle / "made-for").write_text(f"0.1.0 2.7 {os.uname().machine}\n"), "for Python 2.7"),
    ],
)
def test_a_bundle_that_is_incomplete_damaged_or_for_another_python_is_refused(
    bundle: Path, tmp_path: Path, harm: Callable[[Path], None], message: str
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    harm(copy)
    done = install(copy, tmp_path / "prefix")
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "prefix/usr").exists()
