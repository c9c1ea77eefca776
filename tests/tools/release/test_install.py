"""`make` on a PC where CoServe cannot be installed: one sentence with the remedy."""

import sys
from pathlib import Path

import pytest

from tests import ROOT
from tools.release import install


def a_python(folder: Path, status: int) -> Path:
    """Return a program that ends with `status` and writes its arguments beside it."""
    program = folder / "python3"
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\nexit {status}\n', encoding="utf-8")
    program.chmod(0o755)
    return program


def test_an_old_python_and_a_disk_without_room_are_named_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(SystemExit, match=r"3\.11 or newer; this is 3\.10\.13.*make PYTHON="):
        install.check_python((3, 10, 13))
    monkeypatch.setattr(install, "_ROOM_GB", 1_000_000_000)
    monkeypatch.setattr(install, "_ROOM_CUDA_GB", 1_000_000_000)
    with pytest.raises(SystemExit, match=rf"{tmp_path} has .* GB of free disk; CoServe needs 1000000000 GB"):
        install.check_folder(tmp_path / "venv")
    record = tmp_path / "venv" / "lib" / "python3.12" / "site-packages" / "torch-9.9.0+cpu.dist-info" / "RECORD"
    record.parent.mkdir(parents=True)
    record.touch()
    install.check_folder(tmp_path / "venv")


def test_a_python_without_venv_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", str(a_python(tmp_path, 1)))
    with pytest.raises(SystemExit, match=r"apt-get install python3\.\d+-venv"):
        install.make_environment(tmp_path / "venv")


def test_what_pip_could_not_install_is_named_with_the_remedies(tmp_path: Path):
    install.install(a_python(tmp_path, 0), "dev")
    assert (tmp_path / "asked").read_text("utf-8").endswith("--editable .[dev]\n")
    with pytest.raises(SystemExit, match=r"connect this PC to the network.*PIP_INDEX_URL.*make bundle"):
        install.install(a_python(tmp_path, 1), "dev")


def test_the_script_is_read_by_an_older_python():
    """A Python before 3.11 must get as far as the sentence about it."""
    import ast

    ast.parse((ROOT / "tools" / "release" / "install.py").read_text("utf-8"), feature_version=(3, 8))
