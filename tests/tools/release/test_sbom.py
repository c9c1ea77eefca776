"""The list of everything that the line is made of: CycloneDX's own tool, run on this very environment."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests import ROOT
from tools.release.licences import licences, main, missing, run_time_names

pytestmark = pytest.mark.test_all

TOOL = Path(sys.executable).with_name("cyclonedx-py")


@pytest.fixture(scope="module")
def sbom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not TOOL.exists():
        pytest.skip(
            "needs CycloneDX's tool: make sbom installs it (pip install --constraint constraints.txt .[release])"
        )
    file = tmp_path_factory.mktemp("sbom") / "sbom.json"
    options = ["environment", sys.executable, "--pyproject", str(ROOT / "pyproject.toml"), "--gather-license-texts"]
    subprocess.run([TOOL, *options, "--of", "JSON", "-o", str(file)], check=True, capture_output=True)
    return file


@pytest.mark.promise("Access, pages and reviews", "Every distribution is listed with version and licence")
def test_the_sbom_names_every_distribution_of_the_daemon_with_version_and_licence(sbom: Path) -> None:
    run_time = run_time_names()
    assert {"coserve", "torch", "pyzmq", "ultralytics", "sqlalchemy", "pydantic-core"} <= run_time
    assert {"fastapi", "uvicorn", "jinja2", "pyarrow", "paho-mqtt"} <= run_time
    assert "pytest" not in run_time
    document = json.loads(sbom.read_text())
    assert (document["bomFormat"], document["metadata"]["component"]["name"]) == ("CycloneDX", "coserve")
    listed = licences(document, run_time)
    assert missing(listed, run_time) == []
    installed = {package.name: package.version for package in listed}
    for name in ("torch", "pyzmq", "ultralytics", "safetensors"):
        assert installed[name] == version(name)
    by_name = {package.name: package.licence for package in listed}
    assert by_name["coserve"] == "AGPL-3.0-or-later"
    assert "AGPL" in by_name["ultralytics"]


def test_the_list_of_licences_is_written_and_what_lacks_one_is_named(
    sbom: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(sbom, tmp_path / "licences.txt") == 0
    text = (tmp_path / "licences.txt").read_text()
    assert "torch " in text.split("Only to build and test:")[0]
    (line,) = [line for line in text.splitlines() if line.startswith("fastapi ")]
    assert "MIT" in line
    assert "pytest " in text.split("Only to build and test:")[1]
    document = json.loads(sbom.read_text())
    for component in document["components"]:
        if component["name"] == "rich":
            del component["licenses"]
    document["components"] = [part for part in document["components"] if part["name"] != "pyzmq"]
    (tmp_path / "lacking.json").write_text(json.dumps(document))
    assert main(tmp_path / "lacking.json", tmp_path / "licences.txt") == 1
    assert "without a licence or a version: pyzmq, rich" in capsys.readouterr().err
