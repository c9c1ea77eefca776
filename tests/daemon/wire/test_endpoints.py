"""Endpoints: the addresses that need keys, and the starts that are refused."""

import socket
from pathlib import Path
from typing import Any

import pytest
import zmq

from daemon.errors import StartError
from daemon.wire.endpoints import CurveKeys, check_endpoints
from daemon.wire.keys import make_key_pair
from daemon.wire.sockets import bind, end_context, is_open


def keys_in(folder: Path) -> CurveKeys:
    (folder / "allowed").mkdir()
    return CurveKeys(make_key_pair(folder, "server")[1], folder / "allowed")


def problems(
    intake: str = "tcp://127.0.0.1:5570",
    results: str = "tcp://127.0.0.1:5571",
    curve: CurveKeys | None = None,
) -> list[str]:
    return check_endpoints([intake], results, "ipc:///run/coserve/control.sock", curve)


LOOPBACK = "tcp://127.0.0.1:1 tcp://127.9.9.9:1 tcp://[::1]:1 tcp://localhost:1 tcp://lo:* tcp://[::ffff:127.0.0.1]:1"


@pytest.mark.parametrize("endpoint", LOOPBACK.split())
def test_loopback_is_not_open(endpoint: str) -> None:
    assert not is_open(endpoint)
    assert problems(intake=endpoint) == []


OPEN = """
    tcp://*:5570 tcp://0.0.0.0:5570 tcp://[::]:5570 tcp://192.168.1.5:5570 tcp://eth0:5570 tcp://host:1
    tcp://[::ffff:192.168.1.5]:1 tcp://[::ffff:0.0.0.0]:1 tcp://[fe80::1%eth0]:1 tcp://0:1 tcp://2130706433:1
    tcp://127.1:1 tcp://0x7f.1:1 tcp://127.0.0.1.:1 tcp://127.0.0.1;0.0.0.0:1 tcp://LOCALHOST.example:1
"""


@pytest.mark.promise(
    "Beyond this machine",
    "an open endpoint without keys | the daemon does not start, `coserve check` says so",
)
@pytest.mark.parametrize("endpoint", [*OPEN.split(), "tcp:// 127.0.0.1:1"])
def test_any_other_address_needs_keys(endpoint: str, tmp_path: Path) -> None:
    (problem,) = problems(intake=endpoint)
    assert endpoint in problem
    assert "security.server_key" in problem
    assert len(problems(results=endpoint.replace("5570", "5571"))) == 1
    assert problems(intake=endpoint, curve=keys_in(tmp_path)) == []


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("udp://127.0.0.1:1", "expected ipc://PATH or tcp://ADDRESS:PORT"),
        ("tcp://127.0.0.1", "expected ipc://PATH or tcp://ADDRESS:PORT"),
        ("tcp://127.0.0.1:70000", "tcp://127.0.0.1:70000: ports end at 65535"),
        ("ipc://@abstract", "names no file"),
        ("ipc://", "names no file"),
        ("ipc:///" + "x" * 107, "107 at most"),
    ],
)
def test_what_cannot_be_bound_is_said_with_what_was_expected(endpoint: str, expected: str) -> None:
    (problem,) = problems(intake=endpoint)
    assert problem.startswith("endpoints.intake: ")
    assert expected in problem


def test_an_endpoint_named_twice_is_a_problem() -> None:
    assert "named twice" in problems(results="tcp://127.0.0.1:5570")[0]
    assert problems(intake="tcp://127.0.0.1:*", results="tcp://127.0.0.1:*") == []


def test_localhost_that_means_another_address_here_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose /etc/hosts gives the name another address, alone or beside loopback."""
    for addresses in (["192.168.1.5"], ["127.0.0.1", "192.168.1.5"], ["fe80::1"]):
        answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, answer=answer, **__: answer)
        assert is_open("tcp://localhost:5570")
        assert "security.server_key" in problems(intake="tcp://localhost:5570")[0]


def test_a_folder_of_clients_that_everybody_may_write_into_is_a_problem(tmp_path: Path) -> None:
    curve = keys_in(tmp_path)
    curve.allowed_clients.chmod(0o777)
    assert "chmod o-w" in problems(curve=curve)[0]


def test_an_open_endpoint_is_never_bound_without_keys() -> None:
    context: zmq.Context[Any] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    with pytest.raises(StartError, match="needs CURVE"):
        bind(router, ["tcp://*:*"])
    router.close(linger=0)
    context.term()


def test_a_context_that_libzmq_does_not_end_holds_nobody_up() -> None:
    context: zmq.Context[Any] = zmq.Context()
    forgotten = zmq.Context.shadow(context).socket(zmq.PUB)  # what the context does not know it cannot close
    assert not end_context(context, within_s=0.2)
    forgotten.close()
    ended: zmq.Context[Any] = zmq.Context()
    ended.socket(zmq.PUB)
    assert end_context(ended)
