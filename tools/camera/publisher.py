"""A publisher of images in Python: everything PROTOCOL.md asks of one, in the caller's thread.

For folders, benchmarks and tests, which may wait; a camera that may not has `spooling.py`, built on this. On a camera's
PC only pyzmq is installed: nothing here or in what it imports may want more.

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
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.auth

from daemon.wire.frames import KEY, MAGIC, MAX_HEADER_BYTES, encode

_NEVER_S = float("inf")
#: A daemon gives a client that it does not let in no answer at all.
_KEYS_MATTER = " Does `coserve keys list` there name this client, and is its server key the one that is used here?"


class PublishError(Exception):
    """The daemon does not answer, for longer than the publisher is willing to wait."""


@dataclass(slots=True)
class Account:
    """What became of the images: each sent one ends once, as accepted, duplicate or rejected.

    `differing` duplicates are those whose id belongs to another image: this one was not taken. `busy` and `resent`
    count answers and messages on the way there; `refusals` are the last reasons.
    """

    sent: int = 0
    accepted: int = 0
    duplicate: int = 0
    differing: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    busy: int = 0
    resent: int = 0
    refusals: deque[str] = field(default_factory=lambda: deque(maxlen=20))

    @property
    def answered(self) -> int:
        """Images that are done, one way or the other."""
        return self.accepted + self.duplicate + self.rejected.total()

    @property
    def complete(self) -> bool:
        """Whether the daemon holds every image that was sent."""
        return self.sent == self.accepted + self.duplicate and not self.differing

    def as_dict(self) -> dict[str, int]:
        """The account as a table's rows; a rejection under `rejected bad_image` and the like."""
        codes = {f"rejected {code}": count for code, count in sorted(self.rejected.items())}
        return {
            "sent": self.sent,
            "accepted": self.accepted,
            "duplicate": self.duplicate,
            **({"of another image": self.differing} if self.differing else {}),
            **codes,
            "unanswered": self.sent - self.answered,
            "busy": self.busy,
            "resent": self.resent,
        }


@dataclass(frozen=True, slots=True)
class Image:
    """One image to publish, with the fields of `inspect` (PROTOCOL.md); `more` takes the optional ones."""

    image_id: str
    payload: bytes
    board: Mapping[str, Any]
    component: str
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class CurveClient:
    """Key files of zmq.auth for a daemon on another machine: the daemon's public one, the publisher's secret one."""

    server_public_key: Path
    client_secret_key: Path


@dataclass(slots=True)
class _Open:
    """A message without its final answer. `due_at_s`: when it is sent, or sent again."""

    frames: list[bytes]
    due_at_s: float = 0.0
    times_sent: int = 0


class Publisher:
    """Sends within its credit, again after silence and after `busy`, on a new connection after long silence.

    One thread at a time. `send` blocks while the credit is used up; `finish` until every image has its answer.
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
        on_final: Callable[[str, dict[str, Any]], None] = lambda _id, _answer: None,
    ) -> None:
        """`silence_s` without an answer: send again; `patience_s` without any answer at all: PublishError.

        A wait ends early when the descriptor `wake` can be read. `on_final` hears each image's last answer.
        """
        self.account = Account()
        self._endpoint = endpoint
        self._source = source
        self._silence_s = silence_s
        self._patience_s = patience_s
        self._curve = curve
        self._wake = wake
        self._on_final = on_final
        self._open: dict[str, _Open] = {}
        self._credit = 0  # nothing until the daemon's welcome says more
        self._max_payload_bytes = _NEVER_S
        must_be_key("source", source)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._quiet_since_s = time.monotonic()  # the newest answer, or the first message that waits for one
        try:
            self._connect()
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def outstanding(self) -> int:
        """Images sent that have no final answer yet."""
        return len(self._open)

    @property
    def room(self) -> int:
        """How many more messages may be begun now; 0 before the first welcome."""
        return max(0, self._credit - len(self._open))

    @property
    def silent_s(self) -> float:
        """How long an answer has been waited for without any; 0 where none is due."""
        return time.monotonic() - self._quiet_since_s if self._awaits_answers() else 0.0

    def nobody_answers(self, for_s: float) -> str:
        """What a person may do about it."""
        return (
            f"nobody answers at {self._endpoint} for {for_s:.3g} s: is the daemon running, and is this the endpoint in "
            f"its configuration?{_KEYS_MATTER if self._curve else ''}"
        )

    def send(self, image_id: str, payload: bytes, *, board: Mapping[str, Any], component: str, **more: Any) -> None:
        """Send one image; `more` are the optional fields of `inspect`. Waits while the credit is used up."""
        header = inspect_header(self._source, image_id, board, component, more)
        if image_id in self._open:
            raise ValueError(f"image {image_id!r} is on its way already: an id is sent once")
        if not self._awaits_answers():
            self._quiet_since_s = time.monotonic()
        while not self.room:
            self._pump(self._patience_s)
        self.begin(image_id, header, payload)

    def begin(self, image_id: str, header: bytes, payload: bytes) -> None:
        """Send one message without waiting; the caller has seen that there is `room`, and that the id is not open."""
        if not self._awaits_answers():
            self._quiet_since_s = time.monotonic()
        self.account.sent += 1
        if len(payload) > self._max_payload_bytes:  # the daemon may cut the connection of one who sends it
            reason = f"{len(payload)} bytes, at most {self._max_payload_bytes} are taken"
            self._reject(image_id, "too_large", reason)
            self._on_final(image_id, {"type": "rejected", "code": "too_large", "reason": reason})
            return
        self._open[image_id] = _Open([MAGIC, header, payload])
        self._send_due()
        self._take_answers()

    def forget(self) -> None:
        """Let go of every open message, and connect anew: the caller keeps them, and begins them again later."""
        self.account.sent -= len(self._open)
        self._open.clear()
        self._credit = 0
        self._reconnect()

    def pump(self, wait_s: float = 0.0) -> None:
        """Take answers for `wait_s` and send again what is due; for callers that have nothing to send just now."""
        until_s = time.monotonic() + wait_s
        while True:
            self._pump(max(0.0, until_s - time.monotonic()))
            if time.monotonic() >= until_s:
                return

    def step(self, wait_s: float) -> None:
        """Wait for an answer, for the next message to be due or for `wake`, `wait_s` at most, and deal with it."""
        self._pump(wait_s)

    def finish(self, timeout_s: float = _NEVER_S) -> Account:
        """Wait until every image has its answer, `timeout_s` at most; what is left stays `unanswered`."""
        until_s = time.monotonic() + timeout_s
        while self._open and (left_s := until_s - time.monotonic()) > 0:
            self._pump(left_s)
        return self.account

    def close(self) -> None:
        """Let go of the connection; images without an answer may or may not have arrived."""
        self._socket.close(linger=0)
        self._context.term()

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.sndhwm = 0  # the credit is the limit
        if self._curve is not None:
            public, secret = zmq.auth.load_certificate(self._curve.client_secret_key)
            if secret is None:
                raise PublishError(f"{self._curve.client_secret_key} has no secret key: name the .key_secret file")
            self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
            self._socket.curve_serverkey = zmq.auth.load_certificate(self._curve.server_public_key)[0]
        self._socket.connect(self._endpoint)
        self._connected_at_s = time.monotonic()
        hello = {"type": "hello", "source": self._source}
        self._socket.send_multipart([MAGIC, encode(hello)])

    def _pump(self, wait_s: float) -> None:
        """Wait for an answer or for the next message to be due, `wait_s` at most, and deal with either."""
        now_s = time.monotonic()
        if now_s - self._quiet_since_s > self._patience_s:
            self._take_answers()  # it may be we who stood still
        if now_s - self._quiet_since_s > self._patience_s:
            raise PublishError(self.nobody_answers(self._patience_s))
        if now_s - max(self._quiet_since_s, self._connected_at_s) > 2 * self._silence_s and self._awaits_answers():
            self._reconnect()
        wake_at_s = min((message.due_at_s for message in self._open.values()), default=_NEVER_S)
        wait_s = max(0.0, min(wait_s, wake_at_s - now_s, self._silence_s / 2))
        waits_for = [(self._socket, zmq.POLLIN), *([(self._wake, zmq.POLLIN)] if self._wake is not None else [])]
        zmq.zmq_poll(waits_for, int(wait_s * 1000) + (wait_s > 0))
        self._take_answers()
        self._send_due()

    def _awaits_answers(self) -> bool:
        return self._credit == 0 or bool(self._open)

    def _reconnect(self) -> None:
        """A connection may be dead without either end knowing: begin anew, and send everything again."""
        self._socket.close(linger=0)
        self._connect()
        for message in self._open.values():
            message.due_at_s = 0.0

    def _send_due(self) -> None:
        now_s = time.monotonic()
        for message in self._open.values():
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
        image_id = answer.get("id")
        message = self._open.get(image_id) if isinstance(image_id, str) else None
        if answer["type"] == "welcome":
            self._max_payload_bytes = answer["max_payload_bytes"]
        if message is None or image_id is None:
            return  # a welcome, or the second answer to a message that was sent twice
        match answer["type"]:
            case "busy":
                self.account.busy += 1
                message.due_at_s = self._quiet_since_s + answer["retry_after_ms"] / 1000
                return
            case "accepted":
                self.account.accepted += 1
            case "duplicate":
                self.account.duplicate += 1
                if answer.get("differs"):
                    self.account.differing += 1
                    self.account.refusals.append(f"{image_id}: another image with this id was taken before")
            case _:
                self._reject(image_id, str(answer.get("code", "unknown")), str(answer.get("reason", "")))
        del self._open[image_id]
        self._on_final(image_id, answer)

    def _reject(self, image_id: str, code: str, reason: str) -> None:
        self.account.rejected[code] += 1
        self.account.refusals.append(f"{image_id}: {code}: {reason}")


def inspect_header(
    source: str, image_id: str, board: Mapping[str, Any], component: str, more: Mapping[str, Any]
) -> bytes:
    """The header of `inspect` as it is sent; ValueError where it could not be accounted or would not be read."""
    must_be_key("id", image_id)
    fields = {"id": image_id, "source": source, "board": dict(board), "component": component, **more}
    header = encode({"type": "inspect", **fields})
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"image {image_id!r}: its header has {len(header)} bytes, at most {MAX_HEADER_BYTES} are read")
    return header


def must_be_key(name: str, value: str) -> None:
    """An answer repeats `id` and `source` only where they are legal: without them nothing could be accounted."""
    if not KEY.fullmatch(value):
        raise ValueError(f"{name} {value!r}: expected 1 to 128 of A-Z a-z 0-9 . _ : / -")


def publish_images(
    publisher: Publisher,
    images: Iterable[Image],
    *,
    rate: float | None = None,
    progress: Callable[[Account], None] = lambda _: None,
    timeout_s: float = _NEVER_S,
) -> Account:
    """Publish `images`, at most `rate` a second, and wait for their answers; `progress` hears of every step."""
    next_at_s = time.monotonic()
    for image in images:
        publisher.pump(max(0.0, next_at_s - time.monotonic()))
        publisher.send(image.image_id, image.payload, board=image.board, component=image.component, **image.more)
        if rate is not None:
            next_at_s = max(next_at_s + 1 / rate, time.monotonic() - 1.0)  # a pause is not made up for in one burst
        progress(publisher.account)
    until_s = time.monotonic() + timeout_s
    while publisher.outstanding and time.monotonic() < until_s:
        publisher.finish(min(0.2, until_s - time.monotonic()))
        progress(publisher.account)
    return publisher.account
