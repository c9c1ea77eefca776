"""`make` on a PC where CoServe cannot be installed: one sentence with the remedy, before anything long begins."""

import os
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tools.release import install


def test_an_old_python_is_named_with_the_way_to_another():
    with pytest.raises(install.InstallError, match=r"3\.11 or newer; this is 3\.10\.13.*make PYTHON="):
        install.check_python((3, 10, 13))


def test_a_disk_without_room_is_named_with_what_is_needed(tmp_path: Path):
    with pytest.raises(install.InstallError, match=rf"{tmp_path} has .* GB of free disk; CoServe needs 1000000000 GB"):
        install.check_room(tmp_path, 1_000_000_000)


def test_a_python_without_venv_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = tmp_path / "python3"
    broken.write_text("#!/bin/sh\necho ensurepip is not available\nexit 1\n", encoding="ascii")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(install.InstallError, match=r"apt-get install python3\.\d+-venv.*ensurepip is not available"):
        install.make_environment(tmp_path / "venv")


def test_without_a_network_the_remedies_are_named(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(install.InstallError, match=r"Connect it to the network.*PIP_INDEX_URL.*make bundle"):
        install.takes_cuda(Path(sys.executable), [])


def test_the_script_is_read_by_an_older_python():
    """A Python before 3.11 must get as far as the sentence about it."""
    import ast

    ast.parse((ROOT / "tools" / "release" / "install.py").read_text("utf-8"), feature_version=(3, 8))


def test_what_pip_could_not_do_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(install, "ROOT", tmp_path)
    with pytest.raises(install.InstallError, match=r"install\.log has all it said\): ERROR: .*no-such-project"):
        install.run_pip(Path(sys.executable), ["--no-index", "./no-such-project"])
