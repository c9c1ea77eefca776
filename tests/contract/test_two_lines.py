"""Two lines on one PC: what one of them writes, no other one may write, whether both run or not."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from daemon.config.settings import load_config
from daemon.errors import ConfigError
from daemon.storage.claims import claim
from tests.lines import a_line
from tests.simulated import a_service
from tools.cli.main import app
from tools.setup.service import ServiceError

SHARED = {
    "images": "images: the folder",
    "journal": "journal: the journal",
    "database": "database: the database",
    "beside": "consumers",
}


@pytest.fixture
def first(tmp_path: Path, experts_folder: Path) -> Path:
    return a_line(tmp_path / "first", experts_folder)


def a_second_line(tmp_path: Path, experts_folder: Path, shared: str) -> Path:
    """Return a line beside the first one that writes to one of its places, named in its own file."""
    place = {
        "images": {"images": "../first/images"},
        "journal": {"journal": "../first/journal"},
        "database": {"database": "sqlite:///../first/inspection.db"},
        "beside": {"journal": "../first/another-journal"},
    }
    return a_line(tmp_path / "second", experts_folder, **place[shared])


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    with claim(path, load_config(path)):
        yield


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as error, claimed(path):
        pass
    return str(error.value)


def run(*words: object, status: int = 0) -> str:
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == status, done.output
    return done.output


@pytest.mark.parametrize("shared", SHARED)
def test_a_second_line_that_would_write_what_another_line_writes_does_not_start(
    tmp_path: Path, experts_folder: Path, first: Path, shared: str
) -> None:
    second = a_second_line(tmp_path, experts_folder, shared)
    key = "journal" if shared == "beside" else shared
    texts = second.read_text().splitlines()
    line_number = 1 + next(number for number, text in enumerate(texts) if text.startswith(f"{key}:"))
    with a_service(first, tmp_path / "first.log") as service:
        assert service.process is not None
        with pytest.raises(ServiceError) as refusal:
            a_service(second, tmp_path / "second.log").start()
        for words in (f"{second}:{line_number}:", SHARED[shared], str(first), f"process {service.process.pid}"):
            assert words in str(refusal.value)
        assert "Traceback" not in str(refusal.value)
        assert str(first) in run("check", second, status=1)
        run("check", first)
    assert str(first) in run("check", second, status=1), "the first line rests, and its files are its own"
    assert str(first) in run("doctor", second, status=1)
    run("check", first)
    with a_service(first, tmp_path / "first.log"):
        pass


def test_a_line_that_is_gone_for_good_locks_nobody_out(tmp_path: Path, experts_folder: Path, first: Path) -> None:
    second = a_second_line(tmp_path, experts_folder, "images")
    lock, text = first.parent / "images" / ".lock", first.read_text()

    def renamed() -> None:
        first.rename(first.with_name("old.yaml"))

    def changed() -> None:
        first.write_text(yaml.safe_dump({**yaml.safe_load(first.read_text()), "images": "elsewhere"}))

    for way_on in (lock.unlink, changed, renamed):
        with claimed(first):
            pass
        assert str(lock) in refused(second)
        way_on()
        with claimed(second):
            pass
        lock.unlink()
        if way_on == changed:
            first.write_text(text)


def test_a_renamed_a_moved_and_a_copied_line_start(tmp_path: Path, experts_folder: Path, first: Path) -> None:
    with claimed(first):
        pass
    renamed = first.rename(first.with_name("line-1.yaml"))
    with claimed(renamed):
        pass
    moved = renamed.parent.rename(tmp_path / "moved") / renamed.name
    with claimed(moved):
        pass
    shutil.copytree(moved.parent, tmp_path / "copy", symlinks=True)
    with claimed(moved), claimed(tmp_path / "copy" / moved.name):
        pass
    link = tmp_path / "link.yaml"
    link.symlink_to(moved)
    with claim(link, load_config(moved)):
        pass


def test_a_claim_whose_configuration_cannot_be_read_stands_and_says_how_to_go_on(
    tmp_path: Path, experts_folder: Path, first: Path
) -> None:
    second = a_second_line(tmp_path, experts_folder, "images")
    with claimed(first):
        pass
    first.write_text("rules: [")
    message = refused(second)
    assert f"rename its coserve.yaml or remove {first.parent}/images/.lock" in message


CLASHES: dict[str, dict[str, Any]] = {
    "images in the journal": {"images": "../first/journal/images"},
    "images are the journal": {"images": "../first/journal"},
    "images around the journal": {"images": "../first"},
    "images in images": {"images": "../first/images/more"},
    "images in the quarantine": {"images": "../first/quarantine/more"},
    "images are the positions": {"images": "../first/consumers"},
    "journal in images": {"journal": "../first/images/more/journal"},
    "journal is the quarantine": {"journal": "../first/quarantine"},
    "database in the quarantine": {"database": "sqlite:///../first/quarantine/inspection.db"},
    "database is a log": {"database": "sqlite:///../first/inspection.db-wal"},
    "trace is the trace": {"record": "../first/trace"},
    "trace is the database": {"record": "../first/inspection.db"},
    "trace is the rules": {"record": "../first/rules.yaml"},
    "socket is the socket": {"endpoints": {"intake": ["ipc://../first/run/intake.sock"]}},
}
OWN_CLASHES: dict[str, dict[str, Any]] = {
    "journal": {"images": "journal"},
    "in the journal": {"images": "journal/images"},
    "around the journal": {"journal": "images/journal"},
    "experts": {"images": "experts"},
    "everything": {"images": "."},
    "database in images": {"database": "sqlite:///images/inspection.db"},
    "trace over the database": {"record": "inspection.db"},
    "trace over the rules": {"record": "rules.yaml"},
    "trace over the configuration": {"record": "coserve.yaml"},
}


@pytest.mark.parametrize("clash", CLASHES)
def test_a_place_in_or_around_another_lines_place_is_refused_by_both(
    tmp_path: Path, experts_folder: Path, clash: str
) -> None:
    first = a_line(tmp_path / "first", experts_folder, record="trace")
    second = a_line(tmp_path / "second", experts_folder, **CLASHES[clash])
    with claimed(first):
        assert str(tmp_path / "first") in refused(second)
    if clash != "socket is the socket":  # a line that rests has no socket
        assert str(tmp_path / "first") in refused(second), "also while the first line rests"
    with claimed(first):
        pass


@pytest.mark.parametrize("clash", OWN_CLASHES)
def test_a_line_whose_own_places_overlap_is_refused(tmp_path: Path, experts_folder: Path, clash: str) -> None:
    line = a_line(tmp_path / "line", experts_folder, **OWN_CLASHES[clash])
    assert "name another place" in refused(line)
    if clash == "trace over the database":
        assert "name another place" in run("check", line, status=1)
        assert "name another place" in run("doctor", line, status=1)


def test_a_database_with_a_second_name_is_refused_under_both(tmp_path: Path, experts_folder: Path, first: Path) -> None:
    second = a_line(tmp_path / "second", experts_folder)
    with claimed(first):
        (first.parent / "inspection.db").touch()
        (second.parent / "inspection.db").hardlink_to(first.parent / "inspection.db")
        assert "a hard link" in refused(second)
    assert "a hard link" in refused(first)


@pytest.mark.parametrize("place", ["journal", "images", "quarantine"])
def test_a_folder_with_others_files_is_not_taken(first: Path, place: str) -> None:
    file = first.parent / place / "holiday.jpg"
    file.parent.mkdir()
    file.touch()
    assert "holds holiday.jpg" in refused(first)
    file.unlink()
    (file.parent / "lost+found").mkdir()
    with claimed(first):
        file.touch()  # a line that has the folder goes on: none of its parts touches such a file
    with claimed(first):
        pass


def test_a_file_that_is_not_a_trace_is_not_overwritten(tmp_path: Path, experts_folder: Path) -> None:
    line = a_line(tmp_path / "line", experts_folder, record="notes.txt")
    notes = line.parent / "notes.txt"
    notes.write_text("mine")
    assert "is not a trace" in refused(line)
    notes.write_text('{"trace":1}')
    with claimed(line):
        pass
