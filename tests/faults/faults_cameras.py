"""Publishers that keep an account of every image, and a consumer that keeps every result."""

import hashlib
import random
import threading
from dataclasses import dataclass
from typing import Any

from coserve_client import Publisher
from tests.contract.client import Listener
from tests.lines import a_jpeg

#: The verdict on each component by the rules below, independent of the (untrained) experts' answers.
VERDICTS = {"P": "pass", "V": "review", "F": "fail"}
BOARDS = {"plain": ("P1", "P2", "P3", "P4"), "mixed": ("P1", "P2", "P3", "V1", "F1"), "hasty": ("P1", "P2", "P3")}
RULES = """\
boards:
  plain: {components: {P: [P1, P2, P3, P4]}}
  mixed: {time_limit: 5s, components: {P: 3, V: [V1], F: [F1]}}
  hasty: {time_limit: 800ms, components: {P: 3}}
classifiers:
  P: {expert: R0402, pass: [ok, odd, bad], review_below: 0.0}
  V: {expert: C0603, pass: [ok, odd, bad], review_below: 1.0}
  F: {expert: QFP64, pass: [ok, odd, bad], review_below: 0.0, then: solder}
detectors:
  solder: {expert: yolo-solder, require: {void: {min: 64}}}
defects: {void: D301}
"""


@dataclass(frozen=True, slots=True)
class Sent:
    """An image that the daemon has taken: it answered `accepted` or `duplicate`."""

    sha256: str
    board_type: str
    serial: str
    designator: str


class Camera(Publisher):
    """A publisher whose account has every image that was taken, by id, and every answer that must not come."""

    def __init__(self, endpoint: str, source: str) -> None:
        super().__init__(endpoint, source, silence_s=0.6, patience_s=240.0)
        self.source = source
        self.taken: dict[str, Sent] = {}
        self.complaints: list[str] = []
        self._sent: dict[str, Sent] = {}
        self._payloads: dict[str, bytes] = {}

    def show(self, board_type: str, serial: str, designator: str, payload: bytes) -> None:
        """Publish one image of a board."""
        image_id = f"{serial}/{designator}"
        self._sent[image_id] = Sent(hashlib.sha256(payload).hexdigest(), board_type, serial, designator)
        board = {"type": board_type, "serial": serial}
        self.send(image_id, payload, board=board, component=designator[0], designator=designator)

    def _take(self, answer: dict[str, Any]) -> None:
        image_id = answer.get("id")
        if image_id is not None:
            self._note(image_id, answer)
        super()._take(answer)

    def _note(self, image_id: str, answer: dict[str, Any]) -> None:
        text = f"{self.source} {image_id}: {answer}"
        match answer["type"]:
            case "accepted":
                if image_id in self.taken:
                    self.complaints.append(f"accepted a second time: {text}")
                self.taken[image_id] = self._sent[image_id]
            case "duplicate":
                if answer["differs"]:
                    self.complaints.append(f"another image has its place: {text}")
                self.taken.setdefault(image_id, self._sent[image_id])
            case "busy":
                pass
            case _:
                self.complaints.append(f"refused: {text}")


class Shift(threading.Thread):
    """One camera at work: board after board, as fast as it may; now and then it sends an image it had sent before."""

    def __init__(self, endpoint: str, source: str, seed: int, pause_s: float = 0.02) -> None:
        super().__init__(name=source, daemon=True)
        self.camera = Camera(endpoint, source)
        self._rng = random.Random(f"{source} {seed}")
        self._pause_s = pause_s
        self._over = threading.Event()
        self._pictures = [a_jpeg(self._rng.randrange(10**6), width=80 + 60 * n, height=60 + 40 * n) for n in range(4)]
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            number = 0
            while not self._over.is_set():
                number += 1
                self._show_board(f"{self.camera.source}-{number}")
            self.camera.finish()
        except BaseException as error:  # noqa: BLE001  the round that waits for this thread raises it
            self.error = error
        finally:
            self.camera.close()

    def end(self) -> None:
        """Show no more boards; the thread ends once every image has its answer."""
        self._over.set()

    def _show_board(self, serial: str) -> None:
        board_type = self._rng.choice(list(BOARDS))
        designators = list(BOARDS[board_type])
        if board_type != "plain" and self._rng.random() < 0.3:
            designators.remove(self._rng.choice(designators))
        for designator in designators:
            # What stands behind the end marker is ignored: no two images have the same bytes.
            payload = self._rng.choice(self._pictures) + f"{serial}/{designator}".encode()
            self.camera.show(board_type, serial, designator, payload)
            if self._rng.random() < 0.02 and f"{serial}/{designator}" in self.camera.taken:
                self.camera.show(board_type, serial, designator, payload)
            self.camera.pump(self._pause_s)


class Consumer(threading.Thread):
    """A subscriber across restarts: every message by its `seq`, each the same however often it comes."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(name="consumer", daemon=True)
        self._listener = Listener(endpoint, "inspection/", "board/", "generation/")
        self._over = threading.Event()
        self.messages: dict[int, dict[str, Any]] = {}
        self.complaints: list[str] = []

    def run(self) -> None:
        with self._listener as listener:
            while not self._over.is_set():
                if listener.socket.poll(100):
                    topic, body = listener.take()
                    message = {"topic": topic, **body}
                    first = self.messages.setdefault(message["seq"], message)
                    if first != message:
                        self.complaints.append(f"seq {message['seq']} came as two messages: {first}, {message}")

    def end(self) -> None:
        self._over.set()
        self.join()
