"""The control socket (PROTOCOL.md, Control): a server thread over a mapping of handlers, and the client's `ask`."""

import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog
import zmq

from daemon.wire.connection_guard import ConnectionLimits
from daemon.wire.messages import MAGIC, MAX_HEADER_BYTES, MessageError, encode, read_header, split_envelope
from daemon.wire.socket_thread import Binding, Mailbox, Socket, SocketThread

Handler = Callable[[dict[str, Any]], Mapping[str, Any]]

_REQUESTS_PER_PEER = 64


class ControlError(Exception):
    """A request that was not carried out: `code` for programs, `reason` for the person who asked."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class ControlServer:
    """Answers one request after another. A handler refuses by ControlError; other exceptions are `internal`."""

    def __init__(
        self, context: "zmq.Context[Any]", endpoint: str, handlers: Mapping[str, Handler], max_connections: int = 64
    ) -> None:
        self._handlers = dict(handlers)
        self._mailbox: Mailbox[None] = Mailbox()
        self._stopping = False
        self._log = structlog.get_logger("control")
        binding = Binding(context, zmq.ROUTER, [endpoint], ConnectionLimits(max_connections))
        self._thread = SocketThread("control", binding, self._mailbox, _configure, self._serve)

    def start(self) -> str:
        return self._thread.start()[0]

    def stop(self) -> None:
        self._stopping = True
        self._thread.stop()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive

    def _serve(self, router: Socket) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(self._mailbox.fileno(), zmq.POLLIN)
        while not self._stopping:
            poller.poll()
            try:
                message, _ = self._thread.guard.receive(router, None)
            except zmq.Again:
                continue
            assert message is not None  # control has no keys
            identity, *frames = message
            envelope, body = split_envelope(frames)
            try:
                router.send_multipart([identity, *envelope, MAGIC, self._answer(body)], zmq.NOBLOCK)
            except zmq.ZMQError as error:  # the asker does not read its answers
                self._log.debug("answer_dropped", error=error.strerror)

    def _answer(self, frames: list[bytes]) -> bytes:
        try:
            return encode({"type": "ok", **self._handle(read_header(frames))})
        except (ControlError, MessageError) as error:
            return encode({"type": "error", "code": error.code, "reason": error.reason})
        except Exception as error:  # noqa: BLE001 - a broken handler is the asker's answer, not the line's end
            self._log.exception("control_failed")
            return encode({"type": "error", "code": "internal", "reason": f"{type(error).__name__}: {error}"})

    def _handle(self, fields: dict[str, Any]) -> Mapping[str, Any]:
        kind = fields.pop("type", None)
        handler = self._handlers.get(kind) if isinstance(kind, str) else None
        if handler is None:
            raise ControlError("bad_field", f"type: expected one of {', '.join(sorted(self._handlers))}")
        return handler(fields)


def _configure(router: Socket) -> None:
    router.maxmsgsize = 4 * MAX_HEADER_BYTES
    router.rcvhwm = _REQUESTS_PER_PEER


def ask(endpoint: str, kind: str, /, *, timeout_s: float = 5.0, **fields: Any) -> dict[str, Any]:
    """Return the daemon's answer. ControlError with its code, or with `no_daemon` or `no_answer`."""
    must_listen(endpoint)
    context: zmq.Context[Any] = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(endpoint)
            dealer.send_multipart([MAGIC, encode({"type": kind, **fields})])
            if not dealer.poll(int(timeout_s * 1000)):
                raise ControlError(
                    "no_answer",
                    f"no answer from {endpoint} within {timeout_s:g} s: the daemon there is stuck or very busy",
                )
            _, header = dealer.recv_multipart()
            answer: dict[str, Any] = json.loads(header)
    finally:
        context.destroy(linger=0)
    if answer.pop("type", None) != "ok":
        raise ControlError(str(answer.get("code", "internal")), str(answer.get("reason", "the daemon gave no reason")))
    return answer


def must_listen(endpoint: str) -> None:
    """Raise ControlError at once, without waiting, if no daemon is there or we may not ask it."""
    path = endpoint.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except BlockingIOError:
            return  # it listens, and many others connect
        except PermissionError:
            reason = f"{path} may not be opened: become a member of the group that owns it"
            raise ControlError("not_allowed", reason) from None
        except OSError as error:
            config = Path(path).parent.parent / "coserve.yaml"  # the line whose folder `run/` has the socket
            shown = config.relative_to(Path.cwd()) if config.is_relative_to(Path.cwd()) else config
            start = f"coserve run {shown if config.is_file() else 'CONFIG'}"
            reason = f"no daemon answers at {endpoint} ({error.strerror or error}): start it with `{start}`"
            raise ControlError("no_daemon", reason) from None
