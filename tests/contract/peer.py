"""A publisher that speaks PROTOCOL.md by hand: stock pyzmq, nothing of ours."""

import json
from collections.abc import Mapping
from typing import Any, Self

import zmq

from tests.waiting import PATIENCE_S


def frames_of(header: Mapping[str, Any] | bytes, *payload: bytes) -> list[bytes]:
    return [b"CS1", header if isinstance(header, bytes) else json.dumps(header).encode(), *payload]


class Peer:
    """A DEALER (or REQ) with a context of its own."""

    def __init__(self, endpoint: str, kind: int = zmq.DEALER, identity: bytes = b"", rcvhwm: int = 0) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.linger, self.socket.rcvtimeo = 0, int(PATIENCE_S * 1000)
        self.socket.sndhwm, self.socket.rcvhwm = 0, rcvhwm
        if identity:
            self.socket.routing_id = identity
        self.socket.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def send(self, header: Mapping[str, Any] | bytes, *payload: bytes) -> None:
        self.socket.send_multipart(frames_of(header, *payload))

    def take(self) -> dict[str, Any]:
        """Return the next answer."""
        *envelope, magic, header = self.socket.recv_multipart()
        assert (envelope, magic) in (([], b"CS1"), ([b""], b"CS1"))
        assert len(header) <= 64 * 1024
        answer = json.loads(header)
        assert isinstance(answer, dict)
        return answer

    def ask(self, header: Mapping[str, Any] | bytes, *payload: bytes) -> dict[str, Any]:
        self.send(header, *payload)
        return self.take()

    def frames(self, *frames: bytes) -> dict[str, Any]:
        """Send these frames as they are; return the answer."""
        self.socket.send_multipart(list(frames))
        return self.take()

    def silent(self, wait_s: float = 0.2) -> bool:
        """Return True if nothing more comes."""
        return not self.socket.poll(int(wait_s * 1000))
