"""Machines that bring their own torch and have no network: collect wheels elsewhere, and run from them there.

    python tests/gpu/own_torch.py collect build/gpu-wheels            # on a Linux PC with a network; --opencv: see below
    python3 tests/gpu/own_torch.py install build/gpu-wheels build/gpu-venv   # on the machine: Python 3.12 without pip

The machine brings torch 2.11 or newer with torchvision, NumPy and Pillow, and OpenCV: its wheel alone has 50 MB. With
`--opencv` it is collected too, instead of what only the daemon needs, and the stage `line` cannot run. Standard library
only.
"""

import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 60_000_000
_PYTHON = (3, 12)
_TORCH = (2, 11)
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
#: What benchmarks and tests import, beside what the machine brings.
BASE = (
    *("annotated-doc", "annotated-types", "iniconfig", "markdown-it-py", "mdurl", "nvidia-ml-py"),
    *("packaging", "pluggy", "psutil", "pydantic", "pydantic-core", "Pygments", "pytest", "pytest-timeout", "PyYAML"),
    *("pyzmq", "rich", "safetensors", "shellingham", "simplejpeg", "structlog", "tqdm", "typer"),
    *("typing-extensions", "typing-inspection", "tzdata", "ultralytics"),
)
#: What only the daemon imports, and tests that need no GPU.
DAEMON = (
    *(
        "hypothesis",
        "sortedcontainers",
        "alembic",
        "cffi",
        "cryptography",
        "greenlet",
        "logging-journald",
        "Mako",
        "prometheus-client",
        "pycparser",
    ),
    "SQLAlchemy",
)
#: The last one below 50 MB; the constraints have a newer one, which is larger.
OPENCV = "opencv-python-headless==4.10.0.84"
_BROUGHT = ("torch", "torchvision", "numpy", "PIL", "cv2")


def collect(folder: Path, *, opencv: bool) -> None:
    """Download the wheels into `folder`. Raises RuntimeError if they have more than `MAX_BYTES`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.whl"):
        file.unlink()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(folder),
    ]
    command += ["--implementation", "cp", "--python-version", ".".join(map(str, _PYTHON))]
    command += [f"--platform={platform}" for platform in _PLATFORMS]
    names = [*BASE, *(() if opencv else DAEMON)]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *names], check=True)
    if opencv:
        subprocess.run([*command, OPENCV], check=True)
    sizes = {file.name: file.stat().st_size for file in folder.glob("*.whl")}
    total_bytes = sum(sizes.values())
    print(f"{folder}: {len(sizes)} wheels, {total_bytes / 1e6:.1f} MB")
    if total_bytes > MAX_BYTES:
        raise RuntimeError(
            f"more than {MAX_BYTES / 1e6:.0f} MB; the largest is {max(sizes, key=lambda name: sizes[name])}"
        )


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
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
    # What the wheels have goes first; then this checkout; then the packages of the machine, with their own .pth files.
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
        if done.returncode and "Error" in (reason := done.stderr.strip().rpartition("\n")[2]) and name != "torchvision":
            advice = "; make gpu-wheels OPENCV=1 collects it" if name == "cv2" else ""
            raise RuntimeError(f"this machine has no usable {name} ({reason}){advice}")
    print(f"{folder}: {len(list(wheels.glob('*.whl')))} wheels beside torch {torch.__version__} of {sys.executable}")


if __name__ == "__main__":
    try:
        if sys.argv[1] == "collect":
            collect(Path(sys.argv[2]), opencv="--opencv" in sys.argv)
        else:
            install(Path(sys.argv[2]), Path(sys.argv[3]))
    except (RuntimeError, OSError, subprocess.CalledProcessError) as problem:
        raise SystemExit(f"{Path(__file__).name}: {problem}") from None
