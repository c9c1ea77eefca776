"""Machines that bring their own torch and have no network: collect packages elsewhere, and run from them there.

    python tests/gpu/own_torch.py collect build/gpu-wheels    # on a Linux PC with a network
    python3 tests/gpu/own_torch.py install build/gpu-wheels build/gpu-venv    # there; Python 3.12, pip is not needed

The machine brings torch 2.11 or newer with torchvision, NumPy and Pillow. The rest is one archive of unpacked wheels:
OpenCV's alone has 62 MB, and xz packs all of them together into less than that. Standard library only.
"""

import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 60_000_000
_PYTHON = (3, 12)
_TORCH = (2, 11)
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
#: What benchmarks, tests and the daemon import, beside what the machine brings.
PACKAGES = (
    *("annotated-doc", "annotated-types", "cffi", "cryptography", "greenlet", "hypothesis", "iniconfig"),
    *("logging-journald", "markdown-it-py", "mdurl", "nvidia-ml-py", "packaging", "pluggy", "prometheus-client"),
    *("psutil", "pycparser", "pydantic", "pydantic-core", "Pygments", "pytest", "pytest-timeout", "PyYAML", "pyzmq"),
    *("rich", "safetensors", "shellingham", "simplejpeg", "sortedcontainers", "SQLAlchemy", "structlog", "tqdm"),
    *("typer", "typing-extensions", "typing-inspection", "tzdata", "ultralytics"),
)
#: The version in constraints.txt, built without libraries for windows on a screen.
OPENCV = "opencv-python-headless==4.14.0.94"
_ARCHIVE = "packages.tar.xz"
_BROUGHT = ("torch", "numpy", "PIL", "cv2")


def collect(folder: Path, *, opencv: bool) -> None:
    """Write the archive into `folder`, with OpenCV where the machine has none.

    Raises RuntimeError if it has more than `MAX_BYTES`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheels, packages = Path(scratch) / "wheels", Path(scratch) / "packages"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--implementation", "cp", "--python-version", ".".join(map(str, _PYTHON)), "-d", str(wheels)]
        command += [f"--platform={platform}" for platform in _PLATFORMS]
        subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *PACKAGES], check=True)
        if opencv:
            subprocess.run([*command, OPENCV], check=True)
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(packages)  # noqa: S202  a wheel that pip has just downloaded
        with tarfile.open(folder / _ARCHIVE, "w:xz") as archive:
            archive.add(packages, ".")
    size_bytes = (folder / _ARCHIVE).stat().st_size
    if size_bytes > MAX_BYTES:
        raise RuntimeError(f"{size_bytes / 1e6:.1f} MB are more than {MAX_BYTES / 1e6:.0f}: try NO_OPENCV=1")
    print(f"{folder / _ARCHIVE}: {len(PACKAGES) + opencv} packages, {size_bytes / 1e6:.1f} MB")


def install(wheels: Path, folder: Path) -> None:
    """Make an environment of the wheels, this checkout and this Python's own packages. Raises RuntimeError."""
    if sys.version_info[:2] != _PYTHON:
        raise RuntimeError(
            f"the wheels are for Python 3.12, this is {sys.version.split()[0]}: make PYTHON=python3.12 gpu"
        )
    try:
        import torch
    except ImportError as error:
        raise RuntimeError(
            f"{sys.executable} has no torch ({error}): name the Python that has: make PYTHON=… gpu"
        ) from None
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _TORCH:
        raise RuntimeError(f"torch {torch.__version__} is too old: 2.11 or newer is needed")
    venv.create(folder, clear=True, symlinks=True)
    packages = folder / "lib" / f"python{_PYTHON[0]}.{_PYTHON[1]}" / "site-packages"
    with tarfile.open(wheels / _ARCHIVE) as archive:
        archive.extractall(packages, filter="data")
    # What was collected goes first; then this checkout; then the packages of the machine, with their own .pth files.
    own = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    lines = [str(ROOT), str(ROOT / "tools" / "client"), *(f"import site; site.addsitedir({path!r})" for path in own)]
    (packages / "machine.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    facts = packages / f"coserve-{version}.dist-info" / "METADATA"  # the daemon names its version
    facts.parent.mkdir()
    facts.write_text(f"Metadata-Version: 2.1\nName: coserve\nVersion: {version}\n", encoding="utf-8")
    python = folder / "bin" / "python"
    for name in _BROUGHT:
        done = subprocess.run([python, "-c", f"import {name}"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"this machine has no usable {name}: {done.stderr.strip().rpartition(chr(10))[2]}")
    print(f"{folder}: beside torch {torch.__version__} of {sys.executable}")


if __name__ == "__main__":
    try:
        if sys.argv[1] == "collect":
            collect(Path(sys.argv[2]), opencv="--no-opencv" not in sys.argv)
        else:
            install(Path(sys.argv[2]), Path(sys.argv[3]))
    except (RuntimeError, OSError, subprocess.CalledProcessError) as problem:
        raise SystemExit(f"{Path(__file__).name}: {problem}") from None
