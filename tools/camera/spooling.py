"""A publisher for cameras: `publish` returns at once, and what the daemon does not take waits on this disk.

A thread of its own sends, and writes to the spool what has waited for half a second: while the daemon is away, busy, or
slower than the camera. What was spooled survives a kill and a power cut, and is sent first, in order. An image is
refused by an exception, or it is kept until the daemon has answered: none is dropped, and each is counted.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tools.camera.publisher import CurveClient, Publisher, PublishError, inspect_header, must_be_key
from tools.camera.spool import EntryError, Spool
from tools.camera.spool_account import SpoolAccount

#: What has no answer by then is written to the spool; behind it, what comes goes there at once. Without a daemon a kill
#: of the camera's process thus costs half a second of pictures once, then what is being written.
_SPILL_AFTER_S = 0.5
#: A closing publisher whose images are all in the spool leaves after so much silence.
_LEAVE_AFTER_S = 1.0
#: Without any answer for so long the daemon counts as away: a connection anew, and everything from the spool.
_SILENCE_S = 5.0
#: Entries that become durable together; answers are heard in between.
_GROUP = 32
#: A spool that could not be written is tried again so often.
_TRY_AGAIN_S = 1.0
_FOREVER_S = 3600.0

_log = logging.getLogger("coserve.camera")


class NoRoomError(PublishError):
    """An image that was not taken: memory or spool is full. The caller still has it, and decides."""


@dataclass(slots=True)
class _Held:
    """One image without its answer. Its bytes are in memory, in the spool, or in both."""

    number: int
    size: int
    since_s: float
    image_id: str = ""
    frames: tuple[bytes, bytes] | None = None
    is_spooled: bool = False


class SpoolingPublisher:
    """`publish` from any thread. Every figure of `account` is exact at the moment it is read."""

    def __init__(
        self,
        endpoint: str,
        source: str,
        spool: Path,
        *,
        spool_bytes: int = 4 * 10**9,
        memory_bytes: int = 256 * 10**6,
        curve: CurveClient | None = None,
        on_answer: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        """`on_answer(id, answer)` hears each image's last answer, in the sending thread.

        SpoolError where the spool is in use or another source's, OSError where it cannot be made, ValueError where the
        source is no legal name, PublishError where a key file is none.
        """
        must_be_key("source", source)
        self._endpoint = endpoint
        self._source = source
        self._spool_bytes = spool_bytes
        self._memory_bytes = memory_bytes
        self._on_answer = on_answer
        self._spool = Spool(spool, source)
        self._hand, self._wake = socket.socketpair()
        self._hand.setblocking(False)
        self._wake.setblocking(False)
        try:
            self._publisher = Publisher(
                *(endpoint, source),
                silence_s=_SILENCE_S,
                patience_s=float("inf"),
                curve=curve,
                wake=self._wake.fileno(),
                on_final=self._answered,
            )
        except BaseException:
            self._let_go()
            raise
        self._books = threading.Lock()  # over what both sides touch: account, bytes, inbox, number
        self._account = SpoolAccount()
        self._inbox: deque[_Held] = deque()
        self._number = self._spool.next_number
        self._bytes_spooled = self._bytes_in_memory = self._bytes_unspooled = 0
        self._waiting: deque[_Held] = deque()
        self._open: dict[str, _Held] = {}
        self._disk_trouble = ""
        self._disk_again_at_s = 0.0
        self._is_silent = self._is_refusing = False
        self._close_by_s: float | None = None
        self._find()
        self._thread = threading.Thread(target=self._run, name=f"camera {source}", daemon=True)
        self._thread.start()
        atexit.register(self.close, 2.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The camera's side: short sections under the lock, no disk, no network

    def publish(self, image_id: str, payload: bytes, *, board: Mapping[str, Any], component: str, **more: Any) -> None:
        """Take one image, at once; `more` are the optional fields of `inspect` (designator, captured_at, …).

        NoRoomError where memory or spool is full: the image was not taken, which is counted and logged.
        """
        header = inspect_header(self._source, image_id, board, component, more)
        body = bytes(payload)
        size = Spool.size_of(header, body)
        with self._books:
            if self._close_by_s is not None:
                raise PublishError("this publisher is closed")
            reason = self._no_room(size)
            is_first = reason is not None and not self._is_refusing
            self._is_refusing = reason is not None
            if reason is None:
                self._take(_Held(self._number, size, time.monotonic(), image_id, (header, body)))
            else:
                self._account.refused += 1
                self._account.refusals.append(f"{image_id}: refused: {reason}")
        if is_first:
            _log.error("images_refused source=%s first=%s reason=%r", self._source, image_id, reason)
        if reason is not None:
            raise NoRoomError(f"image {image_id!r} was not taken: {reason}")
        self._nudge()

    def _take(self, image: _Held) -> None:
        self._number += 1
        self._account.published += 1
        self._account.in_memory += 1
        self._bytes_in_memory += image.size
        self._bytes_unspooled += image.size
        self._inbox.append(image)

    def _no_room(self, size: int) -> str | None:
        """Everything taken has its place in the spool, should the daemon never answer again."""
        if self._bytes_spooled + self._bytes_unspooled + size > self._spool_bytes:
            why = f"the spool {self._spool.folder} holds {self._bytes_spooled} of {self._spool_bytes} bytes"
        elif self._bytes_in_memory + size > self._memory_bytes:
            why = f"{self._bytes_in_memory} of {self._memory_bytes} bytes of memory wait for daemon and disk"
        else:
            return None
        return f"{why}{f'; {trouble}' if (trouble := self.trouble) else ''}"

    @property
    def account(self) -> SpoolAccount:
        """A copy of the account as it stands."""
        with self._books:
            now, wire = self._account, self._publisher.account
            lists = {"rejected": now.rejected.copy(), "refusals": now.refusals.copy()}
            return replace(now, **lists, busy=wire.busy, resent=wire.resent)

    @property
    def trouble(self) -> str:
        """What keeps images here just now, for the camera's own display; empty where all is well."""
        silent = self._publisher.nobody_answers(self._publisher.silent_s) if self._is_silent else ""
        return "; ".join(filter(None, (silent, self._disk_trouble)))

    def wait(self, timeout_s: float) -> bool:
        """Wait until every image has its answer; False where `timeout_s` was too short."""
        until_s = time.monotonic() + timeout_s
        while (now := self.account).in_memory or now.spooled:
            if time.monotonic() >= until_s or not self._thread.is_alive():
                return False
            time.sleep(0.01)
        return True

    def close(self, timeout_s: float = 10.0) -> SpoolAccount:
        """Take no more, send for at most `timeout_s`, and bring the rest to the spool: `spooled` says how much.

        PublishError where the disk does not take it: so many images are nowhere else.
        """
        atexit.unregister(self.close)
        with self._books:
            if self._close_by_s is None:
                self._close_by_s = time.monotonic() + timeout_s
        self._nudge()
        self._thread.join()
        account = self.account
        if account.in_memory:
            raise PublishError(
                f"{account.in_memory} images are lost: neither answered nor in the spool: {self._disk_trouble}"
            )
        return account

    def _nudge(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # it is awake, or at its end
            self._hand.send(b"\0")

    # The sending thread

    def _find(self) -> None:
        for number, size in self._spool.waiting:
            self._waiting.append(_Held(number, size, time.monotonic(), is_spooled=True))
            self._bytes_spooled += size
        self._account.found = self._account.spooled = len(self._waiting)
        if self._waiting:
            _log.info("spool_found source=%s folder=%s images=%d", self._source, self._spool.folder, len(self._waiting))

    def _run(self) -> None:
        try:
            while not self._is_over():
                try:
                    self._turn()
                except Exception:  # noqa: BLE001 - the images stay where they are, and are tried again
                    _log.exception("camera_turn_failed source=%s", self._source)
                    time.sleep(_TRY_AGAIN_S)
            self._leave()
        finally:
            self._publisher.close()
            self._let_go()

    def _let_go(self) -> None:
        self._spool.close()
        self._hand.close()
        self._wake.close()

    def _is_over(self) -> bool:
        with self._books:
            if self._close_by_s is None:
                return False
            is_empty = not (self._inbox or self._waiting or self._open)
            is_safe = not self._account.in_memory
        is_quiet = self._is_silent or (is_safe and self._publisher.silent_s > _LEAVE_AFTER_S)
        return is_empty or is_quiet or time.monotonic() >= self._close_by_s

    def _turn(self) -> None:
        self._collect()
        self._begin_what_may()
        has_more = self._spill(self._spill_after_s)
        self._publisher.step(0.0 if has_more else self._wait_s())
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        self._listen()

    @property
    def _spill_after_s(self) -> float:
        """Nothing is waited for behind images that waited in vain: the daemon is away, slow or busy."""
        oldest = next(iter((*islice(self._open.values(), 1), *islice(self._waiting, 1))), None)
        return 0.0 if self._is_silent or (oldest is not None and oldest.is_spooled) else _SPILL_AFTER_S

    def _wait_s(self) -> float:
        """Until the next image has to go to the spool, at most."""
        if self._inbox:
            return 0.0
        held = (image for image in (*self._open.values(), *self._young()) if not image.is_spooled)
        after_s = self._spill_after_s
        next_s = min((image.since_s + after_s for image in held), default=time.monotonic() + _FOREVER_S)
        if self._close_by_s is not None:
            next_s = min(next_s, self._close_by_s)
        return max(0.0, next_s - time.monotonic(), self._disk_again_at_s - time.monotonic())

    def _young(self) -> list[_Held]:
        """Those that wait in memory: the newest, for the oldest go to the spool first."""
        young: list[_Held] = []
        for image in reversed(self._waiting):
            if image.is_spooled:
                break
            young.append(image)
        return young[::-1]

    def _collect(self) -> None:
        with self._books:
            self._waiting.extend(self._inbox)
            self._inbox.clear()

    def _begin_what_may(self) -> None:
        """The oldest first. An id that is on its way already waits for that one's answer."""
        while self._waiting and self._publisher.room:
            image = self._waiting[0]
            if image.frames is None and not self._load(image):
                continue
            if image.frames is None or image.image_id in self._open:
                return
            self._waiting.popleft()
            self._open[image.image_id] = image
            self._publisher.begin(image.image_id, *image.frames)

    def _load(self, image: _Held) -> bool:
        """Read the oldest entry; False where it was set aside. Its frames stay None where memory is short."""
        with self._books:
            if self._bytes_in_memory + image.size > self._memory_bytes // 2 and self._open:
                return True
        try:
            image.image_id, *frames = self._spool.read(image.number)
        except EntryError as error:
            self._set_aside(image, str(error))
            return False
        image.frames = (frames[0], frames[1])
        with self._books:
            self._bytes_in_memory += image.size
        return True

    def _set_aside(self, image: _Held, reason: str) -> None:
        self._waiting.popleft()
        with self._books:
            self._account.spooled -= 1
            self._account.set_aside += 1
            self._bytes_spooled -= image.size
            self._account.refusals.append(f"spool entry {image.number}: set aside: {reason}")
        try:
            place: object = self._spool.set_aside(image.number)
        except OSError as error:
            place = f"where it was ({error.strerror})"
        _log.error("spool_entry_set_aside source=%s entry=%s reason=%r", self._source, place, reason)

    def _spill(self, older_than_s: float) -> bool:
        """Bring to the spool what has waited so long in memory, or more where memory fills up: one group.

        Whether there is more to bring.
        """
        now_s = time.monotonic()
        if now_s < self._disk_again_at_s:
            return False
        with self._books:
            is_full = self._bytes_in_memory > self._memory_bytes // 2
        held = (image for image in (*self._open.values(), *self._young()) if not image.is_spooled)
        due = [image for image in held if is_full or now_s - image.since_s >= older_than_s]
        group = sorted(islice(due, _GROUP), key=lambda image: image.number)
        if not group:
            return False
        try:
            self._spool.write((image.number, *image.frames) for image in group if image.frames)
        except OSError as error:
            self._disk_again_at_s = time.monotonic() + _TRY_AGAIN_S
            if not self._disk_trouble:
                _log.error("spool_not_written source=%s folder=%s error=%s", self._source, self._spool.folder, error)
            self._disk_trouble = f"the spool {self._spool.folder} cannot be written: {error.strerror or error}"
            return False
        self._disk_trouble = ""
        for image in group:
            self._spooled(image)
        return len(due) > len(group)

    def _spooled(self, image: _Held) -> None:
        with self._books:
            image.is_spooled = True
            self._account.in_memory -= 1
            self._account.spooled += 1
            self._bytes_spooled += image.size
            self._bytes_unspooled -= image.size
        if image.image_id not in self._open:
            self._drop_frames(image)

    def _drop_frames(self, image: _Held) -> None:
        if image.frames is not None:
            image.frames = None
            with self._books:
                self._bytes_in_memory -= image.size

    def _listen(self) -> None:
        """Whether anybody is there. After a silence everything that is open goes back behind the spool's order."""
        is_silent = self._publisher.silent_s > _SILENCE_S
        if is_silent and self._open and all(image.is_spooled for image in self._open.values()):
            self._publisher.forget()
            back = sorted(self._open.values(), key=lambda image: image.number)
            self._open.clear()
            for image in back:
                self._drop_frames(image)
            self._waiting.extendleft(reversed(back))
        if is_silent != self._is_silent:
            self._is_silent = is_silent
            say = _log.warning if is_silent else _log.info
            word = "daemon_silent" if is_silent else "daemon_answers"
            say("%s source=%s endpoint=%s waiting=%d", word, self._source, self._endpoint, len(self._waiting))

    def _answered(self, image_id: str, answer: Mapping[str, Any]) -> None:
        image = self._open.pop(image_id)
        kind = str(answer["type"])
        with self._books:
            self._close_books(image, kind, image_id, answer)
        if image.is_spooled:
            try:
                self._spool.remove(image.number)
            except OSError as error:  # it will be sent again after a restart, and hear `duplicate`
                _log.warning("spool_entry_stays source=%s entry=%d error=%s", self._source, image.number, error)
        if kind not in ("accepted", "duplicate") or answer.get("differs"):
            _log.error("image_not_taken source=%s id=%s answer=%s", self._source, image_id, dict(answer))
        if self._on_answer is not None:
            try:
                self._on_answer(image_id, answer)
            except Exception:  # noqa: BLE001 - the caller's own trouble; sending goes on
                _log.exception("on_answer_failed source=%s id=%s", self._source, image_id)

    def _close_books(self, image: _Held, kind: str, image_id: str, answer: Mapping[str, Any]) -> None:
        now = self._account
        if image.is_spooled:
            now.spooled -= 1
            self._bytes_spooled -= image.size
        else:
            now.in_memory -= 1
            self._bytes_unspooled -= image.size
        self._bytes_in_memory -= image.size
        now.accepted += kind == "accepted"
        now.duplicate += kind == "duplicate"
        if kind == "duplicate" and answer.get("differs"):
            now.differing += 1
            now.refusals.append(f"{image_id}: another image with this id was taken before")
        elif kind not in ("accepted", "duplicate"):
            now.rejected[str(answer.get("code", "unknown"))] += 1
            now.refusals.append(f"{image_id}: {answer.get('code')}: {answer.get('reason')}")

    def _leave(self) -> None:
        """Everything that has no answer goes to the spool, group by group, until the disk refuses."""
        self._collect()
        self._disk_again_at_s = 0.0
        before = -1
        while (left := self.account.in_memory) and left != before:
            before = left
            self._spill(0.0)
        account = self.account
        if account.spooled or account.in_memory:
            _log.warning("camera_leaves source=%s spooled=%d lost=%d", self._source, account.spooled, account.in_memory)
