"""The journal: what was synced comes back byte for byte, what is damaged says so, and nothing else is harmed."""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from daemon.records import JournalKey
from daemon.storage.journal import Journal, JournalError

PAYLOADS = [b"first", b"\x00" * 33, b"third image"]


def always_fails(number: int) -> Callable[..., Any]:
    def fail(*_arguments: object, **_options: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def open_journal(tmp_path):
    """Open journals, in `tmp_path` by default, that are closed after the test."""
    with ExitStack() as stack:
        yield lambda folder=tmp_path, **options: stack.enter_context(closing(Journal(folder, **options)))


def segment_path(folder: Path, number: int = 1) -> Path:
    return folder / f"segment-{number:08d}.journal"


def test_a_reopened_journal_reads_old_keys_and_never_appends_to_an_old_segment(tmp_path):
    first = Journal(tmp_path)
    keys = first.append(PAYLOADS)
    # No close(): a killed process does not call it either.
    second = Journal(tmp_path)
    (key,) = second.append([b"after the kill"])
    assert key.segment == keys[0].segment + 1
    assert [second.read(old) for old in keys] == PAYLOADS
    first.close()
    second.close()


def test_segments_begin_anew_at_their_size_and_keys_name_the_right_one(open_journal):
    journal = open_journal(segment_bytes=100)
    keys = [journal.append([bytes([n]) * 40])[0] for n in range(6)]
    assert [key.segment for key in keys] == [1, 1, 2, 2, 3, 3]
    assert [journal.read(key) for key in keys] == [bytes([n]) * 40 for n in range(6)]
    assert journal.segments == (1, 2, 3)


def test_unneeded_segments_are_deleted_but_never_the_one_being_written(open_journal):
    journal = open_journal(segment_bytes=50)
    keys = [journal.append([b"x" * 60])[0] for _ in range(4)]
    journal.read(keys[0])  # an open reader does not keep the file
    assert journal.drop_segments(keep={2}) == [1, 3]
    assert journal.segments == (2, 4)
    assert journal.read(keys[1]) == b"x" * 60
    with pytest.raises(JournalError, match="segment 1"):
        journal.read(keys[0])


def test_a_journal_whose_folder_was_emptied_does_not_give_old_numbers_again(open_journal):
    journal = open_journal()
    journal.begin_after(7)
    assert journal.append([b"x"])[0].segment == 8


def test_a_segment_cut_at_any_offset_loses_only_what_was_cut(tmp_path, open_journal):
    journal = open_journal(tmp_path / "whole")
    keys = journal.append(PAYLOADS)
    whole = segment_path(tmp_path / "whole").read_bytes()
    for cut in range(len(whole) + 1):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        segment_path(folder).write_bytes(whole[:cut])
        torn = Journal(folder)
        for key, payload in zip(keys, PAYLOADS, strict=True):
            if key.offset + key.length <= cut:
                assert torn.read(key) == payload
            else:
                with pytest.raises(JournalError, match="cut"):
                    torn.read(key)
        (new,) = torn.append([b"goes on"])
        assert torn.read(new) == b"goes on"
        torn.close()


def test_any_flipped_bit_is_found_and_harms_one_record_only(tmp_path, open_journal):
    journal = open_journal()
    keys = journal.append(PAYLOADS)
    path = segment_path(tmp_path)
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in (0, 7):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            for key, payload in zip(keys, PAYLOADS, strict=True):
                if key.offset - 16 <= position < key.offset + key.length:
                    with pytest.raises(JournalError, match="altered"):
                        journal.read(key)
                else:
                    assert journal.read(key) == payload


@pytest.mark.promise("Nothing accepted is lost", "A failed `fsync` is never treated as a successful one")
def test_after_a_failed_sync_the_segment_takes_no_more_and_a_new_one_goes_on(tmp_path, monkeypatch, open_journal):
    journal = open_journal()
    (before,) = journal.append([b"before"])
    real = os.fdatasync
    monkeypatch.setattr("os.fdatasync", always_fails(errno.EIO))
    with pytest.raises(JournalError, match="Input/output error"):
        journal.append([b"never durable"])
    monkeypatch.setattr("os.fdatasync", real)
    (after,) = journal.append([b"after"])
    assert after.segment == before.segment + 1
    assert journal.read(before) == b"before"
    assert journal.read(after) == b"after"
    assert segment_path(tmp_path).stat().st_size == before.offset + before.length


def test_a_segment_that_cannot_be_deleted_keeps_no_other(tmp_path, monkeypatch, open_journal):
    journal = open_journal(segment_bytes=50)
    for _ in range(4):
        journal.append([b"x" * 60])
    real = Path.unlink

    def unlink(path: Path, *args: bool, **options: bool) -> None:
        if path == segment_path(tmp_path, 1):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        real(path, *args, **options)

    monkeypatch.setattr("pathlib.Path.unlink", unlink)
    with pytest.raises(PermissionError):
        journal.drop_segments(keep=())
    assert journal.segments == (1, 4)
    monkeypatch.undo()
    assert journal.drop_segments(keep=()) == [1]


def test_a_full_disk_leaves_no_empty_segments_and_writing_goes_on_when_there_is_room(
    tmp_path, monkeypatch, open_journal
):
    journal = open_journal()
    real = os.pwritev
    monkeypatch.setattr("os.pwritev", always_fails(errno.ENOSPC))
    for _ in range(3):
        with pytest.raises(JournalError, match="No space left"):
            journal.append([b"x"])
    assert journal.segments == ()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("os.pwritev", real)
    (key,) = journal.append([b"x"])
    assert journal.read(key) == b"x"


def test_a_journal_that_is_deleted_or_moved_away_loses_one_group_and_begins_anew(tmp_path):
    folder = tmp_path / "journal"
    journal = Journal(folder)
    (before,) = journal.append([b"before"])
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(JournalError, match="deleted or moved away"):
        journal.append([b"lost"])
    (after,) = journal.append([b"after"])
    assert (journal.read(before), journal.read(after)) == (b"before", b"after")
    shutil.rmtree(folder)
    with pytest.raises(JournalError, match="deleted or moved away"):
        journal.append([b"lost"])
    (last,) = journal.append([b"last"])
    assert [journal.read(key) for key in (before, after, last)] == [b"before", b"after", b"last"]
    assert [path.name for path in folder.iterdir()] == [f"segment-{last.segment:08d}.journal"]
    journal.close()


class JournalMachine(RuleBasedStateMachine):
    """Against a dictionary: appends, reopens without closing, deletions; each kept key gives its bytes for ever."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.journal = Journal(self.folder, segment_bytes=64)
        self.model: dict[JournalKey, bytes] = {}

    @rule(payloads=st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4))
    def append(self, payloads: list[bytes]) -> None:
        keys = self.journal.append(payloads)
        assert not set(keys) & set(self.model)
        self.model.update(zip(keys, payloads, strict=True))

    @rule(torn=st.binary(max_size=20))
    def crash(self, torn: bytes) -> None:
        """A kill while the next group was being written: its torn bytes stay behind the last record."""
        newest = max(self.journal.segments, default=None)
        if newest is not None:
            with segment_path(self.folder, newest).open("ab") as file:
                file.write(torn)
        self.journal.close()
        self.journal = Journal(self.folder, segment_bytes=64)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        keep = data.draw(st.sets(st.sampled_from(sorted({key.segment for key in self.model}))))
        gone = self.journal.drop_segments(keep)
        assert not keep & set(gone)
        self.model = {key: payload for key, payload in self.model.items() if key.segment not in gone}

    @invariant()
    def every_kept_key_gives_its_bytes(self) -> None:
        assert {key: self.journal.read(key) for key in self.model} == self.model

    def teardown(self) -> None:
        self.journal.close()
        self.temporary.cleanup()


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
