"""However many connections come at once, libzmq accepts one at a time."""

import contextlib
import struct
from pathlib import Path

import pytest
import zmq

from daemon.wire.connection_guard import Listeners
from tests.ports import free_port
from tests.stress.raw import RawPeer

_EVENT = struct.Struct("=Hi")


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_listener_accepts_one_connection_each_time_that_it_is_armed(transport: str, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/socket" if transport == "ipc" else f"tcp://127.0.0.1:{free_port()}"
    listeners = Listeners()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        events = sock.get_monitor_socket(zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED)
        sock.bind(endpoint)
        assert listeners.add(_EVENT.unpack(events.recv_multipart()[0])[1])
        listeners.arm()
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(RawPeer(endpoint))
            for _ in range(3):
                assert events.poll(5000)
                events.recv_multipart()
                assert not events.poll(200)
                listeners.arm()
        sock.disable_monitor()
