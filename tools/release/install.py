"""Installs CoServe for `make`: checks up front what would fail late, then makes the environment and runs pip.

The Python that makes the virtual environment runs it, so it imports nothing of ours and parses in Python 3.8.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Gigabytes of disk that an installation takes: with PyTorch for CPUs, and with CUDA.
_ROOM_GB, _ROOM_CUDA_GB = 4, 9


def main() -> None:
    """Install into the virtual environment that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path, help="the virtual environment to make or to reuse")
    parser.add_argument("--extras", default="", help="extras of pyproject.toml, such as dev,release")
    options = parser.parse_args()
    try:
        check_python(sys.version_info[:3])
        check_folder(options.venv.resolve())
        install(make_environment(options.venv), options.extras)
    except KeyboardInterrupt:
        sys.exit("make: interrupted; the same command goes on.")


def check_python(version: "tuple[int, ...]") -> None:
    if version < (3, 11):
        found = ".".join(map(str, version))
        sys.exit(f"make: CoServe needs Python 3.11 or newer; this is {found}. Name another: make PYTHON=python3.12")


def check_folder(venv: Path) -> None:
    """End unless there is the right to write and, where PyTorch is missing, room for it."""
    folder, has_gpu = venv.parent, Path("/dev/nvidiactl").exists()
    if not os.access(folder, os.W_OK):
        advice = "give this user the right to, or copy CoServe to a folder of your own and run make there"
        sys.exit(f"make: {folder} cannot be written to: {advice}.")
    if any(venv.glob("lib/python*/site-packages/torch-*.dist-info/RECORD")):
        return
    need_gb, free_gb = _ROOM_CUDA_GB if has_gpu else _ROOM_GB, shutil.disk_usage(folder).free / 1e9
    if free_gb < need_gb:
        sys.exit(f"make: {folder} has {free_gb:.1f} GB of free disk; CoServe needs {need_gb} GB. Make room.")
    print("Installing CoServe and PyTorch: one to three minutes with a quick connection, once.", flush=True)
    if not has_gpu and not os.environ.get("TORCH_INDEX"):
        print(
            "This PC has no NVIDIA GPU. Where pip takes PyTorch with CUDA all the same (it fetches nvidia-…: 5 GB more,"
            " and some minutes), press Ctrl-C and name PyTorch's index of CPU wheels (pytorch.org, Get started):"
            " make install TORCH_INDEX=URL",
            flush=True,
        )


def make_environment(venv: Path) -> Path:
    """Make the virtual environment unless it works, and return its Python."""
    python, works = venv / "bin" / "python", "import pip, sys; sys.exit(sys.version_info < (3, 11))"
    if python.exists() and run(python, "-c", works) == 0:
        return python
    if run(sys.executable, "-m", "venv", "--clear", venv):
        package = "python{}.{}-venv".format(*sys.version_info)
        sys.exit(
            f"make: {sys.executable} cannot make a virtual environment, as it says above; where ensurepip is not"
            f" available, on Debian and Ubuntu: apt-get install {package}"
        )
    return python


def install(python: Path, extras: str) -> None:
    """Install with pip, which shows its progress."""
    index = ["--extra-index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    options = ["--disable-pip-version-check", "--only-binary", ":all:", "--constraint", str(ROOT / "constraints.txt")]
    if run(python, "-m", "pip", "install", *options, *index, "--editable", f".[{extras}]" if extras else "."):
        sys.exit(
            "make: pip could not install CoServe: its last lines say why. If it finds no package, connect this PC to"
            " the network, or set PIP_INDEX_URL to a mirror; for a PC without a network run `make bundle` on another"
            " one (docs/service.md). The same command goes on."
        )


def run(*command: "Path | str") -> int:
    return subprocess.run(command, cwd=ROOT, check=False).returncode  # noqa: S603


if __name__ == "__main__":
    main()
