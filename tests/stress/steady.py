"""An honest publisher at a steady rate, and how long each of its images waited to be accepted."""

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq

from daemon.wire.messages import MAGIC, encode
from tests.stress.line import BOARD_TYPE, IMAGES_PER_BOARD, component_of

#: Without an answer for so long it sends again, as a camera would.
_SILENCE_S = 5.0
_WAIT_MS = 200


def quantile_ms(waits_s: Sequence[float], share: float) -> float | None:
    """Return the quantile of these seconds in milliseconds; None where there are none."""
    return round(1000 * float(np.quantile(waits_s, share)), 2) if len(waits_s) else None


@dataclass(slots=True)
class _UnansweredImage:
    """`due_s`: when it was to be sent; its wait counts from there."""

    number: int
    due_s: float
    send_at_s: float


@dataclass(slots=True)
class PublisherTally:
    """`waits_s` since the last `take_waits_s`; the counts are since the start."""

    sent: int = 0
    accepted: int = 0
    busy: int = 0
    resent: int = 0
    rejected: list[str] = field(default_factory=list)
    waits_s: deque[float] = field(default_factory=deque)


class SteadyPublisher:
    """Sends `images` in turn, `rate` a second, in a thread of its own until `stop`; then waits for open answers.

    An image's wait is from the moment at which it was due, so that a publisher that is held up cannot hide it.
    """

    def __init__(self, endpoint: str, source: str, images: Sequence[bytes], rate: float) -> None:
        self.source = source
        self.tally = PublisherTally()
        self._endpoint = endpoint
        self._images = images
        self._interval_s = 1.0 / rate
        self._unanswered: dict[str, _UnansweredImage] = {}
        self._ending = threading.Event()
        self._gives_up_at_s = float("inf")
        self._thread = threading.Thread(target=self._run, name=f"steady {source}", daemon=True)

    @property
    def unanswered(self) -> int:
        return len(self._unanswered)

    def start(self) -> None:
        self._thread.start()

    def stop(self, patience_s: float = 60.0) -> None:
        """Send no new image; end when each has its answer, or after `patience_s`."""
        self._gives_up_at_s = time.monotonic() + patience_s
        self._ending.set()
        self._thread.join()

    def take_waits_s(self) -> list[float]:
        """Return waits of the images that were accepted since the last call. Any thread."""
        return [self.tally.waits_s.popleft() for _ in range(len(self.tally.waits_s))]

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(self._endpoint)
            next_at_s = time.monotonic()
            while not self._is_done():
                now_s = time.monotonic()
                while next_at_s <= now_s and not self._ending.is_set():
                    number = self.tally.sent
                    self.tally.sent += 1
                    self._unanswered[f"{self.source}/{number}"] = _UnansweredImage(number, next_at_s, 0.0)
                    next_at_s += self._interval_s
                wake_at_s = next_at_s
                for image_id, image in self._unanswered.items():
                    if image.send_at_s <= now_s:
                        self._send(dealer, image_id, image, now_s)
                    wake_at_s = min(wake_at_s, image.send_at_s)
                wait_ms = _WAIT_MS if self._ending.is_set() else (wake_at_s - time.monotonic()) * 1000
                if dealer.poll(max(0, min(_WAIT_MS, int(wait_ms)))):
                    self._read_answers(dealer)

    def _is_done(self) -> bool:
        return self._ending.is_set() and (not self._unanswered or time.monotonic() > self._gives_up_at_s)

    def _send(self, dealer: "zmq.Socket[bytes]", image_id: str, image: _UnansweredImage, now_s: float) -> None:
        header = {
            "type": "inspect",
            "id": image_id,
            "source": self.source,
            "board": {"type": BOARD_TYPE, "serial": f"{self.source}-{image.number // IMAGES_PER_BOARD}"},
            "component": component_of(image.number),
        }
        self.tally.resent += image.send_at_s > 0
        image.send_at_s = now_s + _SILENCE_S
        dealer.send_multipart([MAGIC, encode(header), self._images[image.number % len(self._images)]])

    def _read_answers(self, dealer: "zmq.Socket[bytes]") -> None:
        while dealer.poll(0):
            answer: dict[str, Any] = json.loads(dealer.recv_multipart()[-1])
            now_s = time.monotonic()
            image = self._unanswered.get(str(answer.get("id")))
            if image is None:
                continue  # the answer to a copy
            if answer["type"] == "busy":
                self.tally.busy += 1
                image.send_at_s = now_s + answer["retry_after_ms"] / 1000
                continue
            del self._unanswered[answer["id"]]
            if answer["type"] in ("accepted", "duplicate"):
                self.tally.accepted += 1
                self.tally.waits_s.append(now_s - image.due_s)
            else:
                self.tally.rejected.append(f"{answer['id']}: {answer.get('code')}: {answer.get('reason')}")
