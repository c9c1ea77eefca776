"""A watched folder (`coserve camera --watch`): files that a camera's software drops into it are published once.

A file is whole when two scans find it unchanged and its structure is complete: a JPEG or PNG that is still being
written has no end marker. Others may have their full length before their pixels: they must stay unchanged for ten
seconds, or have been renamed since they were written. The folder is the spool: a file is moved away, or remembered by
name, size and time, only when all of its images have been accepted. Ids hold the sha256 of the bytes, so that a file
sent twice is a duplicate and not a second image.
"""

import json
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from coserve_client import CurveClient, PublishAccount, Publisher
from experts.durable import replace_durably
from experts.errors import ImageError
from experts.vision.structure import END_MARKED, check_structure
from tools.camera.layout import NO_IMAGE, PictureFiles, free_place
from tools.pictures import as_payload, find_pictures

#: A file that stays incomplete for this long is reported, once; one whose structure cannot tell is taken.
_PATIENCE_S = 10.0
MAX_FILE_BYTES = 256 * 2**20
_MAX_PIXELS = 256_000_000
_SCAN_PAUSE_S = 0.2
_SILENCE_S = 5.0
_LAST_ANSWERS_S = 5.0

Stamp = tuple[int, int]  # size and modification time: with another stamp it is another file


@dataclass(slots=True)
class DroppedFile:
    """An image file in the folder, since a scan first saw it with this stamp. `name` is its path within the folder.

    `content` is kept until all of its images are answered; `unanswered` counts the rest.
    """

    path: Path
    name: str
    stamp: Stamp
    since_s: float
    is_done: bool
    is_reported: bool = False
    content: bytes = b""
    unanswered: int = 0
    next_look_s: float = 0.0
    refusals: list[str] = field(default_factory=list[str])


class SentFiles:
    """A file with the names of accepted files that stay in the folder. Without it they are sent again: duplicates."""

    def __init__(self, file: Path, folder: Path) -> None:
        """Read it, and drop the files no longer in `folder`, unless that is away."""
        self._file = file
        self._stamps: dict[str, Stamp] = {}
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
            with suppress(ValueError, TypeError):  # the last line of a process that was killed
                name, size, modified_ns = json.loads(line)
                self._stamps[str(name)] = (size, modified_ns)
        if folder.is_dir():
            self._stamps = {name: stamp for name, stamp in self._stamps.items() if (folder / name).exists()}
        replace_durably(file, "".join(map(_line, self._stamps, self._stamps.values())))

    def has(self, name: str, stamp: Stamp) -> bool:
        return self._stamps.get(name) == stamp

    def add(self, name: str, stamp: Stamp) -> None:
        self._stamps[name] = stamp
        with self._file.open("a", encoding="utf-8") as file:
            file.write(_line(name, stamp))


def _line(name: str, stamp: Stamp) -> str:
    return json.dumps([name, *stamp]) + "\n"


class WatchedFolder:
    """`scan` repeatedly; call `mark_accepted` with the files whose images were all accepted."""

    def __init__(
        self,
        folder: Path,
        sent: SentFiles,
        move_to: Path | None,
        pictures: PictureFiles,
    ) -> None:
        """Accepted files go to `move_to`, or stay and are noted in `sent`. `pictures` counts what was not sent."""
        self.pictures = pictures
        self.say = pictures.say
        self._folder = folder
        self._sent = sent
        self._move_to = move_to
        self._files: dict[str, DroppedFile] = {}
        self._is_away = False

    def scan(self) -> Iterator[DroppedFile]:
        """Yield the whole, new files, the oldest first; report those that stay incomplete."""
        now_s = time.monotonic()
        files = self._list()
        if files is None:
            return
        for name in self._files.keys() - {name for name, _, _ in files}:
            del self._files[name]
        parts = Counter(self._part_of(name) for name, _, _ in files)
        for name, path, stamp in sorted(files, key=lambda file: (file[2][1], file[0])):
            file = self._files.get(name)
            if file is None or file.stamp != stamp:
                self._files[name] = DroppedFile(path, name, stamp, now_s, is_done=self._sent.has(name, stamp))
            elif not file.is_done and now_s >= file.next_look_s and self._read(file, parts[self._part_of(name)] > 1):
                file.is_done = True
                yield file

    def _part_of(self, name: str) -> object:
        path = PurePosixPath(name)
        return path.parent, (self.pictures.part_of(path) or (path,))[:3]

    @property
    def waiting(self) -> int:
        """The number of files that were not sent or not answered yet, without those reported as incomplete."""
        files = self._files.values()
        return sum(file.unanswered > 0 or not (file.is_done or file.is_reported) for file in files)

    def mark_accepted(self, dropped: DroppedFile) -> None:
        if self._move_to is not None and self._move(dropped, self._move_to):
            return
        try:
            self._sent.add(dropped.name, dropped.stamp)
        except OSError as error:
            self.say(f"{dropped.path} was accepted, but this cannot be noted on disk: {error.strerror}")

    def _move(self, dropped: DroppedFile, move_to: Path) -> bool:
        try:
            if _stamp(dropped.path) == dropped.stamp:  # else another picture has this name by now, for the next scan
                target = _move(dropped.path, move_to / dropped.name)
                with suppress(FileNotFoundError):  # a program that collects pictures there may be as fast
                    if target.read_bytes() != dropped.content:  # another picture came in this very moment
                        _move(target, dropped.path)
        except OSError as error:
            self.say(f"{dropped.path} was accepted, but cannot be moved to {move_to}: {error.strerror or error}")
            return False
        return True

    def _list(self) -> list[tuple[str, Path, Stamp]] | None:
        """Return name, path and stamp of each image file; None while the folder is away."""
        try:
            found = find_pictures(self._folder)
            self.pictures.left_out = found.left_out
            files = list(_stamped(self._folder, found.files))
        except OSError as error:
            if not self._is_away:
                self.say(f"{self._folder} cannot be read ({error.strerror}): waiting for it to come back")
            self._is_away = True
            return None
        if self._is_away:
            self.say(f"{self._folder} is back")
        self._is_away = False
        return files

    def _read(self, file: DroppedFile, has_twin: bool) -> bool:
        """Read a file; False if it cannot be sent yet, which is reported once it has stayed so for long."""
        is_patient, problem = time.monotonic() - file.since_s < _PATIENCE_S, ""
        try:
            if has_twin:
                problem = "there is another picture of that part: leave one"
            else:
                content, is_settled = _read_whole(file.path, file.stamp)
                if is_settled or not is_patient:
                    file.content = content
                    return True
                file.next_look_s = file.since_s + _PATIENCE_S
        except FileNotFoundError:
            return False
        except OSError as error:
            problem = f"it cannot be read: {error.strerror}"
        except ImageError as error:
            problem = f"{error.reason} (half-written, or damaged)"
        if problem and not (is_patient or file.is_reported):
            file.is_reported = True
            self.pictures.refuse(file.path, problem)
        return False


def _stamped(root: Path, files: list[Path]) -> Iterator[tuple[str, Path, Stamp]]:
    """Yield name, path and stamp of the files that are no links; they may vanish meanwhile."""
    for path in files:
        with suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                yield path.relative_to(root).as_posix(), path, (status.st_size, status.st_mtime_ns)


def _read_whole(path: Path, stamp: Stamp) -> tuple[bytes, bool]:
    """Return the bytes of a whole image, and False if they may still change. Raises ImageError, OSError."""
    if stamp[0] > MAX_FILE_BYTES:
        raise ImageError(f"it has {stamp[0]} bytes, at most {MAX_FILE_BYTES} are read")
    content = path.read_bytes()
    if _stamp(path) != stamp or len(content) != stamp[0]:
        raise ImageError("it changed while it was read")
    check_structure(as_payload(content), _MAX_PIXELS)
    # A write sets both times; a rename, or a copy that restores the time of its source, leaves a newer ctime.
    return content, content.startswith(END_MARKED) or path.stat().st_ctime_ns > stamp[1]


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _move(path: Path, target: Path) -> Path:
    """Move a file without overwriting: a taken name gets a number. Return its new path."""
    target.parent.mkdir(parents=True, exist_ok=True)
    free = free_place(target)
    shutil.move(path, free)
    return free


class FolderPublisher:
    """Publishes a watched folder over one connection, in the caller's thread, until `stop` is set.

    `files` counts those whose images were all accepted, and those refused.
    """

    def __init__(
        self,
        endpoint: str,
        source: str,
        folder: WatchedFolder,
        stop: threading.Event,
        curve: CurveClient | None = None,
        tell_trouble: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Connect; raises what `Publisher` raises. `tell_trouble` is told repeatedly why images wait, or ""."""
        self.files = Counter[Literal["accepted", "refused"]]()
        self._folder = folder
        self._stop = stop
        self._unanswered: dict[str, DroppedFile] = {}
        self._tell_trouble = tell_trouble
        self._publisher = Publisher(
            endpoint, source, silence_s=_SILENCE_S, patience_s=float("inf"), curve=curve, on_answer=self._take_answer
        )

    @property
    def account(self) -> PublishAccount:
        return self._publisher.account

    def run(self) -> None:
        """Publish until `stop` is set, wait briefly for answers; the next start sends unanswered files again."""
        try:
            while not self._stop.is_set():
                began_s = time.monotonic()
                for dropped in self._folder.scan():
                    self._publish(dropped)
                    if self._stop.is_set():
                        break
                else:
                    self._pump(max(_SCAN_PAUSE_S, 3 * (time.monotonic() - began_s)))  # large folders less often
            if not self._publisher.trouble:
                self._publisher.finish(_LAST_ANSWERS_S)
        finally:
            self._publisher.close()

    def _publish(self, file: DroppedFile) -> None:
        try:
            images = self._folder.pictures.images(PurePosixPath(file.name), file.content)
        except NO_IMAGE as error:
            file.content = b""
            self._folder.pictures.refuse(file.path, str(error))
            return
        file.unanswered = len(images)
        for image in images:
            while not self._publisher.free_credit or image.image_id in self._unanswered:
                self._pump(0.2)
                if self._stop.is_set():
                    return
            self._unanswered[image.image_id] = file
            self._publisher.send(
                image.image_id, image.payload, board=image.board, component=image.component, **image.more
            )

    def _pump(self, wait_s: float) -> None:
        self._publisher.pump(wait_s)
        self._tell_trouble(self._publisher.trouble)

    def _take_answer(self, image_id: str, answer: Mapping[str, Any]) -> None:
        file = self._unanswered.pop(image_id)
        file.unanswered -= 1
        if answer["type"] not in ("accepted", "duplicate") or answer.get("differs"):
            file.refusals.append(f"{image_id}: {answer.get('code', 'duplicate')}: {answer.get('reason', '')}")
        if file.unanswered:
            return
        if file.refusals:
            self.files["refused"] += 1
            self._folder.say(
                f"{file.path} stays where it is, to be tried again at the next start: the daemon refused "
                f"{len(file.refusals)} of its images, the first is {file.refusals[0]}"
            )
        else:
            self.files["accepted"] += 1
            self._folder.mark_accepted(file)
        file.content = b""
