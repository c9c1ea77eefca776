"""A folder that a camera's software drops files into: which of them are whole and new, and what becomes of them.

A file is whole when two looks find it unchanged and its own structure says that nothing is missing: a file that is
still being written has no end marker. What was accepted is moved away, or remembered by name, size and time. Its id has
the sha256 of its bytes, so that a file that is sent again, whatever was forgotten, is a duplicate and no second image.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from daemon.intake.image_header import ImageHeaderError, LongWalkError, check_image
from daemon.records import Pixels

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff"}
#: A file that stays incomplete for so long is named, once.
_PATIENCE_S = 10.0
MAX_FILE_BYTES = 256 * 2**20
_MAX_PIXELS = 256_000_000

Stamp = tuple[int, int]  # size and modification time: another one, another file


@dataclass(frozen=True, slots=True)
class Dropped:
    """A whole file that was not accepted yet. `name` is its path within the folder."""

    path: Path
    name: str
    stamp: Stamp
    content: bytes


@dataclass(slots=True)
class _Look:
    """What the last look at a file found."""

    stamp: Stamp
    since_s: float
    is_told: bool = False
    is_done: bool = False


class Remembered:
    """The files that were accepted and left where they are, in a file of their own. Losing it costs time, no image."""

    def __init__(self, file: Path, folder: Path) -> None:
        """Read it; where `folder` is there, forget the files that are no longer in it."""
        self._file = file
        self._stamps: dict[str, Stamp] = {}
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
            try:
                name, size, modified_ns = json.loads(line)
            except (ValueError, TypeError):
                continue  # the last line of a process that was killed
            self._stamps[str(name)] = (size, modified_ns)
        if folder.is_dir():
            self._stamps = {name: stamp for name, stamp in self._stamps.items() if (folder / name).exists()}
        fresh = file.with_suffix(".new")
        fresh.write_text("".join(map(_line, self._stamps, self._stamps.values())), encoding="utf-8")
        fresh.replace(file)

    def has(self, name: str, stamp: Stamp) -> bool:
        return self._stamps.get(name) == stamp

    def add(self, name: str, stamp: Stamp) -> None:
        self._stamps[name] = stamp
        with self._file.open("a", encoding="utf-8") as file:
            file.write(_line(name, stamp))


def _line(name: str, stamp: Stamp) -> str:
    return json.dumps([name, *stamp]) + "\n"


class WatchedFolder:
    """`look` now and then; `accepted` or `refused` says what became of a file that it gave."""

    def __init__(self, folder: Path, remembered: Remembered, move_to: Path | None, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._remembered = remembered
        self._move_to = move_to
        self._say = say
        self._seen: dict[str, _Look] = {}
        self._is_gone = False
        self.incomplete = 0

    def look(self) -> Iterator[Dropped]:
        """The files that are whole and new, the oldest first. What is incomplete for long, or unreadable, is said."""
        now_s = time.monotonic()
        found = self._files()
        if found is None:
            return
        for name in self._seen.keys() - {name for name, _, _ in found}:
            del self._seen[name]
        for name, path, stamp in sorted(found, key=lambda file: (file[2][1], file[0])):
            look = self._seen.get(name)
            if look is None or look.stamp != stamp:
                self._seen[name] = _Look(stamp, now_s, is_done=self._remembered.has(name, stamp))
            elif not look.is_done:
                dropped = self._whole(path, name, look)
                if dropped is not None:
                    look.is_done = True
                    yield dropped

    def accepted(self, dropped: Dropped) -> None:
        """Move it away, or remember it."""
        if self._move_to is not None and self._moved(dropped, self._move_to):
            return
        try:
            self._remembered.add(dropped.name, dropped.stamp)
        except OSError as error:
            self._say(f"{dropped.path} was accepted, which cannot be written down: {error.strerror}")

    def _moved(self, dropped: Dropped, move_to: Path) -> bool:
        try:
            if _stamp(dropped.path) == dropped.stamp:  # else another picture has its name by now, for the next look
                moved = _move(dropped.path, move_to / dropped.name)
                with suppress(FileNotFoundError):  # whoever collects pictures from there may be as fast
                    if moved.read_bytes() != dropped.content:  # the other picture came in this very moment
                        _move(moved, dropped.path)
        except OSError as error:
            self._say(f"{dropped.path} was accepted and cannot be moved to {move_to}: {error.strerror or error}")
            return False
        return True

    def _files(self) -> list[tuple[str, Path, Stamp]] | None:
        """Name, path and stamp of each image file; None while the folder is not there."""
        try:
            found = list(_images_in(self._folder, self._folder))
        except OSError as error:
            if not self._is_gone:
                self._say(f"{self._folder} cannot be read ({error.strerror}): waiting for it to come back")
            self._is_gone = True
            return None
        if self._is_gone:
            self._say(f"{self._folder} is back")
        self._is_gone = False
        return found

    def _whole(self, path: Path, name: str, look: _Look) -> Dropped | None:
        try:
            flaw, content = _read_whole(path, look.stamp)
        except FileNotFoundError:
            return None
        except OSError as error:
            flaw, content = f"it cannot be read: {error.strerror}", b""
        if flaw is None:
            return Dropped(path, name, look.stamp, content)
        if not look.is_told and time.monotonic() - look.since_s >= _PATIENCE_S:
            look.is_told = True
            self.incomplete += 1
            self._say(f"{path} stays where it is, not sent: {flaw} (half-written, or damaged)")
        return None


def _images_in(folder: Path, root: Path) -> Iterator[tuple[str, Path, Stamp]]:
    """Files with an image's suffix, not behind links. A folder that goes meanwhile has none; `root` must be there."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        if folder == root:
            raise
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _images_in(path, root)
        elif path.suffix.lower() in SUFFIXES and entry.is_file(follow_symlinks=False):
            try:
                facts = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield path.relative_to(root).as_posix(), path, (facts.st_size, facts.st_mtime_ns)


def _read_whole(path: Path, stamp: Stamp) -> tuple[str | None, bytes]:
    """The file's bytes, and why they are not a whole image, if so."""
    if stamp[0] > MAX_FILE_BYTES:
        return f"it has {stamp[0]} bytes, at most {MAX_FILE_BYTES} are read", b""
    content = path.read_bytes()
    if _stamp(path) != stamp or len(content) != stamp[0]:
        return "it changed while it was read", b""
    try:
        check_image(content, Pixels(), _MAX_PIXELS)
    except ImageHeaderError as error:
        return error.reason, b""
    except LongWalkError:
        return "it has too many parts", b""
    return None, content


def _stamp(path: Path) -> Stamp:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns


def _move(path: Path, target: Path) -> Path:
    """Move, without overwriting: another file of that name gets a number. Where it is now."""
    target.parent.mkdir(parents=True, exist_ok=True)
    free, number = target, 1
    while free.exists():
        number += 1
        free = target.with_name(f"{target.stem}-{number}{target.suffix}")
    shutil.move(path, free)
    return free
