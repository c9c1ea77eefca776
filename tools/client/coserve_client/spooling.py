"""A publisher for cameras: `publish` returns at once, and images that the daemon does not take wait on this disk.

A thread of its own sends, and writes to the spool the images that have waited for half a second: while the daemon is
away, busy, or slower than the camera. Spooled images survive a kill and a power cut, and are sent first, in order. An
image is refused by an exception, or it is kept until the daemon has answered: none is dropped, and each is counted.

```python
with SpoolingPublisher("tcp://127.0.0.1:5570", source="camera-1", spool=Path("spool")) as publisher:
    publisher.publish(
        "A0815/R12", jpeg, board={"type": "mainboard-a", "serial": "A0815"}, component="R0402", designator="R12"
    )
```
"""

import atexit
import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self

from coserve_client.frames import CurveClient
from coserve_client.messages import ImageAnswer
from coserve_client.publisher import AnswerCounts, Publisher, PublishError, check_key, inspect_header
from coserve_client.spool import Spool, SpoolEntryError

#: An image without an answer is written to the spool after this time; while older ones wait there, new ones go there at
#: once. A kill of the camera's process while the daemon is away costs this much of pictures once, then only the group
#: that is being written.
_SPILL_AFTER_S = 0.5
#: A closing publisher whose images are all in the spool leaves after this much silence, and can say so.
_LEAVE_AFTER_S = 1.6
#: After this time without any answer the daemon counts as away: a new connection, and everything from the spool.
_SILENCE_S = 5.0
#: Entries that become durable together; answers are read in between.
_GROUP_ENTRIES = 32
#: The pause before a spool that could not be written is tried again.
_RETRY_S = 1.0
_FOREVER_S = 3600.0

_log = logging.getLogger("coserve.camera")


class NoRoomError(PublishError):
    """An image that was not taken: memory or spool is full. The caller still has it, and decides."""


@dataclass(slots=True)
class SpoolAccount(AnswerCounts):
    """The state of every image. Each one that was `published`, or `recovered` from an earlier process, is in one of:

    `accepted`, `duplicate`, `rejected` (by code), `set_aside` (damaged spool entries), `spooled` (waits on the disk),
    `in_memory` (younger than half a second, or the disk refuses). `refused` images were never taken.
    """

    published: int = 0
    recovered: int = 0
    refused: int = 0
    set_aside: int = 0
    spooled: int = 0
    in_memory: int = 0

    @property
    def complete(self) -> bool:
        """True if the daemon holds every image that was published or recovered."""
        taken = self.accepted + self.duplicate
        return self.published + self.recovered == taken and not (self.refused or self.differing)

    @property
    def exit_status(self) -> int:
        """The status that a camera's program ends with: 0 if the daemon has every image, and there was one; else 1."""
        return 0 if self.complete and self.accepted + self.duplicate else 1

    @property
    def lost(self) -> int:
        """The number of images that get no verdict unless a person acts."""
        return self.rejected.total() + self.differing + self.refused + self.set_aside

    def as_dict(self) -> dict[str, int]:
        """Return the account as the rows of a table, without rows of 0."""
        rows = {"published": self.published, "found in the spool": self.recovered, "accepted": self.accepted}
        rows |= {"duplicate": self.duplicate, "of another image": self.differing, **self.rejected_rows()}
        rows |= {"refused, no room": self.refused, "set aside": self.set_aside}
        rows |= {"left in the spool": self.spooled, "in memory": self.in_memory}
        rows |= {"busy": self.busy, "resent": self.resent}
        return {name: count for name, count in rows.items() if count or name in ("published", "accepted")}


@dataclass(slots=True)
class _HeldImage:
    """An image without its answer. Its bytes are in memory, in the spool, or in both."""

    number: int
    size: int
    since_s: float
    image_id: str = ""
    frames: tuple[bytes, bytes] | None = None
    is_spooled: bool = False


class SpoolingPublisher:
    """`publish` may be called from any thread. Every figure of `account` is exact at the moment it is read."""

    def __init__(
        self,
        endpoint: str,
        source: str,
        spool: Path,
        *,
        spool_bytes: int = 4 * 10**9,
        memory_bytes: int = 256 * 10**6,
        curve: CurveClient | None = None,
        on_answer: Callable[[str, ImageAnswer], None] | None = None,
    ) -> None:
        """Open the spool and start to send. `on_answer(id, answer)`: each image's final answer, in the sending thread.

        SpoolError if the spool is in use or another source's, OSError if it cannot be made, ValueError for an illegal
        `source`, CoserveError for a wrong key file.
        """
        check_key("source", source)
        self._endpoint = endpoint
        self._source = source
        self._spool_bytes = spool_bytes
        self._memory_bytes = memory_bytes
        self._on_answer = on_answer
        self._spool = Spool(spool, source)
        self._waker, self._wake = socket.socketpair()
        self._waker.setblocking(False)
        self._wake.setblocking(False)
        try:
            self._publisher = Publisher(
                *(endpoint, source),
                silence_s=_SILENCE_S,
                patience_s=float("inf"),
                curve=curve,
                wake=self._wake.fileno(),
                on_answer=self._take_answer,
            )
        except BaseException:
            self._release()
            raise
        self._lock = threading.Lock()  # over account, bytes, inbox and number, which both sides use
        self._account = SpoolAccount()
        self._inbox: deque[_HeldImage] = deque()
        self._number = self._spool.next_number
        self._bytes_held = 0  # of all images without an answer: each has its place in the spool, written or not
        self._bytes_in_memory = 0
        self._waiting: deque[_HeldImage] = deque()
        self._unanswered: dict[str, _HeldImage] = {}
        self._logged_codes: set[object] = set()
        self._disk_trouble = ""
        self._disk_retry_at_s = 0.0
        self._is_silent = self._is_refusing = False
        self._close_by_s: float | None = None
        self._queue_spooled()
        self._thread = threading.Thread(target=self._run, name=f"camera {source}", daemon=True)
        self._thread.start()
        atexit.register(self.close, 2.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The camera's side: short sections under the lock, no disk, no network

    def publish(self, image_id: str, payload: bytes, *, board: Mapping[str, Any], component: str, **more: Any) -> None:
        """Take one image, at once; `more` are the optional fields of `inspect` (designator, captured_at, …).

        NoRoomError if memory or spool is full: the image was not taken, which is counted and logged.
        """
        header = inspect_header(self._source, image_id, board, component, more)
        body = bytes(payload)
        size = Spool.size_of(header, body)
        with self._lock:
            if self._close_by_s is not None:
                raise PublishError("this publisher is closed")
            reason = self._no_room_reason(size)
            is_first = reason is not None and not self._is_refusing
            self._is_refusing = reason is not None
            if reason is None:
                self._enqueue(_HeldImage(self._number, size, time.monotonic(), image_id, (header, body)))
            else:
                self._account.refused += 1
                self._account.refusals.append(f"{image_id}: refused: {reason}")
        if is_first:
            _log.error("images_refused source=%s first=%s reason=%r", self._source, image_id, reason)
        if reason is not None:
            raise NoRoomError(f"image {image_id!r} was not taken: {reason}")
        self._wake_thread()

    def _enqueue(self, image: _HeldImage) -> None:
        self._number += 1
        self._account.published += 1
        self._account.in_memory += 1
        self._bytes_in_memory += image.size
        self._bytes_held += image.size
        self._inbox.append(image)

    def _no_room_reason(self, size: int) -> str | None:
        """Return why an image of this size is refused. All that is taken must fit the spool if no answer ever comes."""
        if self._bytes_held + size > self._spool_bytes:
            why = f"the spool {self._spool.folder} holds {self._bytes_held} of {self._spool_bytes} bytes"
        elif self._bytes_in_memory + size > self._memory_bytes:
            why = f"{self._bytes_in_memory} of {self._memory_bytes} bytes of memory wait for daemon and disk"
        else:
            return None
        return f"{why}{f'; {trouble}' if (trouble := self.trouble) else ''}"

    @property
    def account(self) -> SpoolAccount:
        """A copy of the account as it stands."""
        with self._lock:
            now, wire = self._account, self._publisher.account
            lists = {"rejected": now.rejected.copy(), "refusals": now.refusals.copy()}
            return replace(now, **lists, busy=wire.busy, resent=wire.resent)

    @property
    def trouble(self) -> str:
        """Return why images wait here now, for the camera's display: the daemon's own words, its silence, or our disk.

        Empty if all is well.
        """
        return "; ".join(filter(None, (self._publisher.trouble, self._disk_trouble)))

    def wait(self, timeout_s: float) -> bool:
        """Wait until every image has its answer; False if `timeout_s` was too short."""
        until_s = time.monotonic() + timeout_s
        while (now := self.account).in_memory or now.spooled:
            if time.monotonic() >= until_s or not self._thread.is_alive():
                return False
            time.sleep(0.01)
        return True

    def close(self, timeout_s: float = 10.0) -> SpoolAccount:
        """Take no more images, send for at most `timeout_s`, and spool the rest: `spooled` counts them.

        PublishError if the disk does not take them: then they are lost.
        """
        atexit.unregister(self.close)
        with self._lock:
            if self._close_by_s is None:
                self._close_by_s = time.monotonic() + timeout_s
        self._wake_thread()
        self._thread.join()
        account = self.account
        if account.in_memory:
            raise PublishError(
                f"{account.in_memory} images are lost: neither answered nor in the spool: {self._disk_trouble}"
            )
        return account

    def _wake_thread(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # it is awake, or has ended
            self._waker.send(b"\0")

    # The sending thread

    def _queue_spooled(self) -> None:
        for number, size in self._spool.waiting:
            self._waiting.append(_HeldImage(number, size, time.monotonic(), is_spooled=True))
            self._bytes_held += size
        count = len(self._waiting)
        self._account.recovered = self._account.spooled = count
        if count:
            _log.info("spool_recovered source=%s folder=%s images=%d", self._source, self._spool.folder, count)

    def _run(self) -> None:
        try:
            while not self._is_over():
                try:
                    self._cycle()
                except Exception:  # noqa: BLE001 - the images stay where they are, and are tried again
                    _log.exception("camera_cycle_failed source=%s", self._source)
                    time.sleep(_RETRY_S)
            self._spool_rest()
        finally:
            self._publisher.close()
            self._release()

    def _release(self) -> None:
        self._spool.close()
        self._waker.close()
        self._wake.close()

    def _is_over(self) -> bool:
        with self._lock:
            if self._close_by_s is None:
                return False
            is_empty = not (self._inbox or self._waiting or self._unanswered)
            is_safe = not self._account.in_memory
        is_quiet = self._is_silent or (is_safe and self._publisher.silent_s > _LEAVE_AFTER_S)
        return is_empty or is_quiet or time.monotonic() >= self._close_by_s

    def _cycle(self) -> None:
        self._take_inbox()
        self._send_waiting()
        has_more = self._spill(self._spill_after_s)
        self._publisher.step(0.0 if has_more else self._wait_s())
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        self._check_silence()

    @property
    def _spill_after_s(self) -> float:
        """The time until an image is spooled; 0 behind images that are spooled: the daemon is away, slow or busy."""
        oldest = next(iter((*islice(self._unanswered.values(), 1), *islice(self._waiting, 1))), None)
        return 0.0 if self._is_silent or (oldest is not None and oldest.is_spooled) else _SPILL_AFTER_S

    def _wait_s(self) -> float:
        if self._inbox:
            return 0.0
        after_s = self._spill_after_s
        next_s = min((image.since_s + after_s for image in self._unspooled()), default=time.monotonic() + _FOREVER_S)
        if self._close_by_s is not None:
            next_s = min(next_s, self._close_by_s)
        return max(0.0, next_s - time.monotonic(), self._disk_retry_at_s - time.monotonic())

    def _unspooled(self) -> Iterator[_HeldImage]:
        """Yield the images that are only in memory, the oldest first."""
        yield from (image for image in self._unanswered.values() if not image.is_spooled)
        newest: list[_HeldImage] = []
        for image in reversed(self._waiting):  # images older than a spooled one are spooled too
            if image.is_spooled:
                break
            newest.append(image)
        yield from reversed(newest)

    def _take_inbox(self) -> None:
        with self._lock:
            self._waiting.extend(self._inbox)
            self._inbox.clear()

    def _send_waiting(self) -> None:
        """Send the oldest images within the credit. An id that is unanswered waits for that answer."""
        while self._waiting and self._publisher.free_credit:
            image = self._waiting[0]
            if image.frames is None and not self._load(image):
                continue
            if image.frames is None or image.image_id in self._unanswered:
                return
            self._waiting.popleft()
            self._unanswered[image.image_id] = image
            self._publisher.send_now(image.image_id, *image.frames)

    def _load(self, image: _HeldImage) -> bool:
        """Read the oldest entry; False if it was set aside. Its frames stay None while memory is short."""
        with self._lock:
            if self._bytes_in_memory + image.size > self._memory_bytes // 2 and self._unanswered:
                return True
        try:
            image.image_id, *frames = self._spool.read(image.number)
        except SpoolEntryError as error:
            self._set_aside(image, str(error))
            return False
        image.frames = (frames[0], frames[1])
        with self._lock:
            self._bytes_in_memory += image.size
        return True

    def _set_aside(self, image: _HeldImage, reason: str) -> None:
        self._waiting.popleft()
        with self._lock:
            self._account.spooled -= 1
            self._account.set_aside += 1
            self._bytes_held -= image.size
            self._account.refusals.append(f"spool entry {image.number}: set aside: {reason}")
        try:
            place: object = self._spool.set_aside(image.number)
        except OSError as error:
            place = f"where it was ({error.strerror})"
        _log.error("spool_entry_set_aside source=%s entry=%s reason=%r", self._source, place, reason)

    def _spill(self, older_than_s: float) -> bool:
        """Spool a group of the images older than this, or of all while memory fills up; True if more have to go."""
        now_s = time.monotonic()
        if now_s < self._disk_retry_at_s:
            return False
        with self._lock:
            is_full = self._bytes_in_memory > self._memory_bytes // 2
        due = [image for image in self._unspooled() if is_full or now_s - image.since_s >= older_than_s]
        group = sorted(islice(due, _GROUP_ENTRIES), key=lambda image: image.number)
        if not group:
            return False
        try:
            self._spool.write((image.number, *image.frames) for image in group if image.frames)
        except OSError as error:
            self._disk_retry_at_s = time.monotonic() + _RETRY_S
            if not self._disk_trouble:
                _log.error("spool_not_written source=%s folder=%s error=%s", self._source, self._spool.folder, error)
            self._disk_trouble = f"the spool {self._spool.folder} cannot be written: {error.strerror or error}"
            return False
        self._disk_trouble = ""
        for image in group:
            self._mark_spooled(image)
        return len(due) > len(group)

    def _mark_spooled(self, image: _HeldImage) -> None:
        with self._lock:
            image.is_spooled = True
            self._account.in_memory -= 1
            self._account.spooled += 1
        if image.image_id not in self._unanswered:
            self._drop_frames(image)

    def _drop_frames(self, image: _HeldImage) -> None:
        if image.frames is not None:
            image.frames = None
            with self._lock:
                self._bytes_in_memory -= image.size

    def _check_silence(self) -> None:
        """Notice that the daemon is away, or back. After a silence unanswered images return to the spool's order."""
        is_silent = self._publisher.silent_s > _SILENCE_S
        if is_silent and self._unanswered and all(image.is_spooled for image in self._unanswered.values()):
            self._publisher.drop_unanswered()
            returned = sorted(self._unanswered.values(), key=lambda image: image.number)
            self._unanswered.clear()
            for image in returned:
                self._drop_frames(image)
            self._waiting.extendleft(reversed(returned))
        if is_silent != self._is_silent:
            self._is_silent = is_silent
            level, event = (logging.WARNING, "daemon_silent") if is_silent else (logging.INFO, "daemon_answers")
            arguments = (event, self._source, self._endpoint, len(self._waiting))
            _log.log(level, "%s source=%s endpoint=%s waiting=%d", *arguments)

    def _take_answer(self, image_id: str, answer: ImageAnswer) -> None:
        image = self._unanswered.pop(image_id)
        with self._lock:
            self._account.count(image_id, answer)
            self._account.spooled -= image.is_spooled
            self._account.in_memory -= not image.is_spooled
            self._bytes_in_memory -= image.size
            self._bytes_held -= image.size
        if image.is_spooled:
            try:
                self._spool.remove(image.number)
            except OSError as error:  # it is sent again after a restart, and answered `duplicate`
                _log.warning("spool_entry_not_removed source=%s entry=%d error=%s", self._source, image.number, error)
        if answer["type"] not in ("accepted", "duplicate") or answer.get("differs"):
            # The first of each kind; `account` counts them all, and `on_answer` hears of each.
            level = logging.INFO if (code := answer.get("code")) in self._logged_codes else logging.ERROR
            self._logged_codes.add(code)
            _log.log(level, "image_not_taken source=%s id=%s answer=%s", self._source, image_id, dict(answer))
        if self._on_answer is not None:
            try:
                self._on_answer(image_id, answer)
            except Exception:  # noqa: BLE001 - the caller's own error; sending goes on
                _log.exception("on_answer_failed source=%s id=%s", self._source, image_id)

    def _spool_rest(self) -> None:
        """Spool every unanswered image, group by group, until the disk refuses."""
        self._take_inbox()
        self._disk_retry_at_s = 0.0
        before = -1
        while (entries_left := self.account.in_memory) and entries_left != before:
            before = entries_left
            self._spill(0.0)
        account = self.account
        if account.spooled or account.in_memory:
            _log.warning("camera_closed source=%s spooled=%d lost=%d", self._source, account.spooled, account.in_memory)
