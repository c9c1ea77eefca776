"""Whole boards from a video and from a camera: layouts, triggers, serials, damage, and a camera that is unplugged."""

import io
import json
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import pytest
from typer.testing import CliRunner

from coserve_client import SpoolingPublisher
from daemon.errors import ConfigError
from tests import ROOT
from tests.tools.client.scripted_daemon import ScriptedDaemon
from tests.waiting import PATIENCE_S, until
from tools.camera.layout import BoardLayout, LayoutPart, load_layout
from tools.camera.render import render_board
from tools.camera.render.images import DEFECT_RATE, VIDEO_PICTURES, board_plan, write_video
from tools.camera.station import (
    CameraDevice,
    ScannedLines,
    SourceError,
    Station,
    VideoFile,
    counted_serials,
    counter,
    every_nth,
    listed_serials,
)
from tools.cli.main import app

LAYOUT = BoardLayout(board="b", size=(64, 48), parts={"R1": LayoutPart(component="R0402", box=(8, 8, 40, 40))})


def a_video(path: Path, shades: list[int], size: tuple[int, int] = (64, 48)) -> Path:
    """A picture of one shade of grey each, 10 a second."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, size)
    for shade in shades:
        writer.write(np.full((size[1], size[0], 3), shade, np.uint8))
    writer.release()
    return path


def shade_of(png: bytes) -> int:
    picture = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_GRAYSCALE)
    assert picture is not None
    return round(float(picture.mean()) / 10) * 10


@dataclass(slots=True)
class StationRun:
    """Serial and shade of each board that arrived, the counts of the station, its messages, and all that was sent."""

    boards: list[tuple[str, int]]
    counts: Counter[str]
    messages: list[str]
    daemon: ScriptedDaemon
    error: str


def run(folder: Path, source: Any, trigger: Any, serials: Any, layout: BoardLayout = LAYOUT, **more: Any) -> StationRun:
    """Run a station until its source or its serials end."""
    messages: list[str] = []
    error = ""
    with ScriptedDaemon() as daemon, SpoolingPublisher(daemon.endpoint, "cam", folder / "spool") as publisher:
        station = Station(source, layout, trigger, iter(serials), publisher, messages.append, **more)
        try:
            station.run()
        except SourceError as failure:
            error = str(failure)
        source.close()
        assert publisher.wait(PATIENCE_S)
    boards = [(daemon.headers[image]["board"]["serial"], shade_of(daemon.payloads[image])) for image in daemon.seen]
    return StationRun(boards, station.counts, messages, daemon, error)


def test_every_nth_picture_is_a_board_whose_serial_counts_up_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    video = a_video(tmp_path / "v.avi", [10, 20, 30, 40, 50, 60])
    counter = tmp_path / "serials.json"
    first = run(tmp_path, VideoFile(video), every_nth(2), counted_serials("A", counter))
    assert first.boards == [("A-000001", 10), ("A-000002", 30), ("A-000003", 50)]
    assert first.counts == {"pictures": 6, "boards": 3}
    second = run(tmp_path, VideoFile(video), every_nth(5), counted_serials("A", counter))
    assert second.boards == [("A-000004", 10), ("A-000005", 60)]
    counter.write_text("{")
    with pytest.raises(OSError, match=r"serials\.json cannot be read"):
        counted_serials("A", counter)


@pytest.mark.promise("Cameras", "With `camera --serial` each picture is an attempt of its own, which the camera names")
def test_each_picture_of_one_serial_is_an_attempt_of_its_own_after_a_restart_too(tmp_path: Path) -> None:
    video = a_video(tmp_path / "v.avi", [10, 20, 30])

    def attempts(newest: int) -> list[int]:
        count = counter(tmp_path / "attempts.json")
        source = VideoFile(video)
        station = run(tmp_path, source, every_nth(1), repeat("S1"), next_attempt=lambda: count("b/S1", newest))
        return [station.daemon.headers[image]["board"]["attempt"] for image in station.daemon.seen]

    assert attempts(0) == [1, 2, 3]
    assert attempts(0) == [4, 5, 6]
    assert attempts(10) == [11, 12, 13]  # another camera tested it meanwhile


def test_each_line_of_a_barcode_reader_takes_the_next_picture_of_a_recording(tmp_path: Path) -> None:
    video = a_video(tmp_path / "v.avi", [10, 20, 30, 40])
    lines = ScannedLines(io.StringIO("A1\r\nB\x1d2\nA3\n"), print)
    station = run(tmp_path, VideoFile(video), lines, lines.serials())
    assert station.boards == [("A1", 10), ("A3", 30)]
    assert "invisible characters" in station.messages[0]
    entered = run(tmp_path, VideoFile(video), ScannedLines(io.StringIO("\n\n"), print), repeat("S1"))
    assert entered.boards == [("S1", 10), ("S1", 20)]


def test_a_scan_that_is_no_text_does_not_end_the_station(tmp_path: Path) -> None:
    a_video(tmp_path / "v.avi", [10, 20, 30])
    (tmp_path / "l.yaml").write_text(SIZE + "  R1: {component: R, box: [0, 0, 9, 9]}\n")
    with ScriptedDaemon() as daemon:
        words = ["camera", daemon.endpoint, "--video", tmp_path / "v.avi", "--layout", tmp_path / "l.yaml"]
        words += ["--serials-from", "-", "--state", tmp_path / "state"]
        done = CliRunner().invoke(app, list(map(str, words)), input=b"\xef\xbb\xbfA1\nB\xe42\nA3\n")
    assert [daemon.headers[image]["board"]["serial"] for image in daemon.order] == ["A1", "A3"], done.output
    assert r"no serial: 'B\udce42' is not UTF-8: correct it" in done.stderr


def test_a_video_that_is_cut_off_says_where_after_what_it_had(tmp_path: Path) -> None:
    video = a_video(tmp_path / "v.avi", [10, 20, 30, 40] * 5, size=(640, 480))
    video.write_bytes(video.read_bytes()[: video.stat().st_size // 2])
    layout = LAYOUT.model_copy(update={"size": (640, 480)})
    station = run(tmp_path, VideoFile(video), every_nth(1), repeat("S1"), layout)
    assert re.search(r"ends after \d+ of 20 pictures: it is cut off or damaged", station.error)
    assert 1 < len(station.boards) < 20
    for content in (b"", b"no video", np.random.default_rng(1).bytes(5000)):
        video.write_bytes(content)
        with pytest.raises(SourceError, match="is not a readable video"):
            VideoFile(video)
    with pytest.raises(SourceError, match="no video"):
        VideoFile(tmp_path / "none.avi")


class Cameras:
    """Videos that `open` returns in turn, each of which ends as an unplugged camera does, or None: no camera."""

    def __init__(self, *videos: Path | None) -> None:
        self._videos = list(videos)
        self.opened = 0
        self.on_open: Callable[[int], None] = lambda _: None

    def open(self) -> cv2.VideoCapture:
        video = self._videos[min(self.opened, len(self._videos) - 1)]
        self.opened += 1
        self.on_open(self.opened)
        return cv2.VideoCapture(str(video), cv2.CAP_FFMPEG) if video else cv2.VideoCapture()


@pytest.mark.promise(
    "Cameras",
    "After an unplugged camera returns, serials scanned meanwhile are not applied to another board; a "
    "truncated video is reported",
)
def test_a_camera_that_is_unplugged_is_opened_again_until_it_is_back(tmp_path: Path) -> None:
    videos = [a_video(tmp_path / f"{shade}.avi", [shade] * 3) for shade in (10, 50)]
    cameras = Cameras(videos[0], None, videos[1], None)
    stop = threading.Event()
    cameras.on_open = lambda count: stop.set() if count >= 4 else None
    messages: list[str] = []
    source = CameraDevice(cameras.open, "/dev/video0", messages.append, stop)
    station = run(tmp_path, source, every_nth(1), repeat("S1"))
    assert station.boards[:3] == [("S1", 10)] * 3
    assert ("S1", 50) in station.boards
    assert messages[:2] == [
        "/dev/video0 delivers no pictures: it was unplugged or has failed; trying again until it is back",
        "/dev/video0 is back",
    ]
    assert source.times_lost == 2


def test_scans_made_while_the_camera_was_away_are_dropped_aloud(tmp_path: Path) -> None:
    """The board that was scanned may have gone: its serial must not go to the board that is there now."""
    videos = [a_video(tmp_path / f"{shade}.avi", [shade] * 4) for shade in (10, 50)]
    cameras = Cameras(videos[0], videos[1], None)
    stop = threading.Event()
    scans: queue.SimpleQueue[str] = queue.SimpleQueue()
    lines = ScannedLines(cast("Any", iter(scans.get, "")), print)

    def plug(count: int) -> None:
        if count == 2:
            scans.put("OLD-1\n")
            scans.put("OLD-2\n")
            until(lambda: lines._lines.qsize() == 2)
        if count == 3:
            stop.set()
            scans.put("")

    cameras.on_open = plug
    station = run(tmp_path, CameraDevice(cameras.open, "cam", print, stop), lines, lines.serials())
    assert station.boards == []
    assert station.messages == ["2 lines were read while the camera was away: scan those boards again"]


SIZE = "board: b\nsize: [64, 48]\nparts:\n"
MISTAKES = {
    SIZE + "  R1: {component: R, box: [0, 0, 65, 10]}\n": "l.yaml:4:27: the box [0, 0, 65, 10] is not within",
    "board: b\nsize: [0, 48]\nparts:\n  R1: {component: R, box: [0, 0, 1, 1]}\n": "l.yaml:2:7: expected [width, h",
    SIZE + "  R1: {component: R, box: [0, 0, 1, 1]}\n  R1: {component: R, box: [0, 0, 1, 1]}\n": "l.yaml:5:",
    SIZE.replace("size", "sise") + "  R1: {component: R, box: [0, 0, 1, 1]}\n": "l.yaml:2:1:",
}


@pytest.mark.parametrize("text", MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_in_a_layout_come_with_their_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "l.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_layout(tmp_path / "l.yaml")
    assert MISTAKES[text] in str(error.value)


@pytest.mark.parametrize("suffix", ["avi", "mp4"])
def test_boards_pass_in_a_rendered_video_and_every_part_is_where_its_layout_says(tmp_path: Path, suffix: str) -> None:
    video = tmp_path / f"belt.{suffix}"
    layout_file, serials = write_video(video, 2, 11, "B")
    layout = load_layout(layout_file)
    trigger = every_nth(VIDEO_PICTURES)
    station = run(tmp_path, VideoFile(video), trigger, listed_serials(serials), layout)
    (serial, _, seed), _ = board_plan(2, 11, "B")
    truth = {part.designator: part for part in render_board("sensor-node", seed, DEFECT_RATE).placements}
    assert len(station.boards) == 2 * len(layout.parts) == 2 * len(truth)
    for image in station.daemon.order[: len(truth)]:
        header = station.daemon.headers[image]
        placement = truth[header["designator"]]
        assert (header["board"]["serial"], header["component"]) == (serial, placement.component)
        pixels = cv2.imdecode(np.frombuffer(station.daemon.payloads[image], np.uint8), cv2.IMREAD_COLOR_RGB)
        assert pixels is not None
        shift = [
            np.abs(np.roll(pixels, (y, x), (0, 1)).astype(int) - placement.pixels).mean()
            for y in range(-2, 3)
            for x in range(-2, 3)
        ]
        assert min(shift) < 12, header["designator"]  # the crops drift by two pixels, and the video is compressed
    with pytest.raises(ValueError, match=r"ends with \.avi or \.mp4"):
        write_video(tmp_path / "belt.gif", 1, 11, "B")


def test_the_picture_of_a_scanned_line_is_one_that_was_taken_after_it(tmp_path: Path) -> None:
    """A camera keeps pictures while the board before is cut: those are of the board before."""
    video = a_video(tmp_path / "v.avi", [10, 10, 10, 10, 50, 50, 50, 50])
    stop = threading.Event()
    cameras = Cameras(video, None)
    cameras.on_open = lambda count: stop.set() if count > 1 else None
    lines = ScannedLines(io.StringIO("A1\n"), print)
    until(lambda: lines._lines.qsize() == 2)  # the line, and that there are no more
    source = CameraDevice(cameras.open, "cam", print, stop)
    assert run(tmp_path, source, lines, lines.serials(), stop=stop).boards == [("A1", 50)]


def test_a_station_that_is_stopped_spools_what_it_has_and_says_so(tmp_path: Path) -> None:
    write_video(tmp_path / "belt.avi", 1, 11, "B")
    words = [sys.executable, "-m", "tools", "camera", "tcp://127.0.0.1:1", "--video", "belt.avi"]
    words += ["--layout", "belt.yaml", "--serials-from", "-", "--state", str(tmp_path / "state"), "--json"]
    with subprocess.Popen(
        words, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as station:  # fmt: skip
        assert station.stdin is not None
        station.stdin.write("S-1\n")
        station.stdin.flush()
        until(lambda: len(list((tmp_path / "state/spool").glob("*.image"))) == 35)
        station.send_signal(signal.SIGTERM)
        account = json.loads(station.communicate(timeout=120)[0])
    assert station.returncode == 1
    assert account["left in the spool"] == 35 == account["published"]
