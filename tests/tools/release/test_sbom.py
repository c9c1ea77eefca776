"""The lists of everything that the line is made of: CycloneDX's own tool, and ours, run on this very environment."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests import ROOT
from tools.release import licences

pytestmark = pytest.mark.test_all

TOOL = Path(sys.executable).with_name("cyclonedx-py")


@pytest.mark.promise("Access, pages and reviews", "Every distribution is listed with version and licence")
def test_every_distribution_is_listed_with_version_and_licence(tmp_path: Path) -> None:
    if not TOOL.exists():
        pytest.skip("needs CycloneDX's tool (pip install --constraint constraints.txt .[release])")
    options = ["environment", sys.executable, "--pyproject", str(ROOT / "pyproject.toml"), "--gather-license-texts"]
    subprocess.run([TOOL, *options, "--of", "JSON", "-o", tmp_path / "sbom.json"], check=True, capture_output=True)
    document = json.loads((tmp_path / "sbom.json").read_text())
    assert (document["bomFormat"], document["metadata"]["component"]["name"]) == ("CycloneDX", "coserve")
    versions = {one["name"]: one["version"] for one in document["components"]}
    assert licences.main(tmp_path / "licences.txt") == 0
    listed = {
        line.split()[0]: line.split(maxsplit=2)[1:] for line in (tmp_path / "licences.txt").read_text().splitlines()
    }
    for name in ("torch", "pyzmq", "ultralytics", "safetensors", "fastapi", "pyarrow"):
        assert versions[name] == listed[name][0] == version(name)
    assert listed["coserve"][1] == "AGPL-3.0-or-later"
    assert "AGPL" in listed["ultralytics"][1]
    assert "MIT" in listed["fastapi"][1]


def test_what_lacks_a_licence_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd-1.0.dist-info").mkdir()
    (tmp_path / "odd-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert licences.main(tmp_path / "licences.txt") == 1
    assert "without a licence: odd" in capsys.readouterr().err
