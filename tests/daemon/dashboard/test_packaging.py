"""What a PC without a network gets of the dashboard: pages, scripts, licences in the wheel; extras in the bundle."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest

from tests import ROOT
from tools.release.bundle import EXTRAS, own_wheel
from tools.release.licences import SHIPPED, shipped_scripts

DASHBOARD = ROOT / "daemon" / "dashboard"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(own_wheel(tmp_path_factory.mktemp("wheel")))


def tracked(folder: Path) -> set[str]:
    """Files that belong to the repository; nobody's scratch."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a checkout")
    listed = subprocess.run([git, "ls-files", "-z", str(folder)], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.split("\0") if name}


def test_the_wheel_has_every_page_and_script_unchanged(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert tracked(DASHBOARD) <= names
    for name in tracked(DASHBOARD):
        if (ROOT / name).is_file():
            assert wheel.read(name) == (ROOT / name).read_bytes(), name
    assert {"daemon/dashboard/templates/base.html", "daemon/dashboard/static/app.css"} <= names


def test_the_wheel_has_the_files_of_the_other_new_rooms(wheel: zipfile.ZipFile) -> None:
    """What is no Python and lies beside it is needed where it is installed too."""
    kept = (".json", ".yaml", ".sql", ".html", ".css", ".js", ".svg", ".txt", ".ini", ".mako")
    for folder in ("daemon", "tools", "experts", "routing_rules"):
        files = {name for name in tracked(ROOT / folder) if name.endswith(kept)}
        assert files <= set(wheel.namelist()), sorted(files - set(wheel.namelist()))


def test_pages_are_found_where_they_are_installed() -> None:
    assert files("daemon.dashboard").joinpath("templates", "base.html").is_file()
    assert files("daemon.dashboard").joinpath("static", "htmx.min.js").is_file()


def test_every_script_of_others_is_listed_with_version_and_licence_and_every_listed_one_is_there() -> None:
    listed = {one["name"]: one for one in shipped_scripts(SHIPPED.read_text(encoding="utf-8"))}
    of_others = {path.name for path in (DASHBOARD / "static").glob("*.min.*")}
    known = {
        "htmx.min.js": "htmx.org",
        "uPlot.iife.min.js": "uplot",
        "uPlot.min.css": "uplot",
    }
    assert of_others <= set(known), "name its licence in static/licences.txt"
    assert {known[name] for name in of_others} == set(listed)
    for component in listed.values():
        assert re.fullmatch(r"\d+\.\d+\.\d+", component["version"])
        assert "permission" in component["licenses"][0]["license"]["text"]["content"].lower()
    head = (DASHBOARD / "static/uPlot.iife.min.js").read_text(encoding="utf-8")[:200]
    assert f"v{listed['uplot']['version']}" in head
    assert f'version:"{listed["htmx.org"]["version"]}"' in (DASHBOARD / "static/htmx.min.js").read_text(
        encoding="utf-8"
    )


def test_pages_name_no_other_host(wheel: zipfile.ZipFile) -> None:
    """No network: nothing that a page loads comes from elsewhere. (Comments and namespaces of SVG are no loads.)"""
    for name in wheel.namelist():
        if name.startswith("daemon/dashboard/templates/"):
            text = wheel.read(name).decode()
            found = re.findall(r"""(?:src|href|action|data-chart)\s*=\s*["'](?:https?:)?//[^"']*""", text)
            assert not found, (name, found)


def test_the_bundle_is_made_with_the_extras_that_a_pc_under_the_line_wants(wheel: zipfile.ZipFile) -> None:
    (metadata,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    provided = set(re.findall(r"^Provides-Extra: (\S+)$", metadata, flags=re.MULTILINE))
    assert set(EXTRAS) == {"dashboard", "export", "mqtt", "postgresql"}
    assert set(EXTRAS) <= provided


def test_without_its_extra_nothing_of_the_core_imports_a_web_framework() -> None:
    """The daemon and the command line start where fastapi, aiomqtt, psycopg and pyarrow are not installed."""
    code = (
        "import sys\n"
        "import daemon.app, tools.cli.main\n"
        "extras = {'fastapi', 'starlette', 'uvicorn', 'jinja2', 'aiomqtt', 'psycopg', 'pyarrow'}\n"
        "print(sorted(extras & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.strip() == "[]"
