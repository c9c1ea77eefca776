"""The daemon's side of the wire, scripted, for tests of publishers: silent, busy or wrong at will."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import zmq
import zmq.auth

BOARD = {"type": "b", "serial": "S1"}
#: An address of this machine for this process alone: no other process takes a port of it that was free a moment ago.
HOST = f"127.{1 + (os.getpid() >> 16)}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
Answer = dict[str, Any]


def accept(_header: Answer, _times: int) -> Answer:
    return {"type": "accepted"}


class ScriptedDaemon:
    """Answers each message with `answers(header, times_seen)`, or not at all where that is None.

    `order` has the ids as they came, `seen` how often each did. With `secret_key` (of zmq.auth) only clients that know
    its public one are heard.
    """

    def __init__(
        self,
        answers: Callable[[Answer, int], Answer | None] = accept,
        endpoint: str = f"tcp://{HOST}:*",
        secret_key: Path | None = None,
        max_bytes: int = 10**6,
    ) -> None:
        self.seen: dict[str, int] = {}
        self.order: list[str] = []
        self.payloads: dict[str, bytes] = {}
        self.headers: dict[str, Answer] = {}
        self.max_outstanding = 0
        self._answers = answers
        self._max_bytes = max_bytes
        self._context: zmq.Context[Any] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        if secret_key is not None:
            self._router.curve_server = True
            self._router.curve_publickey, self._router.curve_secretkey = zmq.auth.load_certificate(secret_key)
        self._router.bind(endpoint)
        self.endpoint = self._router.last_endpoint.decode()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._router.poll(10):
                continue
            batch = []
            while self._router.poll(0):
                batch.append(self._router.recv_multipart())
            self.max_outstanding = max(self.max_outstanding, len(batch))
            for identity, magic, raw, *payload in batch:
                header = json.loads(raw)
                if header["type"] == "hello":
                    answer: Answer | None = {"type": "welcome", "max_payload_bytes": self._max_bytes}
                else:
                    self.order.append(header["id"])
                    self.payloads[header["id"]] = payload[0]
                    self.headers[header["id"]] = header
                    self.seen[header["id"]] = self.seen.get(header["id"], 0) + 1
                    answer = self._answers(header, self.seen[header["id"]])
                if answer is not None:
                    body = {"id": header.get("id"), "credit": 8, **answer}
                    self._router.send_multipart([identity, magic, json.dumps(body).encode()])


def silent_endpoint() -> str:
    """Return an endpoint where no daemon answers, and one may later."""
    with ScriptedDaemon() as daemon:
        return daemon.endpoint
