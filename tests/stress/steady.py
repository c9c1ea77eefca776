"""An honest publisher at a steady rate, and how long each of its images waited to be accepted."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from coserve_client import PublishAccount, Publisher
from coserve_client.messages import ImageAnswer
from tests.stress.line import BOARD_TYPE, IMAGES_PER_BOARD, component_of
from tests.waiting import PATIENCE_S

_LOOK_EVERY_S = 0.2


def quantile_ms(waits_s: Sequence[float], share: float) -> float | None:
    """Return the quantile of these seconds in milliseconds; None where there are none."""
    return round(1000 * float(np.quantile(waits_s, share)), 2) if len(waits_s) else None


class SteadyPublisher:
    """Sends `images` in turn, `rate` a second, in a thread of its own until `stop`; its ids are `source/0` and so on.

    An image's wait is from the moment at which it was due, so that a publisher that is held up cannot hide it.
    """

    def __init__(self, endpoint: str, source: str, images: Sequence[bytes], rate: float) -> None:
        self.source = source
        self.account = PublishAccount()
        self._endpoint = endpoint
        self._images = images
        self._interval_s = 1.0 / rate
        self._due_s: dict[str, float] = {}
        self._waits_s: deque[float] = deque()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"steady {source}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> PublishAccount:
        """Send no new image; return the account when each has its answer."""
        self._ending.set()
        self._thread.join()
        return self.account

    def take_waits_s(self) -> list[float]:
        """Return waits of the images that were answered since the last call. Any thread."""
        return [self._waits_s.popleft() for _ in range(len(self._waits_s))]

    def _run(self) -> None:
        due_s = time.monotonic()
        with Publisher(self._endpoint, self.source, patience_s=PATIENCE_S, on_answer=self._answered) as publisher:
            self.account = publisher.account
            for number in itertools.count():
                while (left_s := due_s - time.monotonic()) > 0 and not self._ending.is_set():
                    publisher.pump(min(left_s, _LOOK_EVERY_S))
                if self._ending.is_set():
                    break
                image_id, image = f"{self.source}/{number}", self._images[number % len(self._images)]
                board = {"type": BOARD_TYPE, "serial": f"{self.source}-{number // IMAGES_PER_BOARD}"}
                self._due_s[image_id] = due_s
                publisher.send(image_id, image, board=board, component=component_of(number))
                due_s += self._interval_s
            publisher.finish(PATIENCE_S)

    def _answered(self, image_id: str, _answer: ImageAnswer) -> None:
        self._waits_s.append(time.monotonic() - self._due_s.pop(image_id))
