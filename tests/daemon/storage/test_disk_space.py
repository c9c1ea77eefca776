"""Admission while a disk fills up: the disk that the tests run on, with a reserve that a test chooses.

Other programs fill it and make room meanwhile: each test sees it as it was when the test began.
"""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.config.settings import Limits
from daemon.intake.backlog import Accounts, Backlog, backlog_limits
from daemon.storage.disk_space import DiskSpace, SpaceClaims, segment_bytes

MB = 10**6


class Disk:
    """SpaceClaims that a test sets, against all that is free."""

    def __init__(self, folder):
        self.folder = folder
        self.claims = SpaceClaims()
        self.space = DiskSpace({"journal": folder / "journal", "images": folder / "images"}, lambda: self.claims, 1)

    def leave(self, size_bytes: int) -> None:
        """Claim everything but `size_bytes`."""
        free_bytes = shutil.disk_usage(self.folder).free
        self.claims = SpaceClaims(bytes=free_bytes - size_bytes)
        self.space.look()


@pytest.fixture(autouse=True)
def as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, usage = os.statvfs, os.statvfs(tmp_path)

    def statvfs(path: Any) -> os.statvfs_result:
        real(path)  # which fails where there is no such folder
        return usage

    monkeypatch.setattr(os, "statvfs", statvfs)


@pytest.fixture
def disk(tmp_path):
    return Disk(tmp_path)


@pytest.mark.promise(
    "A full disk, and years of results",
    "Space for an image, its copy and its verdict is available before the image is accepted",
)
def test_an_image_needs_room_for_its_bytes_and_for_their_copy(disk):
    disk.leave(1000 * MB)
    assert disk.space.problem(300 * MB) is None
    problem = disk.space.problem(600 * MB)
    assert problem is not None
    assert "the journal and the images" in problem
    assert str(disk.folder) in problem


def test_what_was_let_in_since_the_last_look_counts(disk):
    limits = Limits(credit=8, backlog_bytes=10_000 * MB, in_memory=10_000 * MB)
    accounts = Accounts(limits, Backlog(backlog_limits(limits)), disk.space)
    message = SimpleNamespace(image_id="i", source="a")

    def admit(times: int) -> list[str | None]:
        answers = [accounts.enter((b"a",), message, 300 * MB) for _ in range(times)]
        return [answer and answer.kind for answer in answers]

    disk.leave(1000 * MB)
    assert admit(3) == [None, None, "busy"]
    disk.space.look()
    assert admit(1) == [None]


def test_verdicts_of_many_small_images_need_room_too(tmp_path):
    images = shutil.disk_usage(tmp_path).total // 4096 + 1
    disk_space = DiskSpace({"database": tmp_path}, lambda: SpaceClaims(images=images), 1)
    assert "the disk of the database" in (disk_space.problem() or "")


def test_the_reserve_is_an_eighth_of_a_small_disk_and_segments_are_small_there(tmp_path):
    disk_space = DiskSpace({"journal": tmp_path}, reserve_bytes=2**62)
    space = disk_space.space("journal")
    assert space is not None
    assert disk_space.reserve_bytes(space) == space.total_bytes // 8
    assert disk_space.space("images") is None
    assert segment_bytes(tmp_path, 2**62) == min(2**28, space.total_bytes // 32)
    assert segment_bytes(tmp_path, 2**25) == 2**20


def test_where_somebody_else_fills_the_disk_copies_wait_before_verdicts_do(tmp_path):
    disk_space = DiskSpace({"journal": tmp_path, "images": tmp_path}, reserve_bytes=10 * MB)
    free_bytes = shutil.disk_usage(tmp_path).free
    assert disk_space.may_copy(MB)
    assert not disk_space.may_copy(free_bytes)
    assert disk_space.shortage(MB) is None
    assert "nearly full" in (disk_space.shortage(free_bytes) or "")
