"""`make bundle`: one archive with everything that a PC without a network needs to run CoServe.

It holds our wheel, that of the client for the PCs of cameras, those of all dependencies, pip, `install.sh`, and a
checksum of each. It is for the Python version and the machine type that it was made with.
"""

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from daemon.units import size_text
from experts.weights import file_sha256

_ROOT = Path(__file__).resolve().parents[2]
#: The sources of our wheel. A copy of them is built: setuptools leaves folders behind, and packs them again next time.
_SOURCES = ("daemon", "experts", "routing_rules", "tools", "systemd", "docs", "pyproject.toml", "README.md", "LICENSE")
_CLIENT_SOURCES = ("coserve_client", "pyproject.toml", "LICENSE")
#: The extras that are always in the bundle: a PC without a network cannot fetch them later.
EXTRAS = ("export", "mqtt", "postgresql")


def own_wheel(folder: Path) -> Path:
    """Build our wheel into `folder`, with the setuptools of this environment."""
    return _build([_ROOT / name for name in _SOURCES], folder)


def client_wheel(folder: Path) -> Path:
    return _build([_ROOT / "tools" / "client" / name for name in _CLIENT_SOURCES], folder)


def _build(sources: Iterable[Path], folder: Path) -> Path:
    with tempfile.TemporaryDirectory() as scratch:
        copy, wheels = Path(scratch) / "sources", Path(scratch) / "wheels"
        copy.mkdir()
        for source in sources:
            if source.is_dir():
                shutil.copytree(source, copy / source.name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy)
        _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(copy))
        (wheel,) = wheels.iterdir()
        return Path(shutil.copy(wheel, folder))


def fetch_dependencies(own: Path, folder: Path) -> None:
    """Put the wheels of all dependencies of `own` with its extras, and of pip, into `folder`, over the network."""
    constraints = str(_ROOT / "constraints.txt")
    _pip("wheel", "--wheel-dir", str(folder), "--constraint", constraints, f"{own}[{','.join(EXTRAS)}]", "pip")


def write_bundle(wheels: Iterable[Path], client: Path, folder: Path) -> Path:
    """Make the archive of these wheels and of the client's in `folder`, and return it."""
    name = f"coserve-{version('coserve')}"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        tree = Path(scratch) / name
        for wheel, place in (*((wheel, "wheels") for wheel in wheels), (client, "client")):
            (tree / place).mkdir(parents=True, exist_ok=True)
            (tree / place / wheel.name).hardlink_to(wheel)
        for file in ("systemd/install.sh", "docs/service.md", "LICENSE"):
            shutil.copy(_ROOT / file, tree)
        (tree / "made-for").write_text(f"{version('coserve')} {python} {platform.machine()}\n", encoding="ascii")
        files = sorted(path for path in tree.rglob("*") if path.is_file())
        sums = "".join(f"{file_sha256(path)}  {path.relative_to(tree)}\n" for path in files)
        (tree / "SHA256SUMS").write_text(sums, encoding="utf-8")
        made = shutil.make_archive(str(folder / f"{name}-py{python}-{platform.machine()}"), "tar", scratch, name)
    return Path(made)  # not compressed: wheels are already


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet"], check=True)  # noqa: S603 - our own command


def main() -> None:
    build = _ROOT / "build"
    wheels = build / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    try:
        client = client_wheel(build)
        fetch_dependencies(own_wheel(wheels), wheels)
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None  # pip has said why
    archive = write_bundle(wheels.glob("*.whl"), client, build)
    print(f"{archive}  {size_text(archive.stat().st_size)}: unpack it on the line's PC and run install.sh")


if __name__ == "__main__":
    main()
