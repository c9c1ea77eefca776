"""A publisher of images that works in the caller's thread and may block it: for folders, benchmarks and tests.

A camera, which must not wait, uses `SpoolingPublisher` (spooling.py), which is built on this one.

```python
with Publisher("tcp://127.0.0.1:5570", source="camera-1") as publisher:
    for designator, component, jpeg in parts:
        publisher.send(
            f"A0815/{designator}", jpeg, component=component, designator=designator,
            board={"type": "mainboard-a", "serial": "A0815"},
        )
    print(publisher.finish().as_dict())
```
"""

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, cast

import zmq

from coserve_client.frames import KEY, MAGIC, MAX_HEADER_BYTES, CoserveError, CurveClient, connect, encode, silence_text
from coserve_client.messages import ImageAnswer

_NEVER_S = float("inf")
#: Images that wait for less are no trouble.
_NOTICE_S = 1.5
_STEP_S = 0.2


class PublishError(CoserveError):
    """Images cannot be published: the daemon does not answer in time, or the publisher is closed."""


@dataclass(slots=True)
class AnswerCounts:
    """Counts of the daemon's answers. Each image ends once, as accepted, duplicate or rejected (by code).

    `differing` duplicates are those whose id belongs to another image: this one was not taken. `busy` and `resent`
    count answers and messages on the way there; `refusals` are the last reasons.
    """

    accepted: int = 0
    duplicate: int = 0
    differing: int = 0
    rejected: Counter[str] = field(default_factory=Counter[str])
    busy: int = 0
    resent: int = 0
    refusals: deque[str] = field(default_factory=lambda: deque(maxlen=20))

    @property
    def answered(self) -> int:
        return self.accepted + self.duplicate + self.rejected.total()

    def count(self, image_id: str, answer: ImageAnswer) -> None:
        match answer["type"]:
            case "accepted":
                self.accepted += 1
            case "duplicate":
                self.duplicate += 1
                if answer.get("differs"):
                    self.differing += 1
                    self.refusals.append(f"{image_id}: another image with this id was taken before")
            case _:
                code = str(answer.get("code", "unknown"))
                self.rejected[code] += 1
                self.refusals.append(f"{image_id}: {code}: {answer.get('reason', '')}")

    def rejected_rows(self) -> dict[str, int]:
        """Return the rejections as rows of a table: such as `rejected bad_image`."""
        return {f"rejected {code}": count for code, count in sorted(self.rejected.items())}


@dataclass(slots=True)
class PublishAccount(AnswerCounts):
    sent: int = 0

    @property
    def complete(self) -> bool:
        """True if the daemon holds every image that was sent."""
        return self.sent == self.accepted + self.duplicate and not self.differing

    @property
    def exit_status(self) -> int:
        """The status that a camera's program ends with: 0 if the daemon has every image, and there was one; else 1."""
        return 0 if self.complete and self.accepted + self.duplicate else 1

    def as_dict(self) -> dict[str, int]:
        return {
            "sent": self.sent,
            "accepted": self.accepted,
            "duplicate": self.duplicate,
            **({"of another image": self.differing} if self.differing else {}),
            **self.rejected_rows(),
            "unanswered": self.sent - self.answered,
            "busy": self.busy,
            "resent": self.resent,
        }


@dataclass(frozen=True, slots=True)
class CameraImage:
    """One image to publish, with the fields of `inspect` (PROTOCOL.md); `more` takes the optional ones."""

    image_id: str
    payload: bytes
    board: Mapping[str, Any]
    component: str
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class _UnansweredMessage:
    """A message without its final answer. `due_at_s`: when it is sent, or sent again."""

    frames: list[bytes]
    due_at_s: float = 0.0
    times_sent: int = 0


class Publisher:
    """Sends within its credit, again after silence and after `busy`, on a new connection after long silence.

    For one thread. `send` blocks while the credit is used up, `finish` until every image has its answer.
    """

    def __init__(
        self,
        endpoint: str,
        source: str,
        *,
        silence_s: float = 5.0,
        patience_s: float = 60.0,
        curve: CurveClient | None = None,
        wake: int | None = None,
        on_answer: Callable[[str, ImageAnswer], None] = lambda _id, _answer: None,
    ) -> None:
        """Connect. After `silence_s` without an answer send again; after `patience_s` without any: PublishError.

        A wait ends early when the file descriptor `wake` becomes readable. `on_answer(id, answer)` is called with each
        image's final answer; `accepted` names the board's `attempt`. ValueError for an illegal `source`, CoserveError
        for a wrong key file.
        """
        check_key("source", source)
        self.account = PublishAccount()
        self._endpoint = endpoint
        self._source = source
        self._silence_s = silence_s
        self._patience_s = patience_s
        self._curve = curve
        self._wake = wake
        self._on_answer = on_answer
        self._unanswered: dict[str, _UnansweredMessage] = {}
        self._credit = 0  # until the daemon's welcome
        self._max_payload_bytes = _NEVER_S
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._busy_reason = ""  # the daemon's, until it takes or rejects an image
        self._busy_since_s = 0.0
        self._quiet_since_s = time.monotonic()  # the newest answer, or the first message that waits for one
        try:
            self._connect()
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def outstanding(self) -> int:
        """The number of images that were sent and have no final answer."""
        return len(self._unanswered)

    @property
    def free_credit(self) -> int:
        """The number of images that may be sent now without waiting; 0 before the first welcome."""
        return max(0, self._credit - len(self._unanswered))

    @property
    def silent_s(self) -> float:
        """The time since an answer became due without any answer; 0 if none is due."""
        return time.monotonic() - self._quiet_since_s if self._awaits_answers() else 0.0

    @property
    def trouble(self) -> str:
        """Return why images wait: the daemon's reason for `busy`, or that nothing answers; empty if all is well."""
        if self._busy_reason and self.silent_s < self._silence_s:
            is_new = time.monotonic() - self._busy_since_s < _NOTICE_S
            return "" if is_new else f"the daemon takes no images now: {self._busy_reason}"
        silent_s = self.silent_s
        return silence_text(self._endpoint, silent_s, self._curve) if silent_s > _NOTICE_S else ""

    def send(self, image_id: str, payload: bytes, *, board: Mapping[str, Any], component: str, **more: Any) -> None:
        """Send one image; `more` are the optional fields of `inspect`. Blocks while the credit is used up."""
        header = inspect_header(self._source, image_id, board, component, more)
        if image_id in self._unanswered:
            raise ValueError(f"image {image_id!r} has no answer yet: an id is sent once")
        if not self._awaits_answers():
            self._quiet_since_s = time.monotonic()
        while not self.free_credit:
            self.step(self._patience_s)
        self.send_now(image_id, header, payload)

    def send_now(self, image_id: str, header: bytes, payload: bytes) -> None:
        """Send one message at once. The caller has checked `free_credit`, and that the id is not outstanding."""
        if not self._awaits_answers():
            self._quiet_since_s = time.monotonic()
        self.account.sent += 1
        if len(payload) > self._max_payload_bytes:  # sent all the same, it could cost the connection
            reason = f"{len(payload)} bytes, at most {self._max_payload_bytes} are taken"
            self._finish_image(image_id, {"type": "rejected", "code": "too_large", "reason": reason})
            return
        self._unanswered[image_id] = _UnansweredMessage([MAGIC, header, payload])
        self._send_due()
        self._take_answers()

    def drop_unanswered(self) -> None:
        """Forget every unanswered message and connect again; the caller sends them again later."""
        self.account.sent -= len(self._unanswered)
        self._unanswered.clear()
        self._credit = 0
        self._reconnect()

    def pump(self, wait_s: float = 0.0) -> None:
        """Take answers for `wait_s` and send again what is due; for callers that have nothing to send now."""
        until_s = time.monotonic() + wait_s
        while True:
            self.step(max(0.0, until_s - time.monotonic()))
            if time.monotonic() >= until_s:
                return

    def step(self, wait_s: float) -> None:
        """Wait at most `wait_s` for an answer, for the next message to be due, or for `wake`, and handle it."""
        now_s = time.monotonic()
        if now_s - self._quiet_since_s > self._patience_s:
            self._take_answers()  # this process itself may have been suspended
        if now_s - self._quiet_since_s > self._patience_s:
            raise PublishError(silence_text(self._endpoint, self._patience_s, self._curve))
        if now_s - max(self._quiet_since_s, self._connected_at_s) > 2 * self._silence_s and self._awaits_answers():
            self._reconnect()
        due_at_s = min((message.due_at_s for message in self._unanswered.values()), default=_NEVER_S)
        wait_s = max(0.0, min(wait_s, due_at_s - now_s, self._silence_s / 2))
        readers = [(self._socket, zmq.POLLIN), *([(self._wake, zmq.POLLIN)] if self._wake is not None else [])]
        zmq.zmq_poll(readers, int(wait_s * 1000) + (wait_s > 0))
        self._take_answers()
        self._send_due()

    def finish(self, timeout_s: float = _NEVER_S) -> PublishAccount:
        """Wait at most `timeout_s` until every image has its answer; the rest counts as `unanswered`."""
        until_s = time.monotonic() + timeout_s
        while self._unanswered and (left_s := until_s - time.monotonic()) > 0:
            self.step(left_s)
        return self.account

    def close(self) -> None:
        """Close the connection; images without an answer may or may not have arrived."""
        self._socket.close(linger=0)
        self._context.term()

    def _connect(self) -> None:
        self._socket = connect(self._context, zmq.DEALER, self._endpoint, self._curve)
        self._connected_at_s = time.monotonic()
        self._socket.send_multipart([MAGIC, encode({"type": "hello", "source": self._source})])

    def _awaits_answers(self) -> bool:
        return self._credit == 0 or bool(self._unanswered)

    def _reconnect(self) -> None:
        """Replace the connection, which may be dead without either end knowing, and send everything again."""
        self._socket.close(linger=0)
        self._connect()
        for message in self._unanswered.values():
            message.due_at_s = 0.0

    def _send_due(self) -> None:
        now_s = time.monotonic()
        for message in self._unanswered.values():
            if message.due_at_s <= now_s:
                self._socket.send_multipart(message.frames)
                self.account.resent += message.times_sent > 0
                message.times_sent += 1
                message.due_at_s = now_s + self._silence_s

    def _take_answers(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(json.loads(frames[-1]))

    def _take(self, answer: dict[str, Any]) -> None:
        self._quiet_since_s = time.monotonic()
        self._credit = max(1, int(answer.get("credit", 1)))
        if answer["type"] == "welcome":
            self._max_payload_bytes = answer["max_payload_bytes"]
        image_id = answer.get("id")
        message = self._unanswered.get(image_id) if isinstance(image_id, str) else None
        if message is None or image_id is None:
            return  # a welcome, or the second answer to a message that was sent twice
        if answer["type"] == "busy":
            self.account.busy += 1
            self._busy_since_s = self._busy_since_s if self._busy_reason else self._quiet_since_s
            self._busy_reason = str(answer.get("reason") or "it is busy")
            message.due_at_s = self._quiet_since_s + answer["retry_after_ms"] / 1000
            return
        self._busy_reason = ""
        del self._unanswered[image_id]
        self._finish_image(image_id, cast("ImageAnswer", answer))

    def _finish_image(self, image_id: str, answer: ImageAnswer) -> None:
        self.account.count(image_id, answer)
        self._on_answer(image_id, answer)


def inspect_header(
    source: str, image_id: str, board: Mapping[str, Any], component: str, more: Mapping[str, Any]
) -> bytes:
    """Return the header of `inspect`; ValueError if its answer could not be assigned, or if it is too long."""
    check_key("id", image_id)
    fields = {"id": image_id, "source": source, "board": dict(board), "component": component, **more}
    header = encode({"type": "inspect", **fields})
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"image {image_id!r}: its header has {len(header)} bytes, at most {MAX_HEADER_BYTES} are read")
    return header


def check_key(name: str, value: str) -> None:
    """ValueError if `value` is not a legal `id` or `source`: answers repeat only legal ones."""
    if not KEY.fullmatch(value):
        raise ValueError(f"{name} {value!r}: expected 1 to 128 of A-Z a-z 0-9 . _ : / -")


def publish_images(
    publisher: Publisher,
    images: Iterable[CameraImage],
    *,
    rate: float | None = None,
    progress: Callable[[PublishAccount], None] = lambda _: None,
    timeout_s: float = _NEVER_S,
) -> PublishAccount:
    """Publish `images`, at most `rate` a second, and wait for their answers; call `progress` after each step."""
    next_at_s = time.monotonic()
    for image in images:
        while (wait_s := max(next_at_s - time.monotonic(), 0.0 if publisher.free_credit else _STEP_S)) > 0:
            publisher.step(min(wait_s, _STEP_S))
            progress(publisher.account)
        publisher.send(image.image_id, image.payload, board=image.board, component=image.component, **image.more)
        if rate is not None:
            next_at_s = max(next_at_s + 1 / rate, time.monotonic() - 1.0)  # no burst after a pause
        progress(publisher.account)
    until_s = time.monotonic() + timeout_s
    while publisher.outstanding and time.monotonic() < until_s:
        publisher.finish(min(_STEP_S, until_s - time.monotonic()))
        progress(publisher.account)
    return publisher.account
