"""The cameras of the intake benchmark, a process of their own: as many images as the credit allows, or at a rate.

`python -m tests.bench.intake_camera` reads one JSON object (`Order`) from stdin, prints a line once it is
connected, and at the end one JSON object (`CameraAnswers`).
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import zmq

from daemon.wire.messages import MAGIC

#: Images of one board; the next board begins then.
BOARD_IMAGES = 100
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Order:
    """An order to send the file `image` again and again.

    `rate` is images a second, open loop; without it as fast as answers give credit.
    Counting begins `warm_s` after the first image and goes on for `seconds`; with `images` it ends after so many.
    """

    endpoint: str
    source: str
    image: str
    seconds: float = 0.0
    warm_s: float = 0.0
    rate: float | None = None
    images: int | None = None


@dataclass(slots=True)
class CameraAnswers:
    """Answers that came. `latency_ms` is from when an image was due (at a rate) or sent to its `accepted`."""

    accepted: int = 0
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    seconds: float = 0.0
    latency_ms: list[float] = field(default_factory=list[float])


class _Camera:
    """One connection. Every image has the same bytes and a name of its own."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._payload = Path(order.image).read_bytes()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.sndhwm = 0  # the credit is the limit
        self._socket.connect(order.endpoint)
        self._headers = self._make_headers()
        self._since_s: dict[str, float] = {}
        self._sent = 0
        self._answers = CameraAnswers()
        self._count_from_s = 0.0
        self._socket.send_multipart([MAGIC, b'{"type": "hello"}'])
        self._credit = int(self._next_answer()["credit"])

    def run(self) -> CameraAnswers:
        began_s = time.perf_counter()
        self._count_from_s = began_s + self._order.warm_s
        end_s = self._count_from_s + self._order.seconds if self._order.images is None else began_s + 1e9
        if self._order.rate is None:
            self._flood(end_s, self._order.images or 10**12)
        else:
            self._keep_pace(began_s, end_s, self._order.rate)
        self._answers.seconds = time.perf_counter() - self._count_from_s
        return self._answers

    def _flood(self, end_s: float, images: int) -> None:
        while time.perf_counter() < end_s and (self._sent < images or self._since_s):
            while len(self._since_s) < self._credit and self._sent < images:
                self._send(time.perf_counter())
            self._take(self._next_answer())
            while (answer := self._receive()) is not None:
                self._take(answer)

    def _keep_pace(self, began_s: float, end_s: float, rate: float) -> None:
        while (due_s := began_s + self._sent / rate) < end_s:
            while (wait_s := due_s - time.perf_counter()) > 0:
                if (answer := self._receive()) is not None:
                    self._take(answer)
                elif wait_s < 0.001:
                    time.sleep(wait_s)
                else:
                    self._socket.poll(int(wait_s * 1000))
            while len(self._since_s) >= self._credit:
                self._take(self._next_answer())  # what is late counts from when it was due
            self._send(due_s)
        while self._since_s:
            self._take(self._next_answer())

    def _send(self, since_s: float) -> None:
        image_id, header = next(self._headers)
        self._since_s[image_id] = since_s
        self._sent += 1
        self._socket.send_multipart([MAGIC, header, self._payload], copy=False)

    def _take(self, answer: dict[str, Any]) -> None:
        now_s = time.perf_counter()
        since_s = self._since_s.pop(answer["id"])
        if answer["type"] != "accepted":
            kind = f"{answer['type']} {answer.get('code') or answer.get('reason') or ''}".strip()
            self._answers.refusals[kind] = self._answers.refusals.get(kind, 0) + 1
        elif now_s >= self._count_from_s:
            self._answers.accepted += 1
            self._answers.latency_ms.append((now_s - since_s) * 1000)

    def _next_answer(self) -> dict[str, Any]:
        while (answer := self._receive()) is None:
            if not self._socket.poll(int(_PATIENCE_S * 1000)):
                raise TimeoutError(f"no answer from {self._order.endpoint} within {_PATIENCE_S:.0f} s")
        return answer

    def _receive(self) -> dict[str, Any] | None:
        try:
            return json.loads(self._socket.recv_multipart(zmq.NOBLOCK)[1])
        except zmq.Again:
            return None

    def _make_headers(self) -> Iterator[tuple[str, bytes]]:
        number = 0
        run = f"{time.time_ns():x}"
        while True:
            image_id = f"{run}/{number}"
            serial = f"{self._order.source}-{run}-{number // BOARD_IMAGES}"
            board = {"type": "bench", "serial": serial}
            fields = {"type": "inspect", "id": image_id, "source": self._order.source, "board": board}
            yield image_id, json.dumps({**fields, "component": "part"}).encode()
            number += 1


if __name__ == "__main__":
    camera = _Camera(Order(**json.loads(sys.stdin.read())))
    print("connected", flush=True)
    print(json.dumps(asdict(camera.run())))
