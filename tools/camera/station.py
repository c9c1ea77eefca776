"""A station: one camera, boards that come to it, the parts cut out of each picture and published.

A trigger chooses the pictures, a source of serials names their boards. Lines on standard input can be both.
"""

import itertools
import json
import queue
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TextIO

import cv2
from numpy.typing import NDArray

from coserve_client import NoRoomError, SpoolingPublisher
from experts.durable import replace_durably
from experts.errors import ImageError
from tools.camera.layout import BoardLayout, TrainingFolder, board_fields, cut, key
from tools.terminal.console import CommandError
from tools.terminal.names import legal_name, read_text

_MAX_PAUSE_S = 5.0
#: A camera that delivers nothing for this many reads in a row is gone.
_FAILED_READS = 3


class SourceError(OSError):
    """A source gives no pictures; the text says why and what to do."""


class _Capture:
    """Pictures from OpenCV: `advance` takes the next one, `picture` decodes it."""

    def __init__(self, name: str, capture: cv2.VideoCapture) -> None:
        self._name = name
        self._capture = capture
        self._taken = 0
        #: How often a camera was away: lines that were scanned meanwhile belong to no picture.
        self.times_lost = 0

    def picture(self) -> NDArray[Any]:
        """Return (height, width, 3) uint8 BGR."""
        done, picture = self._capture.retrieve()
        if not done:
            raise SourceError(f"{self._name}: picture {self._taken} cannot be decoded")
        return picture

    def close(self) -> None:
        self._capture.release()


class VideoFile(_Capture):
    """A recording, read as fast as possible; its clock is the recording's."""

    is_live = False  # no picture is missed while another is cut

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise SourceError(f"no video {path}")
        super().__init__(str(path), cv2.VideoCapture(str(path), cv2.CAP_FFMPEG))
        if not self._capture.isOpened():
            raise SourceError(
                f"{path} is not a readable video: it is damaged, still being written, or another kind of file"
            )
        self._frames = int(self._capture.get(cv2.CAP_PROP_FRAME_COUNT))
        self._rate = self._capture.get(cv2.CAP_PROP_FPS) or 25.0

    def advance(self) -> bool:
        """Take the next picture; False at the end, SourceError if the recording breaks off."""
        if self._capture.grab():
            self._taken += 1
            return True
        if self._taken < self._frames:
            raise SourceError(
                f"{self._name} ends after {self._taken} of {self._frames} pictures: it is cut off or damaged"
            )
        return False

    @property
    def now_s(self) -> float:
        """The time of that picture, on the source's own clock, which cannot be set."""
        return (self._taken - 1) / self._rate


class CameraDevice(_Capture):
    """A camera. When it is unplugged, it is opened again until it is back, or `stop` is set.

    It buffers pictures, so all are taken and most thrown away: the one used is never an old one.
    """

    is_live = True

    def __init__(
        self, open_camera: Callable[[], cv2.VideoCapture], name: str, say: Callable[[str], None], stop: threading.Event
    ) -> None:
        """Open the camera; SourceError if that fails the first time. `say` tells a person."""
        super().__init__(name, open_camera())
        self._open_camera, self._say, self._stop = open_camera, say, stop
        if not self._capture.isOpened():
            raise SourceError(
                f"{name} does not open: is it plugged in, used by nothing else, and are you in the group `video`?"
            )

    def advance(self) -> bool:
        while not self._stop.is_set():
            if any(self._capture.grab() for _ in range(_FAILED_READS)):
                self._taken += 1
                return True
            self._reopen()
        return False

    @property
    def now_s(self) -> float:
        return time.monotonic()

    def _reopen(self) -> None:
        self.times_lost += 1
        self._say(f"{self._name} delivers no pictures: it was unplugged or has failed; trying again until it is back")
        pause_s = 0.5
        while not self._stop.is_set():
            self._capture.release()
            self._capture = self._open_camera()
            if self._capture.isOpened() and self._capture.grab():
                self._say(f"{self._name} is back")
                return
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)


FrameSource = VideoFile | CameraDevice


def v4l2(device: str, size: tuple[int, int] | None, rate: float | None) -> Callable[[], cv2.VideoCapture]:
    """Return a function that opens a V4L2 camera, by number or path. It may choose a size and rate near these."""

    def open_camera() -> cv2.VideoCapture:
        settings: list[tuple[int, float]] = [(cv2.CAP_PROP_BUFFERSIZE, 1)]
        if size is not None:
            settings += [(cv2.CAP_PROP_FRAME_WIDTH, size[0]), (cv2.CAP_PROP_FRAME_HEIGHT, size[1])]
        if rate is not None:
            settings.append((cv2.CAP_PROP_FPS, rate))
        camera = cv2.VideoCapture(int(device) if device.isdigit() else device, cv2.CAP_V4L2)
        for setting, value in settings if camera.isOpened() else ():
            camera.set(setting, value)
        return camera

    return open_camera


#: Interval at which a station that waits for a line checks whether it was stopped.
_LINE_WAIT_S = 0.2
#: Pictures that a camera may have buffered before a line came, while the board before it was cut.
_BUFFERED_PICTURES = 4

#: `trigger(number, now_s)`: True if picture `number` (from 0), taken at `now_s`, is wanted.
Trigger = Callable[[int, float], bool]


def counter(file: Path) -> Callable[[str, int], int]:
    """Return a function that counts up by name, from beyond a number: each is stored before use, and none comes twice.

    OSError for a bad file.
    """
    try:
        numbers: dict[str, int] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (ValueError, OSError) as error:
        raise OSError(f"{file} cannot be read ({error}): restore it from a copy, or take another name") from None

    def count(name: str, beyond: int) -> int:
        numbers[name] = max(numbers.get(name, 0), beyond) + 1
        replace_durably(file, json.dumps(numbers))
        return numbers[name]

    return count


def counted_serials(prefix: str, file: Path) -> Iterator[str]:
    """Count `PREFIX-000001` and on. OSError for a bad numbers file."""
    count = counter(file)
    return (f"{prefix}-{count(prefix, 0):06d}" for _ in itertools.repeat(None))


def listed_serials(file: Path, encoding: str | None = None) -> Iterator[str]:
    """Return the lines of a text file, without empty ones, one for each picture taken.

    CommandError names the line of a wrong one: without it the next board would have the serial of another.
    """
    lines = enumerate(re.split(r"\r\n?|\n", read_text(file, encoding or "utf-8")), 1)
    return iter([legal_name(line, f"{file}:{number}") for number, line in lines if line.strip()])


def every_nth(count: int) -> Trigger:
    return lambda number, _now_s: number % count == 0


def interval_of(seconds: float) -> Trigger:
    """Trigger on one picture each `seconds`; after a pause there is no burst."""
    next_s = float("-inf")

    def fires(_number: int, now_s: float) -> bool:
        nonlocal next_s
        if now_s < next_s - 1e-6:
            return False
        next_s = (now_s if now_s - next_s >= seconds else next_s) + seconds
        return True

    return fires


class ScannedLines:
    """Lines on standard input, from a barcode reader or a person who presses Enter: a trigger, and its serials."""

    def __init__(self, stream: TextIO, say: Callable[[str], None]) -> None:
        self.is_over = False
        self._stream = stream
        self._say = say
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._line: str | None = None
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    def serials(self) -> Iterator[str]:
        """Yield the line that triggered, each time it is asked for."""
        while self._line is not None:
            yield self._line

    def wait(self, timeout_s: float) -> bool:
        """Return True if a line came within `timeout_s`; `serials` then yields it."""
        if self.is_over:
            return False
        try:
            line = self._lines.get(timeout=timeout_s) if timeout_s else self._lines.get_nowait()
        except queue.Empty:
            return False
        self.is_over = line is None
        self._line = line
        return line is not None

    def drop(self) -> int:
        """Drop waiting lines, whose boards are no longer under the camera, and return how many."""
        dropped = 0
        while self.wait(0.0):
            dropped += 1
        return dropped

    def _read(self) -> None:
        try:
            for line in self._stream:
                self._lines.put(line.rstrip("\r\n"))
        except (OSError, ValueError) as error:
            self._say(f"standard input cannot be read any more: {error}")
        self._lines.put(None)


@dataclass(frozen=True, slots=True)
class Station:
    """`run` until the source, the serials or standard input end, or `stop` is set."""

    source: FrameSource
    layout: BoardLayout
    trigger: Trigger | ScannedLines
    serials: Iterator[str]
    publisher: SpoolingPublisher | TrainingFolder
    say: Callable[[str], None]
    lot: str | None = None
    tell_trouble: Callable[[str], None] = lambda _: None
    #: Counts the attempts at the board, where each picture is one; else the daemon does.
    next_attempt: Callable[[], int] | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    counts: Counter[Literal["pictures", "boards", "failed"]] = field(default_factory=Counter)

    def run(self) -> None:
        """Publish boards, and count them in `counts`; SourceError if the source breaks."""
        while not self.stop.is_set() and self._advance():
            self._report()
            if not self._is_wanted():
                continue
            if isinstance(self.trigger, ScannedLines) and self.source.is_live and not self._skip_buffered():
                return
            serial = next(self.serials, None)
            if serial is None:
                return
            try:
                if serial.strip():
                    self._publish(legal_name(serial, "no serial"))
            except CommandError as error:
                self.say(str(error))

    def _advance(self) -> bool:
        """Take the next picture. A recording waits for a line first, so that each line takes one picture."""
        lines = self.trigger if isinstance(self.trigger, ScannedLines) else None
        if lines is not None and not self.source.is_live:
            while not lines.wait(_LINE_WAIT_S):
                self._report()
                if lines.is_over or self.stop.is_set():
                    return False
        times_lost = self.source.times_lost
        if not self.source.advance():
            return False
        self.counts["pictures"] += 1
        if lines is not None and times_lost != self.source.times_lost and (dropped := lines.drop()):
            self.say(f"{dropped} lines were read while the camera was away: scan those boards again")
        return not (lines is not None and lines.is_over)

    def _report(self) -> None:
        if isinstance(self.publisher, SpoolingPublisher):
            self.tell_trouble(self.publisher.trouble)

    def _skip_buffered(self) -> bool:
        """Skip the pictures that the camera has buffered: a line's picture is taken after it."""
        for _ in range(_BUFFERED_PICTURES):
            if not self.source.advance():
                return False
            self.counts["pictures"] += 1
        return True

    def _is_wanted(self) -> bool:
        if isinstance(self.trigger, ScannedLines):
            return not self.source.is_live or self.trigger.wait(0.0)
        return self.trigger(self.counts["pictures"] - 1, self.source.now_s)

    def _publish(self, serial: str) -> None:
        try:
            parts = cut(self.source.picture(), self.layout)
        except SourceError as error:
            self.counts["failed"] += 1
            self.say(f"board {serial}: {error}")
            return
        except ImageError as error:
            raise SourceError(str(error)) from None
        board = board_fields(self.layout.board, serial, self.lot)
        board |= {"attempt": self.next_attempt()} if self.next_attempt else {}
        more = {"captured_at": datetime.now(UTC).isoformat(timespec="milliseconds")} if self.source.is_live else {}
        shot = f"{key(serial)[:60]}/{uuid.uuid4().hex[:12]}"  # no clock, no counter: another picture, another id
        try:
            for number, part in enumerate(parts):
                fields = {"component": part.component, "designator": part.designator, **more}
                self.publisher.publish(f"{shot}/{number}", part.png, board=board, **fields)
        except NoRoomError as error:
            self.counts["failed"] += 1
            self.say(f"board {serial} is incomplete: {error}")
            return
        self.counts["boards"] += 1
