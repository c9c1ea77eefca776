"""The daemon's side of the wire, scripted: for tests of publishers, which want it silent, busy or wrong at will."""

import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
import zmq.auth

BOARD = {"type": "b", "serial": "S1"}
#: This process's own among the addresses of this machine: a port of it that was free a moment ago is taken by nobody.
HOST = f"127.{1 + (os.getpid() >> 16)}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
Answer = dict[str, Any]


class Daemon:
    """The daemon's side of the wire, scripted: `answers(header, times_seen)` says what to answer, None for silence.

    `order` has the ids as they came, `seen` how often each did. With `secret_key` (of zmq.auth) only clients that know
    its public one are heard.
    """

    def __init__(
        self,
        answers: Callable[[Answer, int], Answer | None],
        endpoint: str = f"tcp://{HOST}:*",
        secret_key: Path | None = None,
        most_bytes: int = 1000,
    ) -> None:
        self._most_bytes = most_bytes
        self.seen: dict[str, int] = {}
        self.order: list[str] = []
        self.payloads: dict[str, bytes] = {}
        self.headers: dict[str, Answer] = {}
        self.most_outstanding = 0
        self._answers = answers
        self._context: zmq.Context[Any] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        if secret_key is not None:
            self._router.curve_server = True
            self._router.curve_publickey, self._router.curve_secretkey = zmq.auth.load_certificate(secret_key)
        self._router.bind(endpoint)
        self.endpoint = self._router.last_endpoint.decode()
        self._stop: queue.Queue[None] = queue.Queue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stop.put(None)
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while self._stop.empty():
            if not self._router.poll(10):
                continue
            batch = []
            while self._router.poll(0):
                batch.append(self._router.recv_multipart())
            self.most_outstanding = max(self.most_outstanding, len(batch))
            for identity, magic, raw, *payload in batch:
                header = json.loads(raw)
                if header["type"] == "hello":
                    answer: Answer | None = {"type": "welcome", "max_payload_bytes": self._most_bytes}
                else:
                    self.order.append(header["id"])
                    self.payloads[header["id"]] = payload[0]
                    self.headers[header["id"]] = header
                    self.seen[header["id"]] = self.seen.get(header["id"], 0) + 1
                    answer = self._answers(header, self.seen[header["id"]])
                if answer is not None:
                    body = {"id": header.get("id"), "credit": 8, **answer}
                    self._router.send_multipart([identity, magic, json.dumps(body).encode()])


@contextmanager
def a_daemon(
    answers: Callable[[Answer, int], Answer | None],
    endpoint: str = f"tcp://{HOST}:*",
    secret_key: Path | None = None,
    most_bytes: int = 1000,
) -> Iterator[Daemon]:
    daemon = Daemon(answers, endpoint, secret_key, most_bytes)
    try:
        yield daemon
    finally:
        daemon.stop()


def accept(_header: Answer, _times: int) -> Answer:
    return {"type": "accepted"}
