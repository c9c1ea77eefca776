"""The control socket: every request gets one answer, and the client says clearly when no daemon answers."""

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daemon.wire.control import ControlError, ControlServer, Handler
from daemon.wire.control import ask as ask_within
from tests.contract.peer import Peer


def status(fields: dict[str, Any]) -> dict[str, Any]:
    return {"state": "ready", "last_error": None, "asked": fields}


def pin(fields: dict[str, Any]) -> dict[str, Any]:
    raise ControlError("unknown_expert", f"no expert {fields['expert']!r}: see `coserve experts`")


ask = partial(ask_within, timeout_s=60.0)


@contextmanager
def a_server(folder: Path, **more: Handler) -> Iterator[str]:
    context: zmq.Context[Any] = zmq.Context()
    server = ControlServer(context, f"ipc://{folder}/control.sock", {"status": status, "pin": pin, **more})
    try:
        yield server.start()
    finally:
        server.stop()
        context.term()


def test_a_refusal_carries_its_code_and_reason(tmp_path: Path) -> None:
    with a_server(tmp_path) as endpoint:
        with pytest.raises(ControlError, match="no expert 'x'") as caught:
            ask(endpoint, "pin", expert="x")
        assert caught.value.code == "unknown_expert"
        with pytest.raises(ControlError, match="expected one of pin, status") as caught:
            ask(endpoint, "dance")
        assert caught.value.code == "bad_field"


def test_malformed_requests_get_one_error_each_and_the_server_lives(tmp_path: Path) -> None:
    pieces = st.sampled_from([b"", b"CS1", b"CS2", b"{}", b'{"type": "status"}', b'{"type": []}']) | st.binary(
        max_size=40
    )
    with a_server(tmp_path) as endpoint, Peer(endpoint) as peer:

        @settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
        @given(frames=st.lists(pieces, min_size=1, max_size=4))
        def check(frames: list[bytes]) -> None:
            peer.socket.send_multipart(frames)
            assert peer.socket.poll(60_000), "no answer"
            answer = json.loads(peer.socket.recv_multipart()[-1])
            assert answer["type"] in {"ok", "error"}
            assert answer["type"] == "ok" or (answer["code"] and answer["reason"])

        check()
        assert ask(endpoint, "status")["state"] == "ready"


def test_nobody_listening_is_said_at_once(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/control.sock"
    with pytest.raises(ControlError, match="coserve run") as caught:
        ask(endpoint, "status")
    assert caught.value.code == "no_daemon"
    assert endpoint in caught.value.reason
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "control.sock"))
    with pytest.raises(ControlError, match="no daemon answers"):
        ask(endpoint, "status")


def test_a_daemon_that_is_stuck_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    going = threading.Event()

    def stuck(_: dict[str, Any]) -> Mapping[str, Any]:
        going.wait(60)
        return {}

    with a_server(tmp_path, stuck=stuck) as endpoint:
        with pytest.raises(ControlError, match=r"within 0\.1 s") as caught:
            ask_within(endpoint, "stuck", timeout_s=0.1)
        going.set()
        assert caught.value.code == "no_answer"
        assert ask(endpoint, "status")["state"] == "ready"
