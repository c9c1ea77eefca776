"""The results of a line, each once and in order, through every restart (PROTOCOL.md, Results stream).

The live stream loses messages while this program is away or slow. Their numbers (`seq`) have no gaps, and a heartbeat
repeats the newest: `Results` sees what is missing, and asks the line's intake for it (`results_since`).

```python
with Results("tcp://127.0.0.1:5571", intake="tcp://127.0.0.1:5570", position=Path("mes.position")) as results:
    for result in results:
        if result["kind"] == "board":
            print(result["board"]["serial"], result["verdict"])
```
"""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Self, cast

import zmq

from coserve_client.frames import MAGIC, CoserveError, CurveClient, connect, encode, silence_text
from coserve_client.messages import Result

_TOPICS = ("inspection/", "board/", "generation/", "review/", "heartbeat/")
#: Live messages that are read at once; the others wait in the socket, and beyond it at the line.
_BATCH = 1000
_PAGE = 500
_NEVER_S = float("inf")

_log = logging.getLogger("coserve.results")


class ResultsError(CoserveError):
    """Results cannot be read on from this position; the text says what to do."""


class Results:
    """An iterator over the results of a line. For one thread.

    `seq` is the position: the number of the last result that was returned, in the line's `epoch`. `lost` counts results
    that the line had deleted (`retention.results_for`) before they could be read. A database that was restored from
    a backup, or another one, has another epoch and gives the same numbers to other results: then everything that it
    holds is returned, also results that were read before.
    """

    def __init__(
        self,
        results: str,
        intake: str,
        *,
        since: int | None = None,
        position: Path | None = None,
        curve: CurveClient | None = None,
        silence_s: float = 5.0,
    ) -> None:
        """Connect to the endpoints `results` and `intake` of a line.

        Begin after the position in the file `position`; without one after `since` (0: everything that is kept), or with
        new results. A result counts as processed, and is noted in the file, when the next one is asked for, or at the
        end of `with` if no exception leaves it. After `silence_s` without a heartbeat connect again. ResultsError for a
        damaged position file, CoserveError for a wrong key file.
        """
        self.lost = 0
        self._endpoints = results, intake
        self._curve = curve
        self._silence_s = silence_s
        self._file = None if position is None else _PositionFile(position)
        self.seq = since
        self.epoch: str | None = None
        if self._file is not None and self._file.seq is not None:
            self.seq, self.epoch = self._file.seq, self._file.epoch
        self._read_seq = self.seq  # the newest result in `_ready`, or returned
        self._newest_seq = 0  # the newest result that the line is known to have
        self._ready: deque[Result] = deque()
        self._must_greet = True
        self._starts_over = False  # until the next connection
        self._asked_at_s: float | None = None
        self._asked_newest_seq = 0
        self._ask_again_at_s = 0.0
        self._uptime_s = 0.0
        self._heard_at_s = time.monotonic()
        self._is_silent = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._connect()
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self._save()
        self._release()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Result:
        result = self.take()
        assert result is not None
        return result

    def take(self, timeout_s: float = _NEVER_S) -> Result | None:
        """Return the next result, or None if none came within `timeout_s`. The one before counts as processed."""
        self._save()
        until_s = time.monotonic() + timeout_s
        while not self._ready:
            left_s = max(0.0, until_s - time.monotonic())
            self._step(left_s)
            if not left_s and not self._ready:
                return None
        result = self._ready.popleft()
        self.seq = result["seq"]
        return result

    @property
    def trouble(self) -> str:
        """Return why no results come now, for a display; empty if all is well."""
        now_s = time.monotonic()
        if now_s - self._heard_at_s > self._silence_s:
            return silence_text(self._endpoints[0], now_s - self._heard_at_s, self._curve)
        if self._asked_at_s is not None and now_s - self._asked_at_s > self._silence_s:
            return silence_text(self._endpoints[1], now_s - self._asked_at_s, self._curve)
        return ""

    def close(self) -> None:
        """Note the last result as processed, and disconnect."""
        self._save()
        self._release()

    def _connect(self) -> None:
        self._subscriber = connect(self._context, zmq.SUB, self._endpoints[0], self._curve)
        self._dealer = connect(self._context, zmq.DEALER, self._endpoints[1], self._curve)
        for topic in _TOPICS:
            self._subscriber.subscribe(topic)
        self._connected_at_s = time.monotonic()
        self._must_greet = True
        self._asked_at_s = None
        if self._starts_over:  # old connections may have delivered numbers of the earlier results
            self._newest_seq, self._starts_over = 0, False

    def _connect_again(self) -> None:
        self._subscriber.close()
        self._dealer.close()
        self._connect()

    def _step(self, wait_s: float) -> None:
        """Wait at most `wait_s` for messages, and handle them; ask for missing ones."""
        self._ask()
        wait_s = min(wait_s, self._silence_s / 2)
        zmq.zmq_poll([(self._subscriber, zmq.POLLIN), (self._dealer, zmq.POLLIN)], int(wait_s * 1000) + (wait_s > 0))
        for frames in _received(self._dealer):
            self._take_answer(json.loads(frames[-1]))
        for topic, body in islice(_received(self._subscriber), _BATCH):
            self._take_message(topic.decode("ascii"), json.loads(body))
        if self._starts_over:
            self._connect_again()
        self._check_silence()

    def _ask(self) -> None:
        """Send the next question: where the line's results end, or the results that are missing."""
        now_s = time.monotonic()
        if self._asked_at_s is not None or now_s < self._ask_again_at_s:
            return
        if self._must_greet:  # the answer repeats the id: it is the position at the time of the question
            question = {"type": "hello"} | ({} if self._read_seq is None else {"id": str(self._read_seq)})
        elif self._read_seq is not None and self._newest_seq > self._read_seq:
            question = {"type": "results_since", "seq": self._read_seq, "limit": _PAGE}
            self._asked_newest_seq = self._newest_seq
        else:
            return
        self._dealer.send_multipart([MAGIC, encode(question)])
        self._asked_at_s = now_s

    def _take_answer(self, answer: dict[str, Any]) -> None:
        if self._starts_over:
            return
        self._asked_at_s = None
        match answer["type"]:
            case "welcome":
                self._take_welcome(answer)
            case "results":
                self._take_page(answer["items"])
            case "busy":
                self._ask_again_at_s = time.monotonic() + answer["retry_after_ms"] / 1000
            case _:
                raise ResultsError(f"{self._endpoints[1]} refuses: {answer.get('code')}: {answer.get('reason')}")

    def _take_welcome(self, welcome: dict[str, Any]) -> None:
        last_seq: int = welcome["last_seq"]
        self._check_epoch(welcome)
        if self._read_seq is None:
            self.seq = self._read_seq = last_seq
        elif int(welcome["id"]) > last_seq and self._read_seq > last_seq:
            self._start_over(f"its results end at seq {last_seq}, and {welcome['id']} were read")
        self._newest_seq = max(self._newest_seq, last_seq)
        self._must_greet = False
        self._save()

    def _take_page(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            self._enqueue(item.pop("topic"), item)
        if not items:  # what was asked for existed once
            self._skip_to(self._asked_newest_seq)

    def _take_message(self, topic: str, body: dict[str, Any]) -> None:
        self._heard_at_s = time.monotonic()
        if self._starts_over:
            return
        if topic == "heartbeat/":
            self._check_epoch(body)
            self._must_greet |= body["uptime_s"] < self._uptime_s  # the daemon has restarted
            self._uptime_s = body["uptime_s"]
        elif self._read_seq is not None and body["seq"] == self._read_seq + 1:
            self._enqueue(topic, body)
        self._newest_seq = max(self._newest_seq, body["seq"])

    def _enqueue(self, topic: str, body: dict[str, Any]) -> None:
        assert self._read_seq is not None
        if body["seq"] > self._read_seq:
            self._skip_to(body["seq"] - 1)
            self._read_seq = body["seq"]
            self._ready.append(cast("Result", {"kind": topic.partition("/")[0], "topic": topic, **body}))

    def _skip_to(self, seq: int) -> None:
        """Count the results up to `seq` that were not read: the line does not have them any more.

        A reader of everything that is kept, from 0, has lost none of those that are gone before.
        """
        assert self._read_seq is not None
        if self._read_seq == 0:
            self._read_seq = seq
        if seq > self._read_seq:
            self.lost += seq - self._read_seq
            _log.error("results_lost endpoint=%s first=%d last=%d", self._endpoints[0], self._read_seq + 1, seq)
            self._read_seq = seq

    def _check_epoch(self, body: dict[str, Any]) -> None:
        before, self.epoch = self.epoch, body.get("epoch") or self.epoch
        if before not in (None, self.epoch):
            self._start_over(f"its results are of epoch {self.epoch}, and those of {before} were read")

    def _start_over(self, why: str) -> None:
        """Read all that the line has from the beginning: it is another database, perhaps an older one."""
        _log.error("results_start_over endpoint=%s why=%s", self._endpoints[0], why)
        self._ready.clear()
        self.seq = self._read_seq = 0
        self._starts_over = True

    def _check_silence(self) -> None:
        """Connect again after a silence: a connection may be dead without either end knowing."""
        is_silent = bool(self.trouble)
        if is_silent and time.monotonic() - self._connected_at_s > self._silence_s:
            self._connect_again()
        if is_silent != self._is_silent:
            self._is_silent = is_silent
            level, event = (logging.WARNING, "line_silent") if is_silent else (logging.INFO, "line_answers")
            _log.log(level, "%s endpoint=%s seq=%s", event, self._endpoints[0], self.seq)

    def _save(self) -> None:
        if self._file is not None and self.seq is not None:
            self._file.write(self.seq, self.epoch)

    def _release(self) -> None:
        self._subscriber.close()
        self._dealer.close()
        self._context.term()
        if self._file is not None:
            self._file.close()


class _PositionFile:
    """The position of one consumer: a line of fixed length, written in place, so that a kill cannot tear it."""

    _LINE_BYTES = 80

    def __init__(self, path: Path) -> None:
        """Read `seq` and `epoch` of the last processed result; ResultsError for a damaged file."""
        self.path = path
        self.seq: int | None = None
        self.epoch: str | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if path.exists() and (content := path.read_bytes().strip()):
                fields = json.loads(content)
                self.seq, self.epoch = int(fields["seq"]), fields["epoch"]
        except (ValueError, KeyError, TypeError):
            raise ResultsError(f"{path} is not a position file: delete it to begin again") from None
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o640)

    def write(self, seq: int, epoch: str | None) -> None:
        if (seq, epoch) != (self.seq, self.epoch):
            self.seq, self.epoch = seq, epoch
            os.pwrite(self._descriptor, encode({"seq": seq, "epoch": epoch}).ljust(self._LINE_BYTES) + b"\n", 0)

    def close(self) -> None:
        os.fsync(self._descriptor)
        os.close(self._descriptor)


def _received(receiver: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
    while True:
        try:
            yield receiver.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
