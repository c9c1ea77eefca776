"""A station: one camera, boards that come to it, the parts cut out of each picture and handed to the publisher."""

import re
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from coserve_client import NoRoomError, SpoolingPublisher
from tools.camera.frame_source import FrameSource, SourceError
from tools.camera.layout import Layout, WrongSizeError, cut
from tools.camera.serials import Serials, Trigger, Typed, is_serial

_NOT_OF_A_KEY = re.compile(r"[^A-Za-z0-9._:-]+")
#: At a recording, where no picture is missed, a person's next line is waited for so long at once.
_LINE_WAIT_S = 0.2
#: Pictures that a camera may have kept from before a line came, while the board before it was cut.
_KEPT_PICTURES = 4


@dataclass(slots=True)
class Seen:
    """What passed: pictures of the source, boards that were cut and handed on, boards that were not."""

    pictures: int = 0
    boards: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Station:
    """`run` until source, serials or standard input end, or `stop` is set; SourceError where the source breaks."""

    source: FrameSource
    layout: Layout
    trigger: Trigger
    serials: Serials
    publisher: SpoolingPublisher
    say: Callable[[str], None]
    lot: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, seen: Seen) -> None:
        """Fill in `seen` on the way."""
        while not self.stop.is_set() and self._advance(seen):
            if not self._is_wanted(seen):
                continue
            if isinstance(self.trigger, Typed) and self.source.is_live and not self._freshen(seen):
                return
            serial = self.serials.take()
            if serial is None:
                return
            if is_serial(serial, self.say):
                self._show(serial, seen)

    def _advance(self, seen: Seen) -> bool:
        """The next picture. At a recording a line is waited for first, so that each line takes one picture."""
        typed = self.trigger if isinstance(self.trigger, Typed) else None
        if typed is not None and not self.source.is_live:
            while not typed.wait(_LINE_WAIT_S):
                if typed.is_over or self.stop.is_set():
                    return False
        lost = self.source.times_lost
        if not self.source.advance():
            return False
        seen.pictures += 1
        if typed is not None and lost != self.source.times_lost and (dropped := typed.forget()):
            self.say(f"{dropped} lines were read while the camera was away: scan those boards again")
        return not (typed is not None and typed.is_over)

    def _freshen(self, seen: Seen) -> bool:
        """Pass over what the camera kept: the picture of a line is one that was taken after it."""
        for _ in range(_KEPT_PICTURES):
            if not self.source.advance():
                return False
            seen.pictures += 1
        return True

    def _is_wanted(self, seen: Seen) -> bool:
        if isinstance(self.trigger, Typed) and not self.source.is_live:
            return True
        return self.trigger.fires(seen.pictures - 1, self.source.now_s)

    def _show(self, serial: str, seen: Seen) -> None:
        try:
            parts = cut(self.source.picture(), self.layout)
        except SourceError as error:
            seen.failed += 1
            self.say(f"board {serial}: {error}")
            return
        except WrongSizeError as error:
            raise SourceError(str(error)) from None
        board = {"type": self.layout.board, "serial": serial} | ({"lot": self.lot} if self.lot else {})
        more = {"captured_at": datetime.now(UTC).isoformat(timespec="milliseconds")} if self.source.is_live else {}
        shot = f"{key(serial)[:60]}/{uuid.uuid4().hex[:12]}"  # no clock, no counter: another picture, another id
        try:
            for number, part in enumerate(parts):
                self.publisher.publish(
                    f"{shot}/{number}",
                    part.png,
                    board=board,
                    component=part.component,
                    designator=part.designator,
                    **more,
                )
        except NoRoomError as error:
            seen.failed += 1
            self.say(f"board {serial} is incomplete: {error}")
            return
        seen.boards += 1


def key(text: str) -> str:
    """`text` with the signs that an id may have; a dash for each run of others."""
    return _NOT_OF_A_KEY.sub("-", text) or "-"
