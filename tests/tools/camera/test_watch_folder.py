"""A folder that a camera's software drops files into: whole ones once, half-written ones never, what was sent goes."""

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tests.lines import a_jpeg
from tests.tools.client.scripted_daemon import Answer, a_daemon, accept
from tests.waiting import PATIENCE_S, until
from tools.camera import files, watch_folder, watching
from tools.camera.layout import Layout, Part
from tools.camera.watch_folder import Dropped, Remembered, WatchedFolder
from tools.camera.watching import Watcher


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_LOOK_EVERY_S", 0.02)
    for patience in ("_LAST_ANSWERS_S", "_SILENCE_S"):  # who is slow on this machine is not silent
        monkeypatch.setattr(watching, patience, PATIENCE_S)


class Watched:
    """A folder, the place for what was accepted, what was said, and looks at it."""

    def __init__(self, root: Path, *, moves: bool = False) -> None:
        self.folder = root / "in"
        self.folder.mkdir(exist_ok=True)
        self.done = root / "done"
        self.said: list[str] = []
        self.remembered = Remembered(root / "sent.jsonl", self.folder)
        self.watch = WatchedFolder(self.folder, self.remembered, self.done if moves else None, self.said.append)

    def put(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def look(self, times: int = 2) -> list[Dropped]:
        return [dropped for _ in range(times) for dropped in self.watch.look()]


def test_a_file_is_given_once_when_two_looks_find_it_whole_and_unchanged(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.put("b/S1/R1.R0402.jpg", a_jpeg(1))
    assert watched.look(1) == []
    (dropped,) = watched.look(5)
    assert (dropped.name, dropped.content) == ("b/S1/R1.R0402.jpg", a_jpeg(1))


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
        assert watched.look(4) == [], length  # although nobody has written to it for four looks
    path = watched.put(f"b/S1/R1.R0402.{suffix}", content[:-last])
    watched.look(2)
    monkeypatch.setattr(watch_folder, "_PATIENCE_S", 0.0)
    watched.look(3)
    (said,) = watched.said
    assert said.startswith(f"{path} stays where it is, not sent: ")
    assert said.endswith("(half-written, or damaged)")
    path.write_bytes(content)
    assert [dropped.content for dropped in watched.look(3)] == [content]
    assert watched.watch.incomplete == 1


def test_what_was_accepted_is_remembered_through_a_restart_and_a_torn_line(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.put("a.jpg", a_jpeg(1))
    watched.put("b.jpg", a_jpeg(2))
    for dropped in watched.look():
        watched.watch.accepted(dropped)
    with (tmp_path / "sent.jsonl").open("a", encoding="utf-8") as file:
        file.write('["c.jp')  # killed while it wrote
    assert Watched(tmp_path).look(4) == []
    watched.put("b.jpg", a_jpeg(3))
    assert [dropped.name for dropped in Watched(tmp_path).look(4)] == ["b.jpg"], "another picture, the same name"
    (watched.folder / "a.jpg").unlink()
    Watched(tmp_path)
    assert [json.loads(line)[0] for line in (tmp_path / "sent.jsonl").read_text().splitlines()] == ["b.jpg"]


def test_what_was_accepted_is_moved_and_overwrites_nothing(tmp_path: Path) -> None:
    watched = Watched(tmp_path, moves=True)
    for seed in (1, 2):
        watched.put("b/S1/R1.R0402.jpg", a_jpeg(seed))
        for dropped in watched.look():
            watched.watch.accepted(dropped)
    assert not list(watched.folder.rglob("*.jpg"))
    assert (watched.done / "b/S1/R1.R0402.jpg").read_bytes() == a_jpeg(1)
    assert (watched.done / "b/S1/R1.R0402-2.jpg").read_bytes() == a_jpeg(2)


def test_a_new_picture_that_came_under_the_name_before_the_move_is_not_moved_with_it(tmp_path: Path) -> None:
    watched = Watched(tmp_path, moves=True)
    path = watched.put("a.jpg", a_jpeg(1))
    (dropped,) = watched.look()
    path.write_bytes(a_jpeg(2, width=160))
    watched.watch.accepted(dropped)
    assert path.exists()
    assert [dropped.content for dropped in watched.look(3)] == [a_jpeg(2, width=160)]


def test_a_new_picture_that_comes_in_the_moment_of_the_move_goes_back_to_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path, moves=True)
    path = watched.put("a.jpg", a_jpeg(1))
    (dropped,) = watched.look()
    move = shutil.move

    def just_before(source: Path, target: Path) -> None:
        if source == path:
            path.write_bytes(a_jpeg(2))
        move(source, target)

    monkeypatch.setattr(watch_folder.shutil, "move", just_before)
    watched.watch.accepted(dropped)
    assert [dropped.content for dropped in watched.look(3)] == [a_jpeg(2)]
    assert list(watched.done.iterdir()) == []


def test_a_moved_picture_that_somebody_collects_at_once_is_no_complaint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path, moves=True)
    watched.put("a.jpg", a_jpeg(1))
    (dropped,) = watched.look()
    move = shutil.move

    def and_collected(source: Path, target: Path) -> None:
        move(source, target)
        target.unlink()

    monkeypatch.setattr(watch_folder.shutil, "move", and_collected)
    watched.watch.accepted(dropped)
    assert watched.said == []


def test_what_cannot_be_moved_is_said_and_remembered(tmp_path: Path) -> None:
    watched = Watched(tmp_path, moves=True)
    watched.done.write_text("a file where a folder should be")
    watched.put("a.jpg", a_jpeg(1))
    (dropped,) = watched.look()
    watched.watch.accepted(dropped)
    assert "cannot be moved to" in watched.said[0]
    assert Watched(tmp_path).look(4) == []


def test_a_folder_that_vanishes_is_waited_for_and_remembers(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.put("a.jpg", a_jpeg(1))
    watched.watch.accepted(watched.look()[0])
    watched.folder.rename(tmp_path / "unplugged")
    assert watched.look(3) == []
    again = Remembered(tmp_path / "sent.jsonl", watched.folder)  # a restart meanwhile forgets nothing
    (tmp_path / "unplugged").rename(watched.folder)
    stat = (watched.folder / "a.jpg").stat()
    assert again.has("a.jpg", (stat.st_size, stat.st_mtime_ns))
    watched.put("b.jpg", a_jpeg(2))
    assert [dropped.name for dropped in watched.look(3)] == ["b.jpg"]
    assert watched.said == [
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
    assert watched.look(4) == []
    assert watched.said == []


def test_a_file_from_the_future_or_the_past_is_given_all_the_same(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    for number, at_s in enumerate((4 * 10**9, 0, 10**9)):
        os.utime(watched.put(f"{number}.jpg", a_jpeg(number)), (at_s, at_s))
    assert [dropped.name for dropped in watched.look()] == ["1.jpg", "2.jpg", "0.jpg"]


@contextmanager
def watching_it(watched: Watched, endpoint: str, images_of: Any = None) -> Iterator[Watcher]:
    """The watcher in a thread of its own."""
    over = threading.Event()
    watcher = Watcher(endpoint, "cam", watched.watch, images_of or files.parts("L1"), watched.said.append, over)

    def run() -> None:
        watcher.run()
        watcher.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield watcher
    finally:
        over.set()
        thread.join()


def test_dropped_files_are_published_and_moved_when_accepted_and_a_misnamed_one_is_said(tmp_path: Path) -> None:
    watched = Watched(tmp_path, moves=True)
    with a_daemon(accept, most_bytes=10**6) as daemon, watching_it(watched, daemon.endpoint) as watcher:
        for number in range(30):
            watched.put(f"b/S1/R{number}.R0402.jpg", a_jpeg(number))
        until(lambda: watcher.files.accepted == 30)
        watched.put("overview.jpg", a_jpeg(99))
        until(lambda: watcher.files.unfit)
    assert len(daemon.order) == 30 == len(set(daemon.order))
    assert len(list(watched.done.rglob("*.jpg"))) == 30
    assert [path.name for path in watched.folder.rglob("*.jpg")] == ["overview.jpg"]
    assert "expected BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png" in watched.said[-1]


def test_the_same_name_with_other_bytes_is_another_image_and_the_same_bytes_are_not(tmp_path: Path) -> None:
    watched = Watched(tmp_path, moves=True)
    with a_daemon(accept, most_bytes=10**6) as daemon, watching_it(watched, daemon.endpoint) as watcher:
        for seed in (1, 2, 1):
            path = watched.put("b/S 1/R1.R0402.jpg", a_jpeg(seed))
            until(lambda path=path: not path.exists())  # it is accepted a moment before
    assert watcher.files.accepted == 3
    first, second, third = daemon.order
    assert first == third != second
    assert first.startswith("S-1/R1/")


def test_a_refused_file_stays_is_said_and_not_sent_again_in_this_run(tmp_path: Path) -> None:
    def fussy(header: Answer, _times: int) -> Answer:
        if header["designator"] == "R1":
            return {"type": "rejected", "code": "unknown_board", "reason": "the rules name no board type 'b'"}
        return {"type": "duplicate", "differs": True} if header["designator"] == "R2" else {"type": "accepted"}

    watched = Watched(tmp_path, moves=True)
    with a_daemon(fussy, most_bytes=10**6) as daemon, watching_it(watched, daemon.endpoint) as watcher:
        for number in (1, 2, 3):
            watched.put(f"b/S1/R{number}.R0402.jpg", a_jpeg(number))
        until(lambda: watcher.files.refused == 2 and watcher.files.accepted == 1)
        time.sleep(0.2)
    assert len(daemon.order) == 3
    assert sorted(path.name for path in watched.folder.rglob("*.jpg")) == ["R1.R0402.jpg", "R2.R0402.jpg"]
    assert any("unknown_board: the rules name no board type 'b'" in text for text in watched.said)


def test_a_picture_of_a_whole_board_is_one_file_and_leaves_when_all_its_parts_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_SILENCE_S", 0.3)  # the late one is asked for again soon
    layout = Layout(
        board="b",
        size=(80, 60),
        parts={
            "R1": Part(component="R0402", box=(0, 0, 20, 10)),
            "U1": Part(component="QFP", box=(40, 20, 80, 60), turn=90),
        },
    )
    deaf = threading.Event()

    def one_late(header: Answer, _times: int) -> Answer | None:
        return None if header["designator"] == "U1" and not deaf.is_set() else {"type": "accepted"}

    watched = Watched(tmp_path, moves=True)
    picture = np.random.default_rng(1).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    with (
        a_daemon(one_late, most_bytes=10**6) as daemon,
        watching_it(watched, daemon.endpoint, files.whole_boards(layout, None)) as watcher,
    ):
        path = watched.put("A0815.png", cv2.imencode(".png", picture)[1].tobytes())
        wrong = watched.put("A0816.png", cv2.imencode(".png", picture[:50])[1].tobytes())
        until(lambda: len(daemon.seen) == 2)
        assert path.exists()
        assert watcher.files.accepted == 0
        deaf.set()
        until(lambda: not path.exists())
        until(lambda: watcher.files.unfit)
    assert wrong.exists()
    assert any("has 80 × 50 pixels, the layout of b is for 80 × 60" in text for text in watched.said)
    payloads = [np.frombuffer(daemon.payloads[image], np.uint8) for image in daemon.seen]
    sent = [cv2.imdecode(payload, cv2.IMREAD_COLOR) for payload in payloads]
    assert np.array_equal(sent[0], picture[:10, :20])
    assert np.array_equal(sent[1], np.rot90(picture[20:60, 40:80], -1))


def test_a_folder_that_fills_while_the_daemon_is_away_is_published_when_it_comes(tmp_path: Path) -> None:
    with a_daemon(accept) as probe:
        endpoint = probe.endpoint
    watched = Watched(tmp_path)
    for number in range(50):
        watched.put(f"b/S1/R{number}.R0402.jpg", a_jpeg(number))
    shutil.copytree(watched.folder, tmp_path / "copy")

    with watching_it(watched, endpoint) as watcher:
        time.sleep(0.2)
        assert watcher.account.sent == 0
        with a_daemon(accept, endpoint, most_bytes=10**6) as daemon:
            until(lambda: watcher.files.accepted == 50)
            assert len(set(daemon.order)) == 50
    assert sorted(path.name for path in watched.folder.rglob("*.jpg")) == sorted(
        path.name for path in (tmp_path / "copy").rglob("*.jpg")
    )
