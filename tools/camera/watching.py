"""`coserve camera CONFIG FOLDER --watch`: what a camera's software drops into a folder, published file by file.

The folder is the spool: a file leaves it, or is remembered, when every image in it has been accepted, and not before.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coserve_client import CameraImage, CurveClient, PublishAccount, Publisher
from tools.camera.watch_folder import Dropped, WatchedFolder

_LOOK_EVERY_S = 0.2
_SILENCE_S = 5.0
_LAST_ANSWERS_S = 5.0


class UnfitError(Exception):
    """A file that no image can be made of; the text says what was expected."""


ImagesOf = Callable[[Dropped], list[CameraImage]]


@dataclass(slots=True)
class Files:
    """Files whose images were all accepted, that the daemon refused, and that no image could be made of."""

    accepted: int = 0
    refused: int = 0
    unfit: int = 0


@dataclass(slots=True)
class _File:
    dropped: Dropped
    left: int
    refusals: list[str] = field(default_factory=list[str])


class Watcher:
    """One folder, one connection, one thread: the caller's. `run` until `stop` is set."""

    def __init__(
        self,
        endpoint: str,
        source: str,
        folder: WatchedFolder,
        images_of: ImagesOf,
        say: Callable[[str], None],
        stop: threading.Event,
        curve: CurveClient | None = None,
    ) -> None:
        """`images_of` raises UnfitError for a file that is none of ours; `say` tells a person."""
        self.files = Files()
        self._folder = folder
        self._images_of = images_of
        self._say = say
        self._stop = stop
        self._open: dict[str, _File] = {}
        self._is_silent = False
        self._publisher = Publisher(
            endpoint, source, silence_s=_SILENCE_S, patience_s=float("inf"), curve=curve, on_answer=self._final
        )

    @property
    def account(self) -> PublishAccount:
        """Of the images."""
        return self._publisher.account

    def run(self) -> None:
        """Look, publish, listen."""
        while not self._stop.is_set():
            began_s = time.monotonic()
            for dropped in self._folder.look():
                self._publish(dropped)
                if self._stop.is_set():
                    return
            self._pump(max(_LOOK_EVERY_S, 3 * (time.monotonic() - began_s)))  # a large folder is looked at less often

    def close(self) -> None:
        """Wait a little for answers that are due. Files without theirs are found again at the next start."""
        try:
            if not self._is_silent:
                self._publisher.finish(_LAST_ANSWERS_S)
        finally:
            self._publisher.close()

    def _publish(self, dropped: Dropped) -> None:
        try:
            images = self._images_of(dropped)
        except UnfitError as error:
            self.files.unfit += 1
            self._say(f"{dropped.path} stays where it is, not sent: {error}")
            return
        file = _File(dropped, len(images))
        for image in images:
            while not self._publisher.free_credit or image.image_id in self._open:
                self._pump(0.2)
                if self._stop.is_set():
                    return
            self._open[image.image_id] = file
            self._publisher.send(
                image.image_id, image.payload, board=image.board, component=image.component, **image.more
            )

    def _pump(self, wait_s: float) -> None:
        self._publisher.pump(wait_s)
        silent_s = self._publisher.silent_s
        if (silent_s > _SILENCE_S) != self._is_silent:
            self._is_silent = not self._is_silent
            self._say(self._publisher.silence_text(silent_s) if self._is_silent else "the daemon answers again")

    def _final(self, image_id: str, answer: Mapping[str, Any]) -> None:
        file = self._open.pop(image_id)
        file.left -= 1
        if answer["type"] not in ("accepted", "duplicate") or answer.get("differs"):
            file.refusals.append(f"{image_id}: {answer.get('code', 'duplicate')}: {answer.get('reason', '')}")
        if file.left:
            return
        if file.refusals:
            self.files.refused += 1
            self._say(
                f"{file.dropped.path} stays where it is, to be tried again at the next start: the daemon refused "
                f"{len(file.refusals)} of its images, the first is {file.refusals[0]}"
            )
        else:
            self.files.accepted += 1
            self._folder.accepted(file.dropped)


def content_id(place: str, dropped: Dropped, number: int | None = None) -> str:
    """An id that is the same for the same bytes at the same place, and another one for others."""
    digest = hashlib.sha256(dropped.content).hexdigest()[:16]
    return f"{place[:100]}/{digest}" + ("" if number is None else f"/{number}")
