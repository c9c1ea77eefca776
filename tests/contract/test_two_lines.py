"""Two lines on one PC: what one of them writes, the other may not write, whether both run or not."""

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon.config.settings import load_config
from daemon.errors import ConfigError
from daemon.storage.claims import claim
from tests.lines import a_line
from tests.simulated import a_service
from tests.tools.run_commands import coserve
from tools.setup.service import ServiceError

SHARED = {
    "images": ("../first/images", "images: the folder"),
    "journal": ("../first/journal", "journal: the journal"),
    "database": ("sqlite:///../first/inspection.db", "database: the database"),
}


@pytest.fixture
def first(tmp_path: Path, experts_folder: Path) -> Path:
    return a_line(tmp_path / "first", experts_folder)


@pytest.mark.parametrize("left", [bytes(69), b"1234\n/line/\0\0\0\0.yaml", b"\x93\x00\x1f\xff", b"12\n\x9c/x\n"])
def test_what_a_power_cut_leaves_in_a_lock_file_claims_nothing(first: Path, left: bytes) -> None:
    for name in ("inspection.db.lock", "journal/.lock", "images/.lock"):
        file = first.parent / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(left)
    claimed(first).close()


def a_second_line(tmp_path: Path, experts_folder: Path, shared: str) -> Path:
    """Return a line beside the first one that writes to one of its places, named in its own file."""
    return a_line(tmp_path / "second", experts_folder, **{shared: SHARED[shared][0]})


def claimed(path: Path) -> ExitStack:
    return claim(path, load_config(path))


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as error:
        claimed(path)
    return str(error.value)


@pytest.mark.parametrize("shared", SHARED)
def test_a_place_of_another_line_is_refused_whether_that_runs_or_rests(
    tmp_path: Path, experts_folder: Path, first: Path, shared: str
) -> None:
    second = a_second_line(tmp_path, experts_folder, shared)
    with claimed(first):
        assert SHARED[shared][1] in refused(second)
    assert str(first) in refused(second)
    claimed(first).close()


@pytest.mark.promise(
    "Nothing accepted is lost",
    "Nothing that one line writes (database, journal and the folders beside it, images) is written by another, "
    "whether both run or not: start, `check` and `doctor` name the other line's coserve.yaml. A renamed, "
    "moved, copied or changed line is not locked out, and the message says how to take over from one that is "
    "gone",
)
def test_a_second_line_that_would_write_what_another_line_writes_does_not_start(
    tmp_path: Path, experts_folder: Path, first: Path
) -> None:
    second = a_second_line(tmp_path, experts_folder, "journal")
    texts = second.read_text().splitlines()
    line_number = 1 + next(number for number, text in enumerate(texts) if text.startswith("journal:"))
    with a_service(first, tmp_path / "first.log") as service:
        assert service.process is not None
        with pytest.raises(ServiceError) as refusal:
            a_service(second, tmp_path / "second.log").start()
        for words in (f"{second}:{line_number}:", SHARED["journal"][1], str(first), f"process {service.process.pid}"):
            assert words in str(refusal.value)
        assert "Traceback" not in str(refusal.value)
        assert str(first) in coserve("check", second, status=1).output
    assert str(first) in coserve("doctor", second, status=1).output, "the first line rests, and its files are its own"
    coserve("check", first)


def test_a_line_that_is_gone_for_good_locks_nobody_out(tmp_path: Path, experts_folder: Path, first: Path) -> None:
    second = a_second_line(tmp_path, experts_folder, "images")
    lock, text = first.parent / "images" / ".lock", first.read_text()

    def renamed() -> None:
        first.rename(first.with_name("old.yaml"))

    def changed() -> None:
        first.write_text(yaml.safe_dump({**yaml.safe_load(first.read_text()), "images": "elsewhere"}))

    for way_on in (lock.unlink, changed, renamed):
        claimed(first).close()
        assert str(lock) in refused(second)
        way_on()
        claimed(second).close()
        lock.unlink()
        if way_on == changed:
            first.write_text(text)


def test_a_renamed_a_moved_and_a_copied_line_start(tmp_path: Path, experts_folder: Path, first: Path) -> None:
    claimed(first).close()
    renamed = first.rename(first.with_name("line-1.yaml"))
    claimed(renamed).close()
    moved = renamed.parent.rename(tmp_path / "moved") / renamed.name
    claimed(moved).close()
    shutil.copytree(moved.parent, tmp_path / "copy", symlinks=True)
    with claimed(moved), claimed(tmp_path / "copy" / moved.name):
        pass
    link = tmp_path / "link.yaml"
    link.symlink_to(moved)
    claim(link, load_config(moved)).close()


def test_a_claim_whose_configuration_cannot_be_read_stands_and_says_how_to_go_on(
    tmp_path: Path, experts_folder: Path, first: Path
) -> None:
    second = a_second_line(tmp_path, experts_folder, "images")
    claimed(first).close()
    first.write_text("rules: [")
    message = refused(second)
    assert f"rename its coserve.yaml or remove {first.parent}/images/.lock" in message


def test_a_refused_line_leaves_nothing_locked(tmp_path: Path, experts_folder: Path, first: Path) -> None:
    second = a_second_line(tmp_path, experts_folder, "images")
    with claimed(first):
        assert str(first) in refused(second)
    written = yaml.safe_load(second.read_text())
    second.write_text(yaml.safe_dump({**written, "images": "images"}))
    with claimed(second), claimed(first):
        pass


OWN_CLASHES: dict[str, dict[str, Any]] = {
    "journal": {"images": "journal"},
    "in the journal": {"images": "journal/images"},
    "experts": {"images": "experts"},
    "everything": {"images": "."},
    "database in images": {"database": "sqlite:///images/inspection.db"},
    "trace over the database": {"record": "inspection.db"},
}


@pytest.mark.parametrize("clash", OWN_CLASHES)
def test_a_line_whose_own_places_overlap_is_refused(tmp_path: Path, experts_folder: Path, clash: str) -> None:
    line = a_line(tmp_path / "line", experts_folder, **OWN_CLASHES[clash])
    assert "name another place" in refused(line)
    if clash == "trace over the database":
        assert "name another place" in coserve("check", line, status=1).output
        assert "name another place" in coserve("doctor", line, status=1).output


@pytest.mark.promise("Nothing accepted is lost", "A database under two names (a hard link) is refused under both")
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
    claimed(first).close()
