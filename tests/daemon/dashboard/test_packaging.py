"""The dashboard on a PC without a network: pages and scripts in the wheel; extras in the bundle."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import ROOT
from tools.release.bundle import own_wheel

DASHBOARD = ROOT / "daemon" / "dashboard"
DATA = (".json", ".yaml", ".sql", ".html", ".css", ".js", ".cpp", ".hpp", ".svg", ".txt", ".ini", ".mako")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(own_wheel(tmp_path_factory.mktemp("wheel")))


def tracked(folder: Path) -> set[str]:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a checkout")
    listed = subprocess.run([git, "ls-files", "-z", str(folder)], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


def test_the_wheel_has_every_page_and_script_unchanged_and_the_data_files_of_the_other_rooms(
    wheel: zipfile.ZipFile,
) -> None:
    names = set(wheel.namelist())
    assert {"daemon/dashboard/templates/base.html", "daemon/dashboard/static/app.css"} <= tracked(DASHBOARD) <= names
    for name in tracked(DASHBOARD):
        assert wheel.read(name) == (ROOT / name).read_bytes(), name
    for folder in ("daemon", "tools", "experts", "routing_rules"):
        data = {name for name in tracked(ROOT / folder) if name.endswith(DATA)}
        missing = {name for name in data - names if not name.startswith("tools/demo/")}
        assert not missing, sorted(missing)
    shared = {name.partition("/data/share/coserve/")[2] for name in names}
    assert {name for name in tracked(ROOT / "docs") if name.endswith(".md")} <= shared, "messages and units name them"
    assert not [name for name in names if name.startswith(("tools/demo/", "tools/camera/render/"))], "repository only"


@pytest.mark.parametrize(
    ("imported", "forbidden"),
    [
        ("daemon.app, tools.cli.main", "fastapi starlette uvicorn jinja2 paho psycopg pyarrow"),
        ("daemon.dashboard.app", "torch cv2"),
    ],
)
def test_the_line_imports_no_web_server_and_its_pages_no_torch(imported: str, forbidden: str) -> None:
    code = f"import sys, {imported}\nprint(sorted(set({forbidden.split()}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.strip() == "[]"
