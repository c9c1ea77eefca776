"""An honest consumer of results: reads the stream, and asks for what it missed when `seq` jumps."""

import json
import threading
import time
from dataclasses import dataclass
from typing import Any

import zmq

from daemon.wire.frames import MAGIC, encode

_POLL_MS = 200
_PAGE = 500
_ANSWER_S = 60.0


@dataclass(slots=True)
class Heard:
    """`missed` counts messages that had to be asked for, `lost` those that could not be had even so."""

    messages: int = 0
    heartbeats: int = 0
    longest_silence_s: float = 0.0
    missed: int = 0
    lost: int = 0
    last_seq: int = 0


class Consumer:
    """Subscribes to everything in a thread of its own, from `start` to `stop`."""

    def __init__(self, results: str, intake: str) -> None:
        self.heard = Heard()
        self._results = results
        self._intake = intake
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="consumer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Catch up to the newest result, and end."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
            subscriber.linger = 0
            subscriber.subscribe(b"")
            subscriber.connect(self._results)
            beat_at_s = time.monotonic()
            while not self._ending.is_set():
                if not subscriber.poll(_POLL_MS):
                    continue
                topic, body = subscriber.recv_multipart()
                message = json.loads(body)
                if topic == b"heartbeat/":
                    now_s = time.monotonic()
                    self.heard.heartbeats += 1
                    self.heard.longest_silence_s = max(self.heard.longest_silence_s, now_s - beat_at_s)
                    beat_at_s = now_s
                    upto = message["seq"]
                else:
                    upto = message["seq"] - 1
                if upto > self.heard.last_seq:
                    self._catch_up(context, upto)
                if topic != b"heartbeat/" and message["seq"] == self.heard.last_seq + 1:
                    self.heard.messages += 1
                    self.heard.last_seq = message["seq"]
            self._catch_up(context, None)

    def _catch_up(self, context: "zmq.Context[Any]", upto: int | None) -> None:
        """Ask for what came after the last message, to `upto` or to the end."""
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(self._intake)
            while upto is None or self.heard.last_seq < upto:
                dealer.send_multipart(
                    [MAGIC, encode({"type": "results_since", "seq": self.heard.last_seq, "limit": _PAGE})]
                )
                if not dealer.poll(int(_ANSWER_S * 1000)):
                    return  # tried again with the next message
                page = json.loads(dealer.recv_multipart()[-1])
                if page["type"] != "results":
                    time.sleep(page.get("retry_after_ms", 100) / 1000)
                    continue
                for item in page["items"]:
                    self.heard.lost += item["seq"] - self.heard.last_seq - 1
                    self.heard.missed += 1
                    self.heard.last_seq = item["seq"]
                if not page["more"]:
                    return
