"""The quarantine: bytes of bad images for a person to look at, bounded, under any names that publishers choose."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from daemon.records import BoardRef, Image, JournalKey
from daemon.storage.journal import Journal
from daemon.storage.quarantine import Quarantine


def test_bytes_are_kept_and_told_under_names_that_cannot_leave_the_folder(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "q", 1000)
    with capture_logs() as events:
        path = quarantine.keep("../../cam", "/etc/passwd" + "/x" * 58, b"bytes", "no image")
    assert [(event["event"], event["log_level"]) for event in events] == [("image_quarantined", "warning")]
    assert path is not None
    assert path.parent == tmp_path / "q"
    assert path.read_bytes() == b"bytes"
    assert [file.name for file in (tmp_path / "q").iterdir()] == [path.name]


def test_the_oldest_go_first_also_after_a_restart(tmp_path: Path) -> None:
    Quarantine(tmp_path, 100).keep("s", "one", b"1" * 40, "")
    Quarantine(tmp_path, 100).keep("s", "two", b"2" * 40, "")
    (tmp_path / "20260101T000000000000000-s-half.part").write_bytes(b"half")
    Quarantine(tmp_path, 100).keep("s", "three", b"3" * 40, "")
    assert sorted(path.read_bytes()[:1] for path in tmp_path.iterdir()) == [b"2", b"3"]


@pytest.mark.promise(
    "Overload and hostile publishers",
    "A flood of bad images does not displace those of other sources from the quarantine",
)
def test_a_source_that_floods_with_bad_images_is_kept_in_part_and_others_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stands_still = SimpleNamespace(monotonic=lambda: 100.0, time_ns=time.time_ns)
    monkeypatch.setattr("daemon.storage.quarantine.time", stands_still)
    quarantine = Quarantine(tmp_path, 10**6)
    for number in range(500):
        quarantine.keep("flood", f"i{number}", b"x", "no image")
    assert quarantine.keep("quiet", "q", b"y", "no image") is not None
    names = [path.name for path in tmp_path.iterdir()]
    assert 99 <= sum("-flood-" in name for name in names) <= 100  # of a second's worth, in hundredths
    assert sum("-quiet-" in name for name in names) == 1


def test_a_disk_that_takes_nothing_stops_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert Quarantine(tmp_path / "file", 100).keep("s", "i", b"x", "") is None
    assert "quarantine_failed" in capsys.readouterr().out


def an_image(key: JournalKey) -> Image:
    return Image("cam", "i1", BoardRef("main", "S1"), "R0402", "R1", inspection_id=1, key=key)


def test_bad_images_are_copied_out_of_the_journal_and_what_cannot_be_stops_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(tmp_path / "journal")
    first, second = journal.append([b"one", b"two"])
    quarantine = Quarantine(tmp_path / "q", 1000)
    for key in (first, JournalKey(9, 16, 3), second):
        quarantine.copy(an_image(key), "the image is damaged", journal.read)
    assert sorted(path.read_bytes() for path in (tmp_path / "q").iterdir()) == [b"one", b"two"]
    assert "quarantine_failed" in capsys.readouterr().out
    journal.close()


@pytest.mark.promise("Nothing accepted is lost", "Files of others in `quarantine/` are neither counted nor deleted")
def test_files_of_others_in_the_folder_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("inspection.db", "20260101-notes.bin", "a.part", ".lock")]
    for file in others:
        file.write_bytes(b"x" * 1000)
    quarantine = Quarantine(tmp_path, 100)
    for number in range(5):
        quarantine.keep("s", f"i{number}", b"y" * 60, "")
    quarantine = Quarantine(tmp_path, 100)
    quarantine.keep("s", "last", b"y" * 60, "")
    assert all(file.exists() for file in others)
    assert [file.name.endswith("-s-last.bin") for file in tmp_path.iterdir() if file not in others] == [True]
