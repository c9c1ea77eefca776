"""The journal thread with a real journal: fair groups, short ones, and nothing lost between it and the writer."""

import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from daemon.storage.disk_space import DiskSpace
from daemon.storage.journal import GROUP_IMAGES, ImageGroup, Journal, JournalThread, Waiting
from tests.daemon.storage.database.store_parts import an_image


def waiting(source: str, number: int, payload: bytes = b"image", connection: str | None = None) -> Waiting:
    return an_image(f"i{number}", source=source), payload, (connection or source).encode(), lambda _: None


def keys(group: ImageGroup) -> list[tuple[str, str]]:
    return [(image.source, image.image_id) for image, _ in group.images]


@dataclass
class Line:
    """The thread, its journal, and the groups that it has handed on; none is settled unless the test does it."""

    journal: Journal
    groups: "queue.Queue[ImageGroup]" = field(default_factory=queue.Queue)
    handed_on: int = 0
    settled: int = 0

    def __post_init__(self) -> None:
        self.thread = JournalThread(self.journal, DiskSpace({}, reserve_bytes=0), self._take)

    def _take(self, group: ImageGroup) -> None:
        self.handed_on += 1
        self.groups.put(group)

    def settle(self) -> None:
        self.settled += 1
        self.thread.settled()

    def next(self) -> ImageGroup:
        return self.groups.get(timeout=60)

    def stop(self) -> None:
        stopping = threading.Thread(target=self.thread.stop)
        stopping.start()
        while stopping.is_alive():
            while self.settled < self.handed_on:
                self.settle()
            stopping.join(0.001)
        self.journal.close()


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = Line(Journal(tmp_path / "journal"))
    line.thread.start()
    yield line
    line.stop()


@pytest.mark.parametrize("source", ["flood", "flood {}"], ids=["one source", "a source for each image"])
def test_a_flooding_source_does_not_put_its_queue_before_another_s_single_image(line: Line, source: str):
    for number in range(20 * GROUP_IMAGES):
        line.thread.store_image(*waiting(source.format(number), number, connection="one camera"))
    first = line.next()
    line.thread.store_image(*waiting("quiet", 0))
    line.settle()
    nexts: list[ImageGroup] = []
    for _ in range(3):  # the first was being written when the single image came
        nexts.append(line.next())
        line.settle()
    assert ("quiet", "i0") not in keys(first)
    assert ("quiet", "i0") in [key for group in nexts for key in keys(group)]


@pytest.mark.promise(
    "Overload and hostile publishers",
    "A group of images costs one sync, and there too a flood does not go ahead of another source's single image",
)
def test_a_group_costs_one_sync_and_each_image_has_its_bytes(line: Line, monkeypatch: pytest.MonkeyPatch):
    syncs: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr("os.fdatasync", lambda fd: (syncs.append(fd), real(fd))[1])
    for number in range(3 * GROUP_IMAGES):
        line.thread.store_image(*waiting("cam", number, b"%d" % number))
    groups, images = 0, 0
    while images < 3 * GROUP_IMAGES:
        group = line.next()
        for key, (image, _) in zip(group.keys, group.images, strict=True):
            assert line.journal.read(key) == image.image_id[1:].encode()
        groups, images = groups + 1, images + len(group.images)
        line.settle()
    assert len(syncs) == groups


def test_no_more_than_two_groups_are_ahead_of_the_database(line: Line):
    for number in range(5 * GROUP_IMAGES):
        line.thread.store_image(*waiting("cam", number))
    line.next()
    line.next()
    with pytest.raises(queue.Empty):
        line.groups.get(timeout=0.1)
    line.settle()
    assert len(line.next().images) == GROUP_IMAGES
