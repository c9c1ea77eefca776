"""An honest consumer of results: reads the stream, and asks for missed messages when `seq` jumps."""

import json
import threading
import time
from dataclasses import dataclass
from typing import Any

import zmq

from daemon.wire.messages import MAGIC, encode

_POLL_MS = 200
_PAGE = 500
_ANSWER_S = 60.0


@dataclass(slots=True)
class ConsumerTally:
    """`missed` counts messages that had to be asked for, `lost` those that could not be had even so."""

    messages: int = 0
    heartbeats: int = 0
    longest_silence_s: float = 0.0
    missed: int = 0
    lost: int = 0
    last_seq: int = 0


class StreamConsumer:
    """Subscribes to everything in a thread of its own, from `start` to `stop`."""

    def __init__(self, results: str, intake: str) -> None:
        self.tally = ConsumerTally()
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
        tally = self.tally
        with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
            subscriber.linger = 0
            subscriber.subscribe(b"")
            subscriber.connect(self._results)
            beat_at_s = time.monotonic()
            while not self._ending.is_set():
                if not subscriber.poll(_POLL_MS):
                    continue
                topic, body = subscriber.recv_multipart()
                seq = json.loads(body)["seq"]
                if topic == b"heartbeat/":
                    now_s = time.monotonic()
                    tally.heartbeats += 1
                    tally.longest_silence_s = max(tally.longest_silence_s, now_s - beat_at_s)
                    beat_at_s = now_s
                    self._catch_up(context, seq)
                else:
                    self._catch_up(context, seq - 1)
                    if seq == tally.last_seq + 1:
                        tally.messages += 1
                        tally.last_seq = seq
            self._catch_up(context, None)

    def _catch_up(self, context: "zmq.Context[Any]", upto: int | None) -> None:
        """Ask for the messages after the last one, to `upto` or to the end."""
        if upto is not None and upto <= self.tally.last_seq:
            return
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(self._intake)
            while upto is None or self.tally.last_seq < upto:
                question = {"type": "results_since", "seq": self.tally.last_seq, "limit": _PAGE}
                dealer.send_multipart([MAGIC, encode(question)])
                if not dealer.poll(int(_ANSWER_S * 1000)):
                    return  # tried again with the next message
                page = json.loads(dealer.recv_multipart()[-1])
                if page["type"] != "results":
                    time.sleep(page.get("retry_after_ms", 100) / 1000)
                    continue
                for item in page["items"]:
                    self.tally.lost += item["seq"] - self.tally.last_seq - 1
                    self.tally.missed += 1
                    self.tally.last_seq = item["seq"]
                if not page["more"]:
                    return
