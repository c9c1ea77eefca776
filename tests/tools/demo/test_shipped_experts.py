"""The experts that come with CoServe: what a line is made of, and what is said where a file is missing or changed."""

import json
import shutil
import socket
import tempfile
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from daemon.line.line import load_line
from experts.weights import file_sha256
from tests.tools.demo.guards import measure
from tools.cli.main import app
from tools.demo.judge import loaded_pool
from tools.demo.line import SHIPPED, describe_line, make_line, shipped_figures
from tools.demo.run import run_demo
from tools.terminal.console import CommandError


def a_copy(folder: Path) -> Path:
    """Return a copy of the shipped folder, whose files can be broken."""
    return Path(shutil.copytree(SHIPPED, folder / "shipped"))


def weights_of(folder: Path, expert: str) -> Path:
    """Return the file of an expert in a catalog's folder."""
    return folder / yaml.safe_load((folder / "catalog.yaml").read_text("utf-8"))["experts"][expert]["file"]


def test_the_shipped_experts_are_small_and_their_provenance_names_each_file():
    named = json.loads((SHIPPED / "provenance.json").read_text("utf-8"))["files"]
    files = {file.name: file for file in SHIPPED.iterdir() if file.name != "provenance.json"}
    assert {name: file["sha256"] for name, file in named.items()} == {n: file_sha256(f) for n, f in files.items()}
    entries = yaml.safe_load((SHIPPED / "catalog.yaml").read_text("utf-8"))["experts"]
    assert all(named[entry["file"]]["sha256"] == entry["sha256"] for entry in entries.values())
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) <= 20e6


def test_the_shipped_experts_find_defects_and_leave_good_parts_alone():
    for figures in json.loads((SHIPPED / "provenance.json").read_text("utf-8"))["figures"]:
        assert figures["defects caught"]["share"] >= 0.995
        by_guards = figures["good parts called by a guard"]["share"]
        assert by_guards <= 0.002
        assert figures["good parts called"]["share"] - by_guards <= 0.002
    assert "no training saw" in shipped_figures()


@pytest.mark.test_all  # it renders four boards and judges 480 pictures
@pytest.mark.timeout(600)
@pytest.mark.promise("Containment", "Noise, half a picture, a turned or another part do not pass; good parts still do")
def test_the_shipped_experts_send_spoilt_pictures_to_a_person_and_leave_good_parts_alone(tmp_path: Path):
    line = load_line(make_line(tmp_path))
    found = measure(line, loaded_pool(line.catalog), boards=4, pictures=4)
    assert found.guarded <= 1, f"of {found.good}"
    assert found.share() >= 0.95, found.passed


def test_making_a_line_again_keeps_what_the_user_changed_and_mends_weights(tmp_path: Path):
    config = make_line(tmp_path)
    files = (config, tmp_path / "rules.yaml", tmp_path / "experts" / "catalog.yaml")
    for file in files:
        file.write_text(file.read_text("utf-8") + "# mine\n", "utf-8")
    cut = weights_of(tmp_path / "experts", "R0402")
    cut.write_bytes(cut.read_bytes()[:100])
    assert make_line(tmp_path) == config
    assert all(file.read_text("utf-8").endswith("# mine\n") for file in files)
    assert cut.read_bytes() == weights_of(SHIPPED, "R0402").read_bytes()


def test_weights_that_were_trained_in_the_folder_stay(tmp_path: Path):
    make_line(tmp_path)
    assert shipped_figures() in describe_line(tmp_path)
    catalog, own = tmp_path / "experts" / "catalog.yaml", weights_of(tmp_path / "experts", "R0402")
    before = file_sha256(own)
    own.write_bytes(b"other weights")
    catalog.write_text(catalog.read_text("utf-8").replace(before, file_sha256(own)), "utf-8")
    make_line(tmp_path)
    assert own.read_bytes() == b"other weights"
    assert "other experts than the shipped ones" in describe_line(tmp_path)


@pytest.mark.parametrize("kept", range(0, 20, 6))
def test_a_line_whose_making_was_interrupted_is_made_whole(tmp_path: Path, kept: int):
    make_line(tmp_path / "whole")
    made = sorted(path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file())
    for path in made[:kept]:
        (tmp_path / "cut" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "whole" / path, tmp_path / "cut" / path)
    make_line(tmp_path / "cut")
    assert sorted(p.relative_to(tmp_path / "cut") for p in (tmp_path / "cut").rglob("*") if p.is_file()) == made


@pytest.mark.parametrize("name", ["SOIC8.safetensors", "catalog.yaml"])
def test_a_missing_or_changed_shipped_file_is_named_with_its_sums_and_the_remedy(tmp_path: Path, name: str):
    file = a_copy(tmp_path) / name
    sha256 = file_sha256(file)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CommandError, match=f"{name}.*{file_sha256(file)}, expected {sha256}.*git checkout"):
        make_line(tmp_path / "line", file.parent)
    file.unlink()
    with pytest.raises(CommandError, match=f"{name}.*missing.*{sha256}.*git checkout.*coserve demo --train"):
        make_line(tmp_path / "line", file.parent)
    assert not (tmp_path / "line").exists(), "refused before anything is written"


@pytest.mark.parametrize("options", [["--measure"], ["--prepare-only"]])
def test_a_line_that_is_not_there_or_is_empty_is_one_sentence(tmp_path: Path, options: list[str]):
    if options == ["--prepare-only"]:
        (tmp_path / "coserve.yaml").touch()
    done = CliRunner().invoke(app, ["demo", "--dir", str(tmp_path), *options])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit), "no traceback"
    assert str(tmp_path / "coserve.yaml") in done.output


def test_a_demo_whose_line_runs_says_what_to_do():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as daemon:
        config = make_line(Path(folder))
        (Path(folder) / "run").mkdir()
        daemon.bind(f"{folder}/run/control.sock")
        daemon.listen()
        with pytest.raises(CommandError, match=r"runs already: send it boards with .*camera"):
            run_demo(config.parent, prepare_only=False, boards=1, seed=1)
