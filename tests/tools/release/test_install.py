"""`make` on a PC where CoServe cannot be installed: one sentence with the remedy, before anything long begins."""

import os
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tools.release import install


def test_an_old_python_and_a_disk_without_room_are_named_with_what_is_needed(tmp_path: Path):
    with pytest.raises(install.InstallError, match=r"3\.11 or newer; this is 3\.10\.13.*make PYTHON="):
        install.check_python((3, 10, 13))
    with pytest.raises(install.InstallError, match=rf"{tmp_path} has .* GB of free disk; CoServe needs 1000000000 GB"):
        install.check_room(tmp_path, 1_000_000_000)


def test_an_environment_that_has_torch_needs_neither_room_nor_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    record = tmp_path / "venv" / "lib" / "python3.12" / "site-packages" / "torch-9.9.0+cpu.dist-info" / "RECORD"
    record.parent.mkdir(parents=True)
    record.touch()
    (tmp_path / "constraints.txt").write_text("torch==9.9.0\ntorchvision==1.0\n")
    monkeypatch.setattr(install, "CONSTRAINTS", tmp_path / "constraints.txt")
    monkeypatch.setattr(install, "make_environment", lambda venv: venv / "bin" / "python")
    monkeypatch.setattr(install, "check_room", lambda *_: pytest.fail("asked for room"))
    monkeypatch.setattr(install, "takes_cuda", lambda *_: pytest.fail("asked for PyTorch"))
    ran: list[list[str]] = []
    monkeypatch.setattr(install, "run_pip", lambda _python, what: ran.append(what))
    install.install(tmp_path / "venv", "dev")
    assert ran == [["--editable", ".[dev]"]]


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
