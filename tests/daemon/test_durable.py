"""The journal thread with a real journal: fair groups, short ones, and nothing lost between it and the writer."""

import errno
import hashlib
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from daemon.durable import GROUP_BYTES, GROUP_IMAGES, Group, JournalThread, Submitted
from daemon.journal import Journal
from daemon.records import Arrival, BoardRef, Pixels


def an_image(source: str, number: int, payload: bytes = b"image") -> Submitted:
    sha256 = hashlib.sha256(payload).hexdigest()
    board = BoardRef("mainboard-a", "S1")
    return Submitted(
        Arrival(source, f"i{number}", board, "R0402", "R1", None, None, Pixels(), payload, sha256), lambda _: None
    )


def keys(group: Group) -> list[tuple[str, str]]:
    return [submitted.key for submitted in group.images]


@contextmanager
def running(folder: Path) -> Iterator[tuple[JournalThread, Journal, "queue.Queue[Group]"]]:
    """The thread, its journal, and the groups that it has handed on; none is settled unless the test does it."""
    journal, groups = Journal(folder / "journal"), queue.Queue[Group]()
    thread = JournalThread(journal, None, groups.put)
    thread.start()
    try:
        yield thread, journal, groups
    finally:
        for _ in range(1000):
            thread.settled()
        thread.stop()
        journal.close()


def test_a_flooding_source_does_not_put_its_queue_before_another_s_single_image(tmp_path: Path):
    with running(tmp_path) as (thread, _, groups):
        for number in range(20 * GROUP_IMAGES):
            thread.submit(an_image("flood", number))
        first = groups.get(timeout=20)
        thread.submit(an_image("quiet", 0))
        thread.settled()
        ahead = groups.get(timeout=20)  # what was being written when the single image came
        thread.settled()
        nexts = [groups.get(timeout=20)]
        thread.settled()
        nexts.append(groups.get(timeout=20))
    assert {source for source, _ in keys(first)} == {"flood"}
    assert ("quiet", "i0") in [key for group in (ahead, *nexts) for key in keys(group)]


def test_groups_of_large_images_are_short(tmp_path: Path):
    payload = bytes(GROUP_BYTES // 3)
    with running(tmp_path) as (thread, _, groups):
        for number in range(10):
            thread.submit(an_image("large", number, payload))
        found: list[Group] = []
        while sum(len(group.images) for group in found) < 10:
            found.append(groups.get(timeout=20))
            thread.settled()
    assert all(len(group.images) <= 3 for group in found)
    assert [key for group in found for key in keys(group)] == [("large", f"i{number}") for number in range(10)]


def test_a_group_costs_one_sync_and_each_image_has_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    syncs: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr("os.fdatasync", lambda fd: (syncs.append(fd), real(fd))[1])
    with running(tmp_path) as (thread, journal, groups):
        for number in range(3 * GROUP_IMAGES):
            thread.submit(an_image("cam", number, b"%d" % number))
        count, found = 0, 0
        while found < 3 * GROUP_IMAGES:
            group = groups.get(timeout=20)
            assert [journal.read(key) for key in group.keys] == [image.arrival.payload for image in group.images]
            count, found = count + 1, found + len(group.images)
            thread.settled()
        assert len(syncs) == count


def test_a_failed_sync_costs_its_group_only_and_is_handed_on_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = os.fdatasync

    def failing(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with running(tmp_path) as (thread, journal, groups):
        monkeypatch.setattr("os.fdatasync", failing)
        thread.submit(an_image("cam", 0))
        failed = groups.get(timeout=20)
        monkeypatch.setattr("os.fdatasync", real)
        thread.submit(an_image("cam", 1))
        written = groups.get(timeout=20)
        assert (keys(failed), failed.keys) == ([("cam", "i0")], [])
        assert "Input/output error" in str(failed.error)
        assert written.error is None
        assert journal.read(written.keys[0]) == b"image"
        assert written.keys[0].segment >= failed.frontier > 1


def test_no_more_than_two_groups_are_ahead_of_the_database(tmp_path: Path):
    with running(tmp_path) as (thread, journal, groups):
        for number in range(5 * GROUP_IMAGES):
            thread.submit(an_image("cam", number))
        groups.get(timeout=20)
        groups.get(timeout=20)
        with pytest.raises(queue.Empty):
            groups.get(timeout=0.1)
        thread.settled()
        assert len(groups.get(timeout=20).images) == GROUP_IMAGES
        assert journal.segments == (1,)


def test_a_stop_hands_on_what_was_submitted_before_it(tmp_path: Path):
    journal, groups = Journal(tmp_path / "journal"), queue.Queue[Group]()
    thread = JournalThread(journal, None, groups.put)
    for number in range(10):
        thread.submit(an_image("cam", number))
    thread.start()
    thread.stop()
    assert not thread.is_alive
    assert sum(len(groups.get_nowait().images) for _ in range(groups.qsize())) == 10
    journal.close()
