"""The client's own wheel in an environment that has pyzmq and nothing else, at a real line."""

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest

import coserve_client
from tests import ROOT
from tests.lines import a_jpeg, a_line
from tests.simulated import a_service
from tests.waiting import PATIENCE_S
from tools.release.bundle import client_wheel

pytestmark = pytest.mark.test_all

OTHER_PACKAGES = """
import importlib.util, pkgutil, site
print(sorted(module.name for module in pkgutil.iter_modules(site.getsitepackages())))
print([name for name in ("daemon", "numpy", "tools", "torch", "yaml") if importlib.util.find_spec(name)])
"""
TYPED_PROGRAM = """
from pathlib import Path
from coserve_client import NoRoomError, Results, SpoolingPublisher

with SpoolingPublisher("tcp://127.0.0.1:5570", source="camera-1", spool=Path("spool")) as publisher:
    try:
        publisher.publish("i", b"", board={"type": "b", "serial": "S"}, component="R0402")
    except NoRoomError as error:
        print(error)
with Results("tcp://127.0.0.1:5571", intake="tcp://127.0.0.1:5570", since=0) as results:
    for result in results:
        if result["kind"] == "board":
            reveal_type(result["failed"][0]["designator"])
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with the client's wheel, and the pyzmq of this one linked into it."""
    folder = tmp_path_factory.mktemp("client")
    venv.create(folder / "venv")
    python = folder / "venv/bin/python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, client_wheel(folder)], check=True)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    pyzmq = distribution("pyzmq")
    for name in {file.parts[0] for file in pyzmq.files or [] if file.parts[0] not in ("..", "__pycache__")}:
        (site / name).symlink_to(Path(str(pyzmq.locate_file(name))))
    return python


def run(python: Path, program: str, folder: Path) -> str:
    command = [python, "-c", program]
    done = subprocess.run(command, cwd=folder, env={}, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def block(page: str, name: str) -> str:
    """The Python of a page that imports `name` from the client."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (code,) = [item for item in blocks if re.search(rf"^from coserve_client import .*\b{name}\b", item, re.MULTILINE)]
    return code


def test_the_client_has_the_version_of_the_line_and_needs_pyzmq_only(python: Path, tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "tools/client/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (project["name"], project["dependencies"]) == ("coserve-client", ["pyzmq"])
    main = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert coserve_client.__version__ == main["version"]
    assert run(python, OTHER_PACKAGES, tmp_path) == "['coserve_client', 'zmq']\n[]\n"


def test_the_camera_of_the_readme_and_the_results_of_the_page_run_with_the_client_alone(
    python: Path, tmp_path: Path, experts_folder: Path
) -> None:
    config = a_line(tmp_path / "line", experts_folder)
    (tmp_path / "pictures").mkdir()
    for number in (1, 2):
        (tmp_path / f"pictures/R{number}.R0402.png").write_bytes(a_jpeg(number))
    camera = block("README.md", "SpoolingPublisher").replace("mainboard-a", "open-board")
    reader = block("docs/results.md", "Results").replace("result in results:", "_, result in zip('12', results):")
    run_folder = f"ipc://{tmp_path}/line/run"
    camera = camera.replace("tcp://127.0.0.1:5570", f"{run_folder}/intake.sock")
    reader = reader.replace("tcp://127.0.0.1:5570", f"{run_folder}/intake.sock")
    reader = reader.replace("tcp://127.0.0.1:5571", f"{run_folder}/results.sock")
    with a_service(config, tmp_path / "daemon.log"):
        assert "'accepted': 2" in run(python, camera, tmp_path)
        assert sorted(line.split()[1] for line in run(python, reader, tmp_path).splitlines()) == ["R1", "R2"]


def test_a_program_with_the_client_passes_a_strict_type_check(python: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TYPED_PROGRAM, encoding="utf-8")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict", "include": ["program.py"]}))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", python, "--project", tmp_path],
        cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'is "str"' in done.stdout
