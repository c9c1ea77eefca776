"""A folder that a camera's software drops files into: whole ones once, half-written ones never, what was sent goes."""

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.experts.pictures import a_picture, encoded
from tests.lines import a_jpeg
from tests.tools.client.scripted_daemon import Answer, ScriptedDaemon
from tests.waiting import PATIENCE_S, until
from tools.camera import watch_folder
from tools.camera.layout import BoardLayout, LayoutPart, PictureFiles
from tools.camera.watch_folder import DroppedFile, FolderPublisher, SentFiles, WatchedFolder


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_folder, "_SCAN_PAUSE_S", 0.02)
    for patience in ("_LAST_ANSWERS_S", "_SILENCE_S"):  # a slow machine is not a silent daemon
        monkeypatch.setattr(watch_folder, patience, PATIENCE_S)


class Watched:
    """A watched folder, the place for accepted files, the messages, and scans."""

    def __init__(self, root: Path, *, moves: bool = False, layout: BoardLayout | None = None) -> None:
        self.folder = root / "in"
        self.folder.mkdir(exist_ok=True)
        self.done = root / "done"
        self.messages: list[str] = []
        self.pictures = PictureFiles(layout, "L1", say=self.messages.append)
        sent = SentFiles(root / "sent.jsonl", self.folder)
        self.watch = WatchedFolder(self.folder, sent, self.done if moves else None, self.pictures)

    def put(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def scan(self, times: int = 2) -> list[DroppedFile]:
        return [dropped for _ in range(times) for dropped in self.watch.scan()]

    def accept(self, name: str, content: bytes) -> None:
        """Drop a file, and have its images accepted."""
        self.put(name, content)
        (dropped,) = self.scan()
        self.watch.mark_accepted(dropped)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.rglob("*.jpg"))


@pytest.mark.promise(
    "Cameras",
    "A watched folder yields no half file and no file twice, even if it vanishes, fills up, or is overwritten",
)
@pytest.mark.parametrize("suffix", ["jpg", "png", "bmp", "tif"])
def test_a_file_that_is_still_being_written_is_never_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(watch_folder, "_PATIENCE_S", float("inf"))
    watched = Watched(tmp_path)
    picture = cv2.imdecode(np.frombuffer(a_jpeg(3), np.uint8), cv2.IMREAD_COLOR)
    assert picture is not None
    content = cv2.imencode(f".{suffix}", picture)[1].tobytes()
    last = 200 if suffix == "tif" else 2  # a TIFF ends with tables of which few bytes matter
    for length in (0, 1, 10, len(content) // 2, len(content) - last):
        watched.put(f"b/S1/R1.R0402.{suffix}", content[:length])
        assert watched.scan(4) == [], length  # although it did not grow for four scans
    path = watched.put(f"b/S1/R1.R0402.{suffix}", content[:-last])
    watched.scan(2)
    monkeypatch.setattr(watch_folder, "_PATIENCE_S", 0.0)
    watched.scan(3)
    (message,) = watched.messages
    assert message.startswith(f"not sent: {path}: ")
    assert message.endswith("(half-written, or damaged)")
    path.write_bytes(content)
    assert [dropped.content for dropped in watched.scan(3)] == [content]
    assert watched.pictures.not_sent == 1


@pytest.mark.promise("Cameras", "A watched BMP or TIFF is taken when it has rested for 10 s, or was renamed into place")
@pytest.mark.parametrize("kind", ["BMP", "TIFF"])
def test_a_picture_that_cannot_tell_its_end_must_rest_or_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(watch_folder, "_PATIENCE_S", float("inf"))
    watched, content = Watched(tmp_path), encoded(a_picture(), kind)
    watched.put("b/S1/R1.R0402.bmp", content[:200] + bytes(len(content) - 200))  # as long as it will be
    assert watched.scan(6) == []
    watched.put("b/S1/R1.R0402.bmp", content)
    assert watched.scan(6) == []
    part, clock = watched.put("b/S1/R2.part", content), tmp_path / "clock"
    until(lambda: clock.write_bytes(b"") == 0 and clock.stat().st_mtime_ns > part.stat().st_mtime_ns)
    part.rename(watched.folder / "b/S1/R2.R0402.bmp")
    assert [dropped.name for dropped in watched.scan(3)] == ["b/S1/R2.R0402.bmp"]
    monkeypatch.setattr(watch_folder, "_PATIENCE_S", 0.0)
    watched.put("b/S1/R3.R0402.bmp", content)
    assert [dropped.name for dropped in watched.scan(3)] == ["b/S1/R3.R0402.bmp"]


def test_of_two_watched_pictures_of_a_part_none_is_sent_until_one_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path)
    files = [watched.put(f"b/S1/{name}", a_jpeg(1)) for name in ("C1.C0603.jpg", "C1.C0603.png", "R1.R0402.jpg")]
    monkeypatch.setattr(watch_folder, "_PATIENCE_S", 0.0)
    assert [dropped.path for dropped in watched.scan()] == files[2:]
    twins = "there is another picture of that part: leave one"
    assert sorted(watched.messages) == [f"not sent: {file}: {twins}" for file in files[:2]]
    files[0].unlink()
    assert [dropped.path for dropped in watched.scan()] == files[1:2]


def test_what_was_accepted_is_remembered_through_a_restart_and_a_torn_line(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.accept("a.jpg", a_jpeg(1))
    watched.accept("b.jpg", a_jpeg(2))
    with (tmp_path / "sent.jsonl").open("a", encoding="utf-8") as file:
        file.write('["c.jp')  # killed while it wrote
    assert Watched(tmp_path).scan(4) == []
    watched.put("b.jpg", a_jpeg(3))
    assert [dropped.name for dropped in Watched(tmp_path).scan(4)] == ["b.jpg"], "another picture, the same name"
    (watched.folder / "a.jpg").unlink()
    Watched(tmp_path)
    assert [json.loads(line)[0] for line in (tmp_path / "sent.jsonl").read_text().splitlines()] == ["b.jpg"]


def test_what_was_accepted_is_moved_and_overwrites_nothing(tmp_path: Path) -> None:
    watched = Watched(tmp_path, moves=True)
    for seed in (1, 2):
        watched.accept("b/S1/R1.R0402.jpg", a_jpeg(seed))
    assert watched.names() == []
    assert (watched.done / "b/S1/R1.R0402.jpg").read_bytes() == a_jpeg(1)
    assert (watched.done / "b/S1/R1.R0402-2.jpg").read_bytes() == a_jpeg(2)


@pytest.mark.parametrize("is_between", [True, False])
def test_a_new_picture_under_the_name_of_one_that_is_moved_stays_for_the_next_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_between: bool
) -> None:
    """It comes before the move, or between the look at the file and its move."""
    watched = Watched(tmp_path, moves=True)
    path = watched.put("a.jpg", a_jpeg(1))
    (dropped,) = watched.scan()
    move = shutil.move

    def move_another(source: Path, target: Path) -> None:
        if source == path:
            path.write_bytes(a_jpeg(2, width=160))
        move(source, target)

    if is_between:
        monkeypatch.setattr(watch_folder.shutil, "move", move_another)
    else:
        path.write_bytes(a_jpeg(2, width=160))
    watched.watch.mark_accepted(dropped)
    assert [dropped.content for dropped in watched.scan(3)] == [a_jpeg(2, width=160)]
    assert not watched.done.exists() or list(watched.done.iterdir()) == []


def test_a_folder_that_vanishes_is_waited_for_and_remembers(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.accept("a.jpg", a_jpeg(1))
    watched.folder.rename(tmp_path / "unplugged")
    assert watched.scan(3) == []
    again = SentFiles(tmp_path / "sent.jsonl", watched.folder)  # a restart meanwhile forgets nothing
    (tmp_path / "unplugged").rename(watched.folder)
    stat = (watched.folder / "a.jpg").stat()
    assert again.has("a.jpg", (stat.st_size, stat.st_mtime_ns))
    watched.put("b.jpg", a_jpeg(2))
    assert [dropped.name for dropped in watched.scan(3)] == ["b.jpg"]
    assert watched.messages == [
        f"{watched.folder} cannot be read (No such file or directory): waiting for it to come back",
        f"{watched.folder} is back",
    ]


def test_links_fifos_and_other_files_are_left_alone(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "R1.R0402.jpg").write_bytes(a_jpeg(1))
    (watched.folder / "link.jpg").symlink_to(outside / "R1.R0402.jpg")
    (watched.folder / "tree").symlink_to(outside, target_is_directory=True)
    os.mkfifo(watched.folder / "pipe.jpg")
    watched.put("notes.txt", b"x")
    watched.put("R1.jpg.part", a_jpeg(1))
    assert watched.scan(4) == []
    assert watched.messages == []


@contextmanager
def published(watched: Watched, endpoint: str) -> Iterator[FolderPublisher]:
    """The publisher of a folder in a thread of its own."""
    stop = threading.Event()
    publisher = FolderPublisher(endpoint, "cam", watched.watch, stop)
    thread = threading.Thread(target=publisher.run)
    thread.start()
    try:
        yield publisher
    finally:
        stop.set()
        thread.join()


def test_dropped_files_are_published_and_moved_when_accepted_and_a_misnamed_one_is_said(tmp_path: Path) -> None:
    watched = Watched(tmp_path, moves=True)
    with ScriptedDaemon() as daemon, published(watched, daemon.endpoint) as publisher:
        for number in range(30):
            watched.put(f"b/S1/R{number}.R0402.jpg", a_jpeg(number))
        until(lambda: publisher.files["accepted"] == 30)
        watched.put("overview.jpg", a_jpeg(99))
        until(lambda: watched.pictures.not_sent)
        watched.put("b/L\udce4/R1.R0402.jpg", a_jpeg(98))
        until(lambda: watched.pictures.not_sent == 2)
    assert len(daemon.order) == 30 == len(set(daemon.order))
    assert len(list(watched.done.rglob("*.jpg"))) == 30
    assert watched.names() == ["R1.R0402.jpg", "overview.jpg"]
    assert "expected BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png" in watched.messages[-2]
    assert r"its name: 'L\udce4' is not UTF-8" in watched.messages[-1]


def test_a_refused_file_stays_is_said_and_not_sent_again_in_this_run(tmp_path: Path) -> None:
    def fussy(header: Answer, _times: int) -> Answer:
        if header["designator"] == "R1":
            return {"type": "rejected", "code": "unknown_board", "reason": "the rules name no board type 'b'"}
        return {"type": "duplicate", "differs": True} if header["designator"] == "R2" else {"type": "accepted"}

    watched = Watched(tmp_path, moves=True)
    with ScriptedDaemon(fussy) as daemon, published(watched, daemon.endpoint) as publisher:
        for number in (1, 2, 3):
            watched.put(f"b/S1/R{number}.R0402.jpg", a_jpeg(number))
        until(lambda: publisher.files["refused"] == 2 and publisher.files["accepted"] == 1)
        time.sleep(0.2)
    assert len(daemon.order) == 3
    assert watched.names() == ["R1.R0402.jpg", "R2.R0402.jpg"]
    assert any("unknown_board: the rules name no board type 'b'" in text for text in watched.messages)


def test_a_picture_of_a_whole_board_is_one_file_and_leaves_when_all_its_parts_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_folder, "_SILENCE_S", 0.3)  # the late one is asked for again soon
    layout = BoardLayout(
        board="b",
        size=(80, 60),
        parts={
            "R1": LayoutPart(component="R0402", box=(0, 0, 20, 10)),
            "U1": LayoutPart(component="QFP", box=(40, 20, 80, 60), turn=90),
        },
    )
    deaf = threading.Event()

    def one_late(header: Answer, _times: int) -> Answer | None:
        return None if header["designator"] == "U1" and not deaf.is_set() else {"type": "accepted"}

    watched = Watched(tmp_path, moves=True, layout=layout)
    picture = np.random.default_rng(1).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    with ScriptedDaemon(one_late) as daemon, published(watched, daemon.endpoint) as publisher:
        path = watched.put("A0815.png", cv2.imencode(".png", picture)[1].tobytes())
        wrong = watched.put("A0816.png", cv2.imencode(".png", picture[:50])[1].tobytes())
        until(lambda: len(daemon.seen) == 2)
        assert path.exists()
        assert publisher.files["accepted"] == 0
        deaf.set()
        until(lambda: not path.exists())
        until(lambda: watched.pictures.not_sent)
    assert wrong.exists()
    assert any("has 80 × 50 pixels, the layout of b is for 80 × 60" in text for text in watched.messages)
    payloads = [np.frombuffer(daemon.payloads[image], np.uint8) for image in daemon.seen]
    sent = [cv2.imdecode(payload, cv2.IMREAD_COLOR) for payload in payloads]
    assert np.array_equal(sent[0], picture[:10, :20])
    assert np.array_equal(sent[1], np.rot90(picture[20:60, 40:80], -1))
