"""Which board is under the camera, and when to look: serial numbers and triggers of a station."""

import json
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TextIO

#: As the wire takes a serial.
_SERIAL = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,128}")


class Serials(Protocol):
    """Whose picture comes next."""

    def take(self) -> str | None:
        """The next board's serial; None where there are no more."""
        ...


class Trigger(Protocol):
    """When to take a picture."""

    def fires(self, number: int, now_s: float) -> bool:
        """Whether picture `number` (from 0), taken at `now_s`, is wanted."""
        ...


class Same:
    """One serial for every picture: each is another attempt at that board."""

    def __init__(self, serial: str) -> None:
        self._serial = serial

    def take(self) -> str | None:
        return self._serial


class Counted:
    """`PREFIX-000001` and on. A number is kept in a file before it is used: none is given twice, whatever is killed."""

    def __init__(self, prefix: str, file: Path) -> None:
        self._prefix = prefix
        self._file = file
        try:
            self._numbers: dict[str, int] = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self._numbers = {}
        except (ValueError, OSError) as error:
            raise OSError(
                f"{file} cannot be read ({error}): give it back from a copy, or take another prefix"
            ) from None

    def take(self) -> str | None:
        number = self._numbers.get(self._prefix, 0) + 1
        self._numbers[self._prefix] = number
        fresh = self._file.with_suffix(".new")
        with fresh.open("w", encoding="utf-8") as file:
            json.dump(self._numbers, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._file)
        return f"{self._prefix}-{number:06d}"


class Listed:
    """The lines of a text file, one for each picture that is wanted; empty ones are passed over."""

    def __init__(self, file: Path, say: Callable[[str], None]) -> None:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        self._lines: Iterator[str] = iter([line for line in map(_without_end, lines) if is_serial(line, say)])

    def take(self) -> str | None:
        return next(self._lines, None)


class Typed:
    """Lines on standard input, from a barcode reader or a person who presses Enter: trigger, and serial if wanted."""

    def __init__(self, stream: TextIO, say: Callable[[str], None]) -> None:
        self._stream = stream
        self._say = say
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._line: str | None = None
        self.is_over = False
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    def take(self) -> str | None:
        return self._line

    def fires(self, number: int, now_s: float) -> bool:
        del number, now_s
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Whether a line came within `timeout_s`; it is the one that `take` gives."""
        if self.is_over:
            return False
        try:
            line = self._lines.get(timeout=timeout_s) if timeout_s else self._lines.get_nowait()
        except queue.Empty:
            return False
        self.is_over = line is None
        self._line = line
        return line is not None

    def forget(self) -> int:
        """Drop the lines that wait: their boards are no longer under the camera. How many."""
        dropped = 0
        while not self.is_over and self.wait(0.0):
            dropped += 1
        return dropped

    def _read(self) -> None:
        try:
            for line in self._stream:
                self._lines.put(_without_end(line))
        except (OSError, ValueError) as error:
            self._say(f"standard input cannot be read any more: {error}")
        self._lines.put(None)


class EveryPicture:
    """Picture 0, n, 2n, …"""

    def __init__(self, every: int) -> None:
        self._every = every

    def fires(self, number: int, now_s: float) -> bool:
        del now_s
        return number % self._every == 0


class Interval:
    """One picture each `seconds`; a pause is not made up for."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next_s = float("-inf")

    def fires(self, number: int, now_s: float) -> bool:
        del number
        if now_s < self._next_s - 1e-6:
            return False
        is_late = now_s - self._next_s >= self._seconds
        self._next_s = (now_s if is_late else self._next_s) + self._seconds
        return True


def _without_end(line: str) -> str:
    return line.rstrip("\r\n")


def is_serial(text: str, say: Callable[[str], None]) -> bool:
    """Whether the wire takes `text` as a serial; an empty line is none, and anything else wrong is said."""
    if not text.strip():
        return False
    if _SERIAL.fullmatch(text):
        return True
    say(f"no serial: {text[:40]!a} is longer than 128 signs or has control characters; nothing was sent for it")
    return False
