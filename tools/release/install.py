"""Installs CoServe for `make`: checks up front what would fail later, then runs pip and shows its progress.

The Python that makes the virtual environment runs it, so it imports nothing of ours and parses in Python 3.8.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
#: Gigabytes of disk that an installation takes: with PyTorch for CPUs, and with CUDA.
_ROOM_GB, _ROOM_CUDA_GB = 4, 9
_PIP_OPTIONS = ("--disable-pip-version-check", "--only-binary", ":all:", "--constraint", str(CONSTRAINTS))
#: Seconds between two progress lines, on a terminal and in a log.
_TERMINAL_EVERY_S, _LOG_EVERY_S = 1.0, 15.0
_STEPS = re.compile(r"^\s*(Collecting \S+|Downloading \S+|Installing collected packages)", re.MULTILINE)


class InstallError(Exception):
    """The installation cannot succeed; the text says what to do."""


def main() -> None:
    """Install into the virtual environment that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path, help="the virtual environment to make or to reuse")
    parser.add_argument("--extras", default="", help="extras of pyproject.toml, such as dev,release")
    options = parser.parse_args()
    try:
        install(options.venv, options.extras)
    except InstallError as error:
        sys.exit(f"make: {error}")
    except OSError as error:
        sys.exit(f"make: {error}. Correct that, and run the same command again.")
    except KeyboardInterrupt:
        sys.exit("make: interrupted; the same command goes on.")


def install(venv: Path, extras: str) -> None:
    """Check what an installation needs, then install. Raises InstallError."""
    check_python(sys.version_info[:3])
    for folder in (ROOT, venv.resolve().parent):
        check_writable(folder)
    has_gpu, lacks_torch = Path("/dev/nvidiactl").exists(), not has_torch(venv)
    if lacks_torch:
        check_room(venv.resolve().parent, _ROOM_CUDA_GB if has_gpu else _ROOM_GB)
    python = make_environment(venv)
    index = ["--extra-index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    if lacks_torch and takes_cuda(python, index) and not has_gpu:
        check_room(venv.resolve().parent, _ROOM_CUDA_GB)
        print(
            "This PC has no NVIDIA GPU, and pip takes PyTorch with CUDA: 5 GB more, and some minutes. To avoid that,"
            " press Ctrl-C and name PyTorch's index of CPU wheels (pytorch.org, Get started):"
            " make install TORCH_INDEX=URL"
        )
    run_pip(python, [*index, "--editable", f".[{extras}]" if extras else "."])


def check_python(version: "tuple[int, ...]") -> None:
    if version < (3, 11):
        found = ".".join(map(str, version))
        raise InstallError(f"CoServe needs Python 3.11 or newer; this is {found}. Name another: make PYTHON=python3.12")


def check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK):
        advice = "give this user the right to, or copy CoServe to a folder of your own and run make there"
        raise InstallError(f"{folder} cannot be written to: {advice}.")


def has_torch(venv: Path) -> bool:
    """Return True if the PyTorch of constraints.txt is installed: what else may be missing is small."""
    version = re.search(r"^torch==(\S+)$", CONSTRAINTS.read_text("utf-8"), re.MULTILINE)
    assert version, f"{CONSTRAINTS} names no torch"
    return any(venv.glob(f"lib/python*/site-packages/torch-{version[1]}*.dist-info/RECORD"))


def check_room(folder: Path, need_gb: float) -> None:
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < need_gb:
        raise InstallError(f"{folder} has {free_gb:.1f} GB of free disk; CoServe needs {need_gb} GB. Make room.")


def make_environment(venv: Path) -> Path:
    """Make the virtual environment unless it works, and return its Python. Raises InstallError."""
    python = venv / "bin" / "python"
    if python.exists() and run(python, "-m", "pip", "--version").returncode == 0:
        if run(python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))").returncode:
            raise InstallError(f"{venv} has a Python older than 3.11. Delete it, and run the same command again.")
        return python
    made = run(sys.executable, "-m", "venv", "--clear", venv)
    if made.returncode:
        package = "python{}.{}-venv".format(*sys.version_info)
        said = (made.stdout + made.stderr).strip()[-300:]
        raise InstallError(
            f"{sys.executable} cannot make a virtual environment; on Debian and Ubuntu: apt-get install {package}."
            f" It said: {said}"
        )
    return python


def takes_cuda(python: Path, index: "list[str]") -> bool:
    """Return True if pip would take PyTorch with CUDA. Raises InstallError if no package index answers."""
    options = ["--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--retries", "1", "--timeout", "20"]
    asked = run(python, "-m", "pip", "install", *options, *_PIP_OPTIONS, "--report", "-", *index, "torch")
    if asked.returncode:
        raise InstallError(
            "pip finds no PyTorch for this PC. Connect it to the network, or set PIP_INDEX_URL to a mirror; for a PC"
            " without a network run `make bundle` on another one (docs/service.md)."
            f" pip said: {last_error(asked.stderr)}"
        )
    (torch,) = json.loads(asked.stdout)["install"]
    return any(map(is_cuda_here, torch["metadata"].get("requires_dist", [])))


def is_cuda_here(requirement: str) -> bool:
    """Return True for a library of CUDA that PyTorch needs on a machine of this type."""
    is_here = "platform_machine" not in requirement or platform.machine() in requirement
    return re.match(r"nvidia-|cuda-", requirement) is not None and is_here and "extra ==" not in requirement


def run_pip(python: Path, what: "list[str]") -> None:
    """Install with pip, whose output goes to build/install.log, and show progress. Raises InstallError."""
    log = ROOT / "build" / "install.log"
    log.parent.mkdir(exist_ok=True)
    print("Installing CoServe and PyTorch: one to three minutes with a quick connection, once.", flush=True)
    began_s = time.monotonic()
    command = [python, "-m", "pip", "install", "--progress-bar", "off", *_PIP_OPTIONS, *what]
    with log.open("w", encoding="utf-8") as output:
        pip = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)  # noqa: S603
        try:
            show_progress(pip, log, began_s)
        except BaseException:
            pip.terminate()
            raise
    if pip.returncode:
        raise InstallError(
            f"pip could not install CoServe ({log} has all it said): {last_error(log.read_text('utf-8'))}"
        )
    print(f"Installed in {time.monotonic() - began_s:.0f} s.")


def show_progress(pip: "subprocess.Popen[bytes]", log: Path, began_s: float) -> None:
    """Print progress every few seconds until pip ends; a terminal shows it on one line."""
    is_terminal = sys.stdout.isatty()
    while True:
        try:
            pip.wait(_TERMINAL_EVERY_S if is_terminal else _LOG_EVERY_S)
            break
        except subprocess.TimeoutExpired:
            steps = _STEPS.findall(log.read_text(encoding="utf-8", errors="replace")) or ["starting"]
            packages = sum(step.startswith("Collecting") for step in steps)
            step = "unpacking them, for about a minute" if steps[-1].startswith("Installing") else steps[-1][:60]
            text = f"  {time.monotonic() - began_s:3.0f} s, {packages} packages: {step}"
            print(text.ljust(79) if is_terminal else text, end="\r" if is_terminal else "\n", flush=True)
    if is_terminal:
        print(" " * 79, end="\r")


def run(*command: "Path | str") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)  # noqa: S603


def last_error(text: str) -> str:
    """Return pip's last line that begins with ERROR, or its last line if there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["nothing"]
    return ([line for line in lines if line.startswith("ERROR")] or lines)[-1]


if __name__ == "__main__":
    main()
