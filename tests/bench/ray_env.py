"""Ray Serve's own environment: made with venv and pip the first time, then used as it is.

Only Ray and what it needs is installed there; torch and the frameworks are this environment's, the same files, so that
both sides compute with the same kernels. They come last on its path: Ray's own versions win.
"""

import json
import shutil
import site
import subprocess
import sys
from pathlib import Path

RAY_VERSION = "2.60.0"
_REQUIREMENT = f"ray[serve]=={RAY_VERSION}"
_INSTALL_WITHIN_S = 900.0


class RayUnavailableError(Exception):
    """The environment could not be made; the text says why."""


def make_environment(folder: Path) -> Path:
    """The environment's Python. Raises RayUnavailableError."""
    python = folder / "bin" / "python"
    noted = folder / "made.json"
    wanted = json.dumps({"requirement": _REQUIREMENT, "beside": site.getsitepackages()})
    if python.is_file() and noted.is_file() and noted.read_text(encoding="utf-8") == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    _call(sys.executable, "-m", "venv", str(folder))
    _call(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", _REQUIREMENT)
    packages = next((folder / "lib").glob("python*/site-packages"))
    lines = [f"import site; site.addsitedir({beside!r})" for beside in site.getsitepackages()]
    (packages / "beside.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    noted.write_text(wanted, encoding="utf-8")
    return python


def _call(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_WITHIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RayUnavailableError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise RayUnavailableError(f"{' '.join(command)} failed: {done.stderr.strip()[-600:]}")
