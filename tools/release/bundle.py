"""`make bundle`: one archive with everything that a PC without a network needs to run CoServe.

It holds our wheel and those of all its dependencies, pip, `install.sh`, and a checksum of each. It is for the Python
version and the machine type that it was made with.
"""

import hashlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from daemon.units import size_text

_ROOT = Path(__file__).resolve().parents[2]
#: What our wheel is built from. A copy of it, for setuptools leaves folders behind and packs what lies in them again.
_SOURCES = ("daemon", "experts", "routing_rules", "tools", "systemd", "docs", "pyproject.toml", "README.md", "LICENSE")
_SCRIPT_MODE = 0o755
#: What a PC under the line gets beside the core: it has no network to fetch it by later.
EXTRAS = ("dashboard", "export", "mqtt", "postgresql")


def own_wheel(folder: Path) -> Path:
    """Build our wheel into `folder`, with the setuptools of this environment."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        for name in _SOURCES:
            source = _ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(copy))
    return next(folder.glob("coserve-*.whl"))


def dependencies(own: Path, folder: Path) -> None:
    """Put the wheels of everything that ours needs with its extras, and of pip, into `folder`, over the network."""
    constraints = str(_ROOT / "constraints.txt")
    _pip("wheel", "--wheel-dir", str(folder), "--constraint", constraints, f"{own}[{','.join(EXTRAS)}]", "pip")


def write_bundle(wheels: Iterable[Path], folder: Path) -> Path:
    """The archive of these wheels, made in `folder`."""
    name = f"coserve-{version('coserve')}"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    archive = folder / f"{name}-py{python}-{platform.machine()}.tar"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        tree = Path(scratch) / name
        (tree / "wheels").mkdir(parents=True)
        for wheel in wheels:
            (tree / "wheels" / wheel.name).hardlink_to(wheel)
        shutil.copy(_ROOT / "systemd" / "install.sh", tree)
        shutil.copy(_ROOT / "docs" / "service.md", tree)
        shutil.copy(_ROOT / "LICENSE", tree)
        (tree / "install.sh").chmod(_SCRIPT_MODE)
        (tree / "made-for").write_text(f"{version('coserve')} {python} {platform.machine()}\n", encoding="ascii")
        files = sorted(path for path in tree.rglob("*") if path.is_file())
        sums = "".join(f"{_sha256(path)}  {path.relative_to(tree)}\n" for path in files)
        (tree / "SHA256SUMS").write_text(sums, encoding="utf-8")
        with tarfile.open(archive, "w") as tar:  # wheels are compressed already
            tar.add(tree, arcname=name)
    return archive


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet"], check=True)  # noqa: S603 - our own command


def main() -> None:
    """Make the bundle under `build/` and say where it is."""
    build = _ROOT / "build"
    wheels = build / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    try:
        dependencies(own_wheel(wheels), wheels)
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None  # pip has said why
    archive = write_bundle(wheels.glob("*.whl"), build)
    print(f"{archive}  {size_text(archive.stat().st_size)}: unpack it on the line's PC and run install.sh")


if __name__ == "__main__":
    main()
